"""`.run/<port>/`: what one `baton up` keeps on disk. state.json is written atomically, by the supervisor only."""

import fcntl
import os
import tempfile
from pathlib import Path

import msgspec

from services.cli.errors import CommandError
from services.cli.procinfo import ProcessId

MAX_SOCKET_PATH = 100  # a unix socket's path has room for 107 bytes


class ServiceState(msgspec.Struct, frozen=True):
    name: str
    state: str
    pid: int  # 0 = not running
    start: int
    restarts: int
    url: str  # base URL of /health, /ready and /metrics; "" for redis


class RunState(msgspec.Struct, frozen=True):
    """What `status`, `down` and a second `up` know of a running stack."""

    pid: int  # of the supervisor
    start: int
    phase: str  # starting | ready | stopping
    url: str
    redis_url: str
    model: str = ""
    started_at: float = 0.0  # seconds since the epoch
    services: tuple[ServiceState, ...] = ()

    @property
    def supervisor(self) -> ProcessId:
        return ProcessId(self.pid, self.start)


def home() -> Path:
    """The project's folder, or the current one where Baton was installed as a wheel."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").exists() else Path.cwd()


def base_folder() -> Path:
    return home() / ".run"


class RunDir:
    """Paths, lock and state of the stack on one port."""

    def __init__(self, port: int, base: Path | None = None) -> None:
        self.port = port
        self.path = (base or base_folder()) / str(port)
        self.logs = self.path / "logs"
        self.redis = self.path / "redis"
        self.sockets = self.path / "sockets"
        self._state = self.path / "state.json"
        self._lock: int | None = None

    @staticmethod
    def all(base: Path | None = None) -> list["RunDir"]:
        base = base or base_folder()
        return [RunDir(int(p.parent.name), base) for p in sorted(base.glob("[0-9]*/state.json"))]

    def acquire(self) -> None:
        """Make the folders and take the lock, held until this process (and a fork of it) ends.

        :raises CommandError: another `up` holds it.
        """
        try:
            for folder in (self.path, self.logs, self.redis, self.sockets):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as exc:
            raise CommandError(f"cannot write {exc.filename}: {exc.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            state = self.load()
            pid = f" (pid {state.pid})" if state else ""
            raise CommandError(
                f"Baton already runs on port {self.port}{pid}; './baton down --port {self.port}' stops it"
            ) from None

    @property
    def worker_sockets(self) -> str:
        """Folder for the workers' own sockets; "" if its path leaves no room for their names."""
        return str(self.sockets) if len(os.fsencode(self.sockets)) <= MAX_SOCKET_PATH - 40 else ""

    def socket_path(self, name: str) -> Path:
        """Where a unix socket goes: here, or in a private temporary folder if this path is too long for one."""
        path = self.sockets / name
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
            return path
        return Path(tempfile.mkdtemp(prefix="baton-")) / name

    def clear_sockets(self) -> None:
        """Sockets of an earlier run that was killed; only for the holder of the lock."""
        for path in self.sockets.glob("*.sock"):
            path.unlink(missing_ok=True)

    def load(self) -> RunState | None:
        try:
            return msgspec.json.decode(self._state.read_bytes(), type=RunState)
        except (OSError, msgspec.DecodeError):
            return None

    def save(self, state: RunState) -> None:
        fresh = self._state.with_suffix(".new")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(state))
        fresh.replace(self._state)

    def clear(self) -> None:
        self._state.unlink(missing_ok=True)
