"""Everybody is killed, Redis and the gateway included, while clients ask; `chaos.py` says what is judged."""

from pathlib import Path

import pytest

from tests.faults.chaos import run
from tests.faults.plan import ChaosPlan
from tests.models import make_tiny_llama
from tests.oracle.oracle import load_oracle

pytestmark = [pytest.mark.flow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(ChaosPlan(seed=5, num_requests=48, arrive_s=15.0, period_s=1.8, max_tokens=200), id="short"),
        pytest.param(ChaosPlan(seed=6, num_requests=500, arrive_s=120.0), id="long", marks=pytest.mark.full),
    ],
)
def test_no_wrong_token_no_lost_request_nothing_left_behind(tmp_path: Path, plan: ChaosPlan) -> None:
    """Every client gets the oracle's tokens, once; pools, credit, leases and Redis are back at their start."""
    model = make_tiny_llama(tmp_path / "tiny")
    report = run(plan, model, load_oracle(model), engine__num_blocks=400)
    print(report.text())
    assert not report.faults, report.text()
    assert report.findings.answered.total() == plan.num_requests
    assert report.kills["redis"] == report.kills["gateway"] == 1 or plan.num_requests > 100
    hit = ("request.lost", "seq.fetch_failed", "queue.claimed", "submission.restarts")
    assert report.findings.broken + sum(report.events[name] for name in hit), "nobody was hit in the middle"
