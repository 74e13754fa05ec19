"""`baton bench kernels` as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from kernels.decoder import is_available

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(not is_available(), reason="the extension is not built")
def test_every_op_has_a_line_with_its_time_and_its_share():
    """Ceilings first, then linear layers in each format and attention, with numbers that agree with each other."""
    argv = [sys.executable, "-m", "services.cli", "bench", "kernels", "--threads", "1", "--repeats", "1"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    ceilings, columns, *rows = done.stdout.splitlines()
    assert "int8" in ceilings
    assert columns.split() == ["op", "shape", "us", "GB/s", "GOP/s", "of", "the", "ceiling"]
    assert [row[:20].strip() for row in rows] == (
        ["linear f32"] * 3 + ["linear q8"] * 3 + ["linear q4"] * 3 + ["attention float32", "attention float16"] * 3
    )
    for row in rows[:9]:
        num_rows = int(row[20:].split()[0])
        microseconds, _, gops, share, _ = row[43:].split()
        assert float(gops) == pytest.approx(2 * num_rows * 576 * 1536 / float(microseconds) / 1e3, rel=0.05, abs=0.1)
        assert float(share) > 0
