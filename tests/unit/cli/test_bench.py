"""`baton bench kernels` as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.bench import Ceilings
from kernels.decoder import is_available
from kernels.ops import body_name
from services.engine.bench import COLUMNS, WIDTHS, doubt

ROOT = Path(__file__).resolve().parents[3]


def cells(line: str) -> dict[str, str]:
    """A table row by its columns."""
    found, at = {}, 0
    for name, width in zip(COLUMNS, WIDTHS, strict=True):
        found[name] = line[at : at + width].strip()
        at += width + 1
    return found


class SomeCeilings(Ceilings):
    """Of one thread 10 GOP/s; of two as it is told."""

    def __init__(self, of_two: float) -> None:
        self.gops = lambda kind, num_threads: 10.0 if num_threads == 1 else of_two


@pytest.mark.parametrize(
    ("of_two", "highest", "said"),
    [
        (19.0, 1.05, ""),
        (19.0, 1.3, "a share of 130 % is above its ceiling"),
        (9.0, 0.8, "2 threads did less float32 than one"),
    ],
)
def test_a_busy_machine_is_noticed(of_two: float, highest: float, said: str):
    """By what cannot be: an op above its ceiling, or two threads that do less than one."""
    warning = doubt(SomeCeilings(of_two), 2, highest)
    assert said in warning
    assert bool(warning) == bool(said)


@pytest.mark.skipif(not is_available(), reason="the extension is not built")
def test_every_op_has_a_line_with_its_time_and_its_share():
    """Ceilings first, then every op that a step of the model has, with positive figures that agree with each other."""
    argv = [sys.executable, "-m", "services.cli", "bench", "kernels", "--threads", "1", "--repeats", "1"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    ceilings, _, columns, *lines = done.stdout.splitlines()
    assert re.search(r"float32 \d+ GOP/s, int8 \d+ GOP/s, int16 \d+ GOP/s; reading memory", ceilings)
    assert columns.split() == " ".join(COLUMNS).split()
    rows = [cells(line) for line in lines]
    ops = ["linear q4 qkv", "linear q4 o, add", "linear q4 gate_up, silu", "linear q4 down, add", "linear q8 LM head"]
    ops += ["embedding q8", "rms_norm", "rms_norm + prepare q4", "prepare q4", "prepare q8", "rope", "silu_mul"]
    ops += [f"store_kv {dtype}" for dtype in ("float32", "float16", "bfloat16", "int8", "fp8")]
    ops += [f"paged_attention {dtype}" for dtype in ("float32", "float16", "bfloat16", "int8", "fp8")]
    ops += ["gelu_mul", "draw_tokens", "draw_tokens top-k top-p", "tell_logprobs top 5", "adjust_logits", "mask_logits"]
    ops += ["sample greedy", "sample drawn", "block_digest", "decode step", "prefill chunk"]
    assert set(ops) <= {row["op"] for row in rows}
    measured = body_name() == "avx2"  # elsewhere no ceiling is known
    for row in rows:
        assert float(row["us"]) > 0
        assert row["data"] in ("cold", "warm")
        assert (row["of"] != "-") == measured
    products = [row for row in rows if row["op"].startswith("linear")]
    for row in products:
        num_rows, inputs, outputs = map(int, re.findall(r"\d+", row["shape"]))
        want = 2 * num_rows * inputs * outputs / float(row["us"]) / 1e3
        assert float(row["GOP/s"]) == pytest.approx(want, rel=0.05, abs=0.1)
