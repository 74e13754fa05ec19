"""Clients leave in every phase of a request, on real processes."""

from pathlib import Path

import anyio
import pytest

from tests.faults.cancels import SETTINGS, phases, run
from tests.flow.stack import Stack
from tests.models import make_tiny_llama

pytestmark = [pytest.mark.flow, pytest.mark.timeout(240)]


PHASES = {"queued", "dispatched", "prefilling or handing over", "decoding"}


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.full)])
def test_clients_that_leave_give_everything_back(tmp_path: Path, count: int) -> None:
    """No block, credit or lease stays behind; more clients come until some have left in every phase."""
    model = make_tiny_llama(tmp_path / "tiny")
    seen: set[str] = set()
    with Stack(prefill=1, decode=1, model__path=model, **SETTINGS) as stack:
        for seed in range(8):
            anyio.run(run, stack, count, seed)
            stack.wait_idle(60.0)
            seen |= set(phases(stack))
            if seen >= PHASES:
                return
    pytest.fail(f"nobody left while {PHASES - seen}")
