"""Clients leave in every phase of a request, on real processes."""

from pathlib import Path

import anyio
import pytest

from tests.faults.cancels import SETTINGS, phases, run
from tests.flow.stack import Stack
from tests.models import make_tiny_llama

pytestmark = [pytest.mark.flow, pytest.mark.timeout(240)]


@pytest.mark.parametrize("count", [80, pytest.param(300, marks=pytest.mark.full)])
def test_clients_that_leave_give_everything_back(tmp_path: Path, count: int) -> None:
    """Queued, dispatched, prefilling, decoding: no block, credit or lease stays behind."""
    model = make_tiny_llama(tmp_path / "tiny")
    with Stack(prefill=1, decode=1, model__path=model, **SETTINGS) as stack:
        anyio.run(run, stack, count, 3)
        stack.wait_idle(60.0)
        found = phases(stack)
    assert count / 2 < found.total() <= count, "the others left before their request was read"
    for phase in ("queued", "dispatched", "prefilling or handing over", "decoding"):
        assert found[phase], f"nobody left while {phase}: {found}"
