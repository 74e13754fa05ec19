"""How many blocks fit, and how much memory there is."""

from pathlib import Path

import pytest

from services.engine.memory import Budget, Pool, plan_pool
from shared.errors import ConfigError
from shared.host_memory import free_memory_bytes, parse_bytes, usable_cores

GIB, MIB = 1 << 30, 1 << 20
BLOCK = {"block_bytes": MIB, "block_size": 16}


def test_blocks_fill_the_share_of_the_budget():
    """Two workers with weights of their own: (16 GiB x 0.5 x 0.5 - 1.5 GiB) / 1 MiB."""
    budget = Budget(free_bytes=16 * GIB, fraction=0.5, share=0.5)
    pool = plan_pool(budget, shared_bytes=0, own_bytes=3 * GIB // 2, park_bytes=0, max_model_len=8192, **BLOCK)
    assert pool == Pool(2560, 0)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
def test_shared_weights_are_counted_once_per_host(num_workers: int):
    """All pools, all workspaces and one copy of the weights fill the budget, and do not exceed it."""
    budget = Budget(free_bytes=64 * GIB, fraction=0.5, share=1 / num_workers)
    sizes = {"shared_bytes": 5 * GIB, "own_bytes": 300 * MIB, "park_bytes": 256 * MIB}
    pool = plan_pool(budget, max_model_len=2048, **sizes, **BLOCK)
    used = 5 * GIB + num_workers * (300 * MIB + (pool.num_blocks + pool.num_bays) * MIB)
    assert 32 * GIB - num_workers * MIB <= used <= 32 * GIB
    assert pool.num_bays == 256


def test_a_limit_replaces_the_fraction():
    """The limit is what all workers may take, as far as the machine has it."""
    assert Budget(free_bytes=16 * GIB, fraction=0.5, limit="10GiB").total_bytes == 10 * GIB
    assert Budget(free_bytes=16 * GIB, fraction=0.5, limit="100GiB").total_bytes == int(16 * GIB * 0.95)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GiB", 4 * GIB), ("4 gib", 4 * GIB), ("1.5Gi", 3 * GIB // 2), ("500MB", 500_000_000), ("77", 77)],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int):
    """Binary and decimal units, with and without a B."""
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "4 elephants", "0", "1e999", "nan"])
def test_what_is_no_size_is_refused(text: str):
    """The message quotes it."""
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


def test_one_seq_must_fit():
    """At exactly one seq's blocks it fits, nothing being parked; one byte less is an error that says what to change."""
    sizes = {"shared_bytes": GIB, "own_bytes": GIB // 2, "park_bytes": GIB, "max_model_len": 160, **BLOCK}
    enough = GIB + GIB // 2 + 10 * MIB
    assert plan_pool(Budget(free_bytes=enough, fraction=1.0), **sizes) == Pool(10, 0)
    with pytest.raises(ConfigError, match=r"160 tokens needs 10 MiB.*--memory-fraction.*max_model_len to 144 or less"):
        plan_pool(Budget(free_bytes=enough - 1, fraction=1.0), **sizes)
    with pytest.raises(ConfigError, match=r"memory_limit 1GiB of .* MiB free, for 2 workers: 0 MiB are left"):
        plan_pool(Budget(free_bytes=enough, fraction=1.0, limit="1GiB", share=0.5), **sizes)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 16000 kB\nMemFree: 100 kB\nMemAvailable:    8000 kB\n"}


@pytest.mark.parametrize(
    ("files", "kilobytes"),
    [
        ({}, 8000),
        ({"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "1024\n"}, 8000),
        (
            {
                "sys/fs/cgroup/memory.max": f"{4096 * 1024}\n",
                "sys/fs/cgroup/memory.current": f"{3000 * 1024}\n",
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {500 * 1024}\nactive_file 7\n",
            },
            1596,
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2048 * 1024}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1024 * 1024}\n",
            },
            1024,
        ),
        (
            {
                "proc/self/cgroup": "0::/user.slice/job.scope\n",
                "sys/fs/cgroup/user.slice/memory.max": f"{3000 * 1024}\n",
                "sys/fs/cgroup/user.slice/memory.current": f"{1000 * 1024}\n",
                "sys/fs/cgroup/user.slice/job.scope/memory.max": "max\n",
                "sys/fs/cgroup/user.slice/job.scope/memory.current": f"{10 * 1024}\n",
            },
            2000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/box\n0::/\n",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2048 * 1024}\n",
                "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{48 * 1024}\n",
            },
            2000,
        ),
        (
            {
                "sys/fs/cgroup/memory.max": "1024\n",
                "sys/fs/cgroup/memory.current": "4096\n",
            },
            0,
        ),
    ],
    ids=["no container", "no limit", "cgroup 2", "cgroup 1", "a group above", "own group 1", "over the limit"],
)
def test_free_memory_is_the_least_of_what_kernel_and_container_leave(tmp_path: Path, files, kilobytes: int):
    """Clean file pages count as free."""
    assert free_memory_bytes(write(tmp_path, MEMINFO | files)) == kilobytes * 1024


def test_unknown_memory_asks_for_a_number_of_blocks(tmp_path: Path):
    """Without /proc the pool's size must be configured."""
    with pytest.raises(ConfigError, match=r"engine\.num_blocks"):
        free_memory_bytes(tmp_path)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, (1, 3, 5, 7)),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, (1, 3, 5, 7)),
        ({"sys/fs/cgroup/cpu.max": "200000 100000\n"}, (1, 3)),
        ({"sys/fs/cgroup/cpu.max": "20000 100000\n"}, (1,)),
        ({"sys/fs/cgroup/cpu.max": "900000 100000\n"}, (1, 3, 5, 7)),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/box\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            },
            (1, 3, 5),
        ),
    ],
    ids=["no container", "no quota", "two cores", "a fifth of one", "more than there are", "cgroup 1"],
)
def test_cores_are_those_of_the_cpuset_as_far_as_the_quota_goes(tmp_path: Path, files, cores):
    """A container with the time of two cores on a machine of many gets two threads, not many that are throttled."""
    assert usable_cores({7, 1, 5, 3}, write(tmp_path, files)) == cores
