"""How many blocks fit, and how much memory there is."""

from pathlib import Path

import pytest

from services.engine.memory import plan_num_blocks
from shared.errors import ConfigError
from shared.host_memory import free_memory_bytes

GIB = 1 << 30
SIZES = {"weight_bytes": GIB, "workspace_bytes": GIB // 2, "block_bytes": 1 << 20, "block_size": 16}


def test_blocks_fill_the_share_of_the_budget():
    """(16 GiB x 0.5 x 0.5 - 1.5 GiB) / 1 MiB."""
    num_blocks = plan_num_blocks(free_bytes=16 * GIB, fraction=0.5, share=0.5, max_model_len=8192, **SIZES)
    assert num_blocks == 2560


def test_one_seq_must_fit():
    """At exactly one seq's blocks it fits; one block less is an error that says what to change."""
    fits = {"fraction": 1.0, "share": 1.0, "max_model_len": 160, **SIZES}
    assert plan_num_blocks(free_bytes=GIB + GIB // 2 + (10 << 20), **fits) == 10
    with pytest.raises(ConfigError, match=r"one seq of 160 tokens 10 MiB.*memory_fraction"):
        plan_num_blocks(free_bytes=GIB + GIB // 2 + (10 << 20) - 1, **fits)


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
                "sys/fs/cgroup/memory.max": "1024\n",
                "sys/fs/cgroup/memory.current": "4096\n",
            },
            0,
        ),
    ],
    ids=["no container", "no limit", "cgroup 2", "cgroup 1", "over the limit"],
)
def test_free_memory_is_the_least_of_what_kernel_and_container_leave(tmp_path: Path, files, kilobytes: int):
    """Clean file pages count as free."""
    assert free_memory_bytes(write(tmp_path, MEMINFO | files)) == kilobytes * 1024


def test_unknown_memory_asks_for_a_number_of_blocks(tmp_path: Path):
    """Without /proc the pool's size must be configured."""
    with pytest.raises(ConfigError, match=r"engine\.num_blocks"):
        free_memory_bytes(tmp_path)
