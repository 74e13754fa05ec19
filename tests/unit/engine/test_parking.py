"""Preempted seqs whose KV waits in host memory."""

import pytest

from services.engine.block_pool import BlockPool
from services.engine.calibration import worth_parking
from services.engine.fake_runner import fake_answer
from services.engine.parking import Parking
from services.engine.planner import Planner
from services.engine.types import SeqId
from shared.cost import CostModel
from tests.unit.engine.helpers import BLOCK, Rig, make_spec


def crowded(*, bays: int, caching: bool = False) -> Rig:
    """Three seqs that outgrow their pool; run to their ends."""
    rig = Rig(8, bays=bays, caching=caching)
    for name in "abc":
        rig.planner.add(make_spec(name, [ord(name)] * 5, 14))
    rig.run()
    for name in "abc":
        assert tuple(rig.tokens[name]) == fake_answer([ord(name)] * 5, 14)
    return rig


@pytest.mark.parametrize("caching", [True, False])
def test_a_parked_seq_goes_on_where_it_stopped(caching: bool):
    """No token is computed twice, the answers are the same, and all room is given back."""
    stats = crowded(bays=8, caching=caching).planner.stats()
    assert stats.extra["preemptions_parked"] == stats.preemptions > 0
    assert stats.extra["tokens_recomputed"] == 0
    assert stats.extra["blocks_parked"] == 0


def test_without_room_to_park_it_is_computed_again():
    """The same preemptions cost rows, and the answers are the same."""
    stats = crowded(bays=0).planner.stats()
    assert stats.extra["preemptions_recomputed"] == stats.preemptions > 0
    assert stats.extra["tokens_recomputed"] > 0


def test_a_seq_is_parked_whole_or_not_at_all():
    """With fewer bays than blocks nothing is kept."""
    stats = crowded(bays=1).planner.stats()
    assert stats.extra["tokens_recomputed"] > 0
    assert stats.extra["blocks_parked"] == 0


def test_an_aborted_seq_gives_its_bays_back():
    """Also before the copy has been made."""
    rig = Rig(6, bays=6, caching=False)
    rig.planner.add(make_spec("runs", [0] * 13, 8))
    rig.step()
    assert rig.planner.reserve(make_spec("urgent", range(9), 8, priority=-1)) is not None
    assert rig.planner.stats().extra["blocks_parked"] == 4
    rig.planner.abort(SeqId("runs"))
    rig.planner.check()
    assert rig.planner.stats().extra["blocks_parked"] == 0
    assert len(rig.planner.take_moves()) == 4


@pytest.mark.parametrize(("copy_s_per_byte", "parked"), [(1e-12, True), (1e-3, False)])
def test_whichever_is_cheaper_is_done(copy_s_per_byte: float, parked: bool):
    """The cost model decides: fast copies are made, slow ones are not worth it."""
    costs = CostModel()
    for count in (10, 100):
        costs.prefill.observe(0.001 * count, count, count * count / 2)
        costs.transfer.observe(copy_s_per_byte * count * 1000, count * 1000)
    pool = BlockPool(8, BLOCK)
    parking = Parking(8, lambda num_tokens, num_blocks: worth_parking(costs, 1000, num_tokens, num_blocks))
    rig = Rig(8, caching=False)
    rig.pool, rig.planner = pool, Planner(pool, rig.limits, parking)
    for name in "abc":
        rig.planner.add(make_spec(name, [ord(name)] * 5, 14))
    rig.run()
    stats = rig.planner.stats()
    assert stats.preemptions > 0
    assert stats.extra["preemptions_parked"] == (stats.preemptions if parked else 0)
