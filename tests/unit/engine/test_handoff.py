"""Prefill-only seqs (announce, pin, release) and landing ones (reserve, land, drop)."""

import pytest

from services.engine.fake_runner import fake_answer
from services.engine.types import Filled
from shared.messages import FirstToken
from tests.unit.engine.helpers import Rig, make_spec


def first_token(prompt, index: int = 0) -> FirstToken:
    return FirstToken(index=index, token_id=fake_answer(prompt, index + 1)[index])


def run_prefill(rig: Rig) -> list[Filled]:
    """Step until nothing runs; what was announced."""
    filled = []
    while (out := rig.step()) is not None:
        filled += out.filled
    return filled


# --- prefill only -----------------------------------------------------------------------------------


def test_blocks_are_announced_as_they_fill():
    """Chunk by chunk, each block once, the partial last one with the first token."""
    rig = Rig(16, budget=6)
    prompt = list(range(14))
    rig.planner.add(make_spec("p", prompt, 8, prefill_only=True))
    filled = run_prefill(rig)
    assert [(f.first_block, len(f.block_ids), f.last is not None) for f in filled] == [
        (0, 1, False),
        (1, 2, False),
        (3, 1, True),
    ]
    assert filled[-1].last == first_token(prompt)
    table = [block for f in filled for block in f.block_ids]
    assert rig.holds_kv(prompt, table)
    assert [d for f in filled for d in f.digests] == [rig.runner.digest(block) for block in table]
    assert rig.tokens["p"] == list(fake_answer(prompt, 1))
    assert rig.finished == {}


def test_handed_off_blocks_stay_pinned_until_release():
    """Neither growth nor new prompts get them; afterwards full blocks are cached and the partial one is free."""
    rig = Rig(4)
    spec = make_spec("p", range(10), 8, prefill_only=True)
    rig.planner.add(spec)
    run_prefill(rig)
    assert rig.pool.census()["pinned"] == 3
    assert rig.planner.stats().num_pinned_seqs == 1
    rig.planner.add(make_spec("q", range(50, 58), 2))
    assert rig.step() is None
    rig.planner.release(spec.seq_id)
    assert rig.pool.census() == {"free": 2, "held": 0, "cached": 2, "pinned": 0, "landing": 0, "quarantined": 0}
    rig.planner.release(spec.seq_id)
    rig.run()
    assert list(rig.finished) == ["q"]


def test_hits_are_announced_first_with_their_digests():
    """Cached blocks go out with the first announcement, digested if nobody did before."""
    rig = Rig(16, budget=8)
    prompt = list(range(23))
    rig.planner.add(make_spec("warm", prompt[:13], 1))
    rig.run()
    rig.planner.add(make_spec("p", prompt, 8, prefill_only=True))
    plan = rig.planner.plan()
    assert plan is not None
    assert plan.items[0].start == 12
    assert len(plan.digest_blocks) == 5
    out = rig.planner.commit(plan, rig.runner.run(plan))
    assert [(f.first_block, len(f.block_ids)) for f in out.filled] == [(0, 5)]
    last = run_prefill(rig)[-1].last
    assert last is not None
    assert last.num_cached_tokens == 12
    rig.planner.add(make_spec("again", prompt, 8, prefill_only=True))
    plan = rig.planner.plan()
    assert plan is not None
    assert len(plan.digest_blocks) == 1  # the others are remembered


def test_a_first_token_that_ends_the_seq_needs_no_handoff():
    """Finished at once: no last announcement, blocks back."""
    rig = Rig(16)
    rig.planner.add(make_spec("p", range(10), 1, prefill_only=True))
    assert run_prefill(rig) == []
    assert rig.finished == {"p": "length"}
    assert rig.pool.takeable == 16


def test_a_prefill_only_seq_is_never_preempted():
    """Growth elsewhere waits or takes from others."""
    rig = Rig(8, budget=4)
    rig.planner.add(make_spec("grows", [1] * 3, 16))
    rig.step()
    rig.planner.add(make_spec("p", range(16), 8, prefill_only=True))
    for _ in range(20):
        rig.step()
    assert rig.planner.stats().num_pinned_seqs == 1
    assert rig.planner.stats().preemptions == 0


def test_abort_of_a_handed_off_seq_frees_its_blocks():
    """Abort is as good as release for the pool."""
    rig = Rig(8)
    spec = make_spec("p", range(10), 8, prefill_only=True)
    rig.planner.add(spec)
    run_prefill(rig)
    rig.planner.abort(spec.seq_id)
    rig.planner.check()
    assert rig.pool.takeable == 8
    rig.planner.release(spec.seq_id)


def test_a_resumed_prompt_hands_off_the_next_index():
    """Tokens already sent are part of the prompt, and the first token is numbered after them."""
    rig = Rig(16)
    prompt = list(range(9))
    rig.planner.add(make_spec("p", prompt, 8, sent=4, prefill_only=True))
    filled = run_prefill(rig)
    assert filled[-1].last == first_token(prompt, 4)
    assert sum(len(f.block_ids) for f in filled) == 4


# --- landing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 8, 9])
def test_a_landed_seq_goes_on_as_if_it_had_been_computed_here(length: int):
    """One row of prompt at most is computed by the reader, and the tokens are the same."""
    rig = Rig(16)
    prompt = list(range(length))
    spec = make_spec("d", prompt, 9)
    held = rig.planner.reserve(spec)
    assert held is not None
    assert held.num_hit_blocks == 0
    assert rig.step() is None
    rig.write_kv(prompt, held.block_ids)
    assert rig.planner.land(spec.seq_id, first_token(prompt))
    rig.run()
    assert tuple(rig.tokens["d"]) == fake_answer(prompt, 9)[1:]
    assert rig.num_computed_tokens == 8
    assert rig.planner.stats().prompt_tokens_computed == 0


def test_reservation_names_hits_and_shared_blocks():
    """Blocks found by hash are not read again; those that another seq holds are named for a refund."""
    rig = Rig(16)
    prompt = list(range(8))
    rig.planner.add(make_spec("cached", range(100, 108), 1))
    rig.run()
    rig.planner.add(make_spec("holder", prompt, 8))
    rig.step()
    held = rig.planner.reserve(make_spec("d", [*prompt, 50, 51], 8, credit=5))
    assert held is not None
    assert (len(held.block_ids), held.num_hit_blocks, held.num_shared_blocks) == (3, 2, 2)
    assert rig.pool.promised == 2
    other = rig.planner.reserve(make_spec("e", range(100, 108), 8, credit=2))
    assert other is not None
    assert (other.num_hit_blocks, other.num_shared_blocks) == (2, 0)
    rig.planner.check()


def test_a_prompt_that_is_all_hits_lands_without_a_read():
    """Every block is there: nothing is landing, and the seq goes on."""
    rig = Rig(16)
    prompt = list(range(8))
    rig.planner.add(make_spec("before", prompt, 1))
    rig.run()
    spec = make_spec("d", prompt, 4)
    held = rig.planner.reserve(spec)
    assert held is not None
    assert held.num_hit_blocks == len(held.block_ids) == 2
    rig.planner.land(spec.seq_id, first_token(prompt))
    rig.run()
    assert tuple(rig.tokens["d"]) == fake_answer(prompt, 4)[1:]


def test_landed_blocks_can_be_hit():
    """The prompt's full blocks enter the prefix cache once they have landed, not before."""
    rig = Rig(16)
    prompt = list(range(9))
    spec = make_spec("d", prompt, 4)
    held = rig.planner.reserve(spec)
    assert held is not None
    assert rig.pool.hashes() == ()
    rig.write_kv(prompt, held.block_ids)
    rig.planner.land(spec.seq_id, first_token(prompt))
    assert rig.pool.hashes() == spec.block_hashes


def test_drop_gives_everything_back():
    """Reserved blocks, hits and promises return, twice is once."""
    rig = Rig(8)
    spec = make_spec("d", range(9), 4, credit=6)
    assert rig.planner.reserve(spec) is not None
    assert rig.pool.takeable == 2
    rig.planner.drop(spec.seq_id)
    rig.planner.drop(spec.seq_id)
    rig.planner.check()
    assert rig.pool.num_free == 8


def test_abort_while_landing_quarantines_until_drop():
    """The transfer may still write: the blocks are nobody's until the reader is quiet. Landing is refused."""
    rig = Rig(8)
    spec = make_spec("d", range(9), 4, credit=4)
    held = rig.planner.reserve(spec)
    assert held is not None
    rig.planner.abort(spec.seq_id)
    rig.planner.check()
    assert rig.pool.census()["quarantined"] == 3
    assert rig.pool.takeable == 5
    rig.scribble(held.block_ids)
    assert not rig.planner.land(spec.seq_id, first_token(range(9)))
    rig.planner.check()
    assert rig.pool.takeable == 8


def test_reserve_takes_back_what_is_beyond_credit():
    """The youngest seq over its credit is preempted, one within its credit and the eldest are not."""
    rig = Rig(10)
    rig.planner.add(make_spec("eldest", [0] * 4, 20, credit=1))
    rig.planner.add(make_spec("over", [1] * 4, 20, credit=1))
    rig.planner.add(make_spec("within", [2] * 4, 8, credit=3))
    for _ in range(5):
        rig.step()
    assert rig.planner.reserve(make_spec("d", range(100, 108), 8, credit=5)) is None
    assert rig.planner.stats().preemptions == 0
    held = rig.planner.reserve(make_spec("d", range(100, 108), 8, credit=4))
    assert held is not None
    rig.planner.check()
    assert rig.planner.stats().preemptions == 1
    assert rig.planner.stats().num_running == 2


def test_reserve_takes_from_lower_priority_only():
    """Without a right to the blocks, an equal is not disturbed, a lower one is."""
    rig = Rig(6)
    rig.planner.add(make_spec("runs", [0] * 13, 8))
    rig.step()
    assert rig.planner.reserve(make_spec("equal", range(9), 8)) is None
    assert rig.planner.stats().preemptions == 0
    assert rig.planner.reserve(make_spec("urgent", range(9), 8, priority=-1)) is not None
    assert rig.planner.stats().preemptions == 1


def test_the_promise_of_a_victim_counts_as_room():
    """What a lower seq was promised but never took is gained with its blocks."""
    rig = Rig(6)
    rig.planner.add(make_spec("runs", [0] * 4, 8, credit=6, priority=1))
    rig.step()
    assert rig.planner.reserve(make_spec("d", range(22), 2, priority=1)) is None
    assert rig.planner.reserve(make_spec("urgent", range(22), 2, priority=0)) is not None
    assert rig.planner.stats().preemptions == 1


def sharers(rig: Rig) -> None:
    """An eldest, and two seqs without credit that share two blocks and have one each of their own."""
    rig.planner.add(make_spec("eldest", [9], 20))
    rig.step()
    for name, tail in (("s1", 50), ("s2", 60)):
        rig.planner.add(make_spec(name, [*range(8), tail], 20))
        rig.step()
    assert rig.pool.census()["held"] == 5


def test_shared_blocks_are_gained_only_when_all_their_holders_go():
    """A reservation counts a shared block once, and only if both seqs must make room."""
    rig = Rig(7)
    sharers(rig)
    assert rig.planner.reserve(make_spec("d", range(100, 126), 2, credit=7)) is None
    assert rig.planner.stats().preemptions == 0
    assert rig.planner.reserve(make_spec("d", range(100, 114), 4, credit=4)) is not None
    assert rig.planner.stats().preemptions == 2
    rig.planner.check()


def test_hits_that_a_victim_holds_are_not_gained_as_well():
    """A block cannot be both a hit of the newcomer and room for it."""
    rig = Rig(8)
    sharers(rig)
    assert rig.planner.reserve(make_spec("d", [*range(8), *range(100, 122)], 2, credit=8)) is None
    held = rig.planner.reserve(make_spec("d", [*range(8), *range(100, 114)], 4, credit=6))
    assert held is not None
    assert held.num_hit_blocks == 2
    assert rig.planner.stats().preemptions == 2
    rig.planner.check()


def test_a_refund_for_shared_blocks_lowers_the_credit_not_the_growth():
    """Shared blocks are charged to nobody's credit: over credit is what lies beyond the rest."""
    rig = Rig(12)
    rig.planner.add(make_spec("holder", range(8), 12))
    rig.step()
    spec = make_spec("d", [*range(8), 50], 20, credit=4)
    held = rig.planner.reserve(spec)
    assert held is not None
    assert held.num_shared_blocks == 2
    assert rig.pool.promised == 1
    rig.write_kv(spec.token_ids, held.block_ids, held.num_hit_blocks)
    rig.planner.land(spec.seq_id, first_token(spec.token_ids))
    for _ in range(7):
        rig.step()
    assert rig.pool.promised == 0  # four blocks, all within credit
    free = rig.pool.takeable
    big = make_spec("big", range(100, 100 + 4 * free + 1), 2, credit=free + 1)
    assert rig.planner.reserve(big) is None
    rig.step()  # the fifth block is beyond it
    assert rig.pool.takeable == free - 1
    assert rig.planner.reserve(big) is not None
    assert rig.planner.stats().preemptions == 1


def test_reserve_by_right_waits_for_a_step_in_flight():
    """Even what is beyond credit stays with its seq while a step uses it."""
    rig = Rig(6)
    rig.planner.add(make_spec("eldest", [0] * 4, 8, credit=2))
    rig.planner.add(make_spec("over", [1] * 11, 8, credit=1))
    plan = rig.planner.plan()
    assert plan is not None
    spec = make_spec("d", range(9), 8, credit=3)
    assert rig.planner.reserve(spec) is None
    rig.note(rig.planner.commit(plan, rig.runner.run(plan)))
    assert rig.planner.reserve(spec) is not None


def test_reserve_waits_for_a_step_in_flight():
    """Blocks that a step is using are not taken; after commit they are."""
    rig = Rig(6)
    rig.planner.add(make_spec("runs", [0] * 13, 8, priority=1))
    plan = rig.planner.plan()
    assert plan is not None
    before = rig.pool.census()
    spec = make_spec("d", range(9), 8)
    assert rig.planner.reserve(spec) is None
    assert rig.pool.census() == before
    rig.note(rig.planner.commit(plan, rig.runner.run(plan)))
    assert rig.planner.reserve(spec) is not None


def test_reservations_do_not_starve_the_waiting_line():
    """A reservation passes a waiting seq only if that one would still fit."""
    rig = Rig(8)
    rig.planner.add(make_spec("waits", range(17), 4))
    assert rig.planner.reserve(make_spec("d", range(50, 64), 4)) is None
    assert rig.planner.reserve(make_spec("d", range(50, 60), 4)) is not None
    out = rig.step()
    assert out is not None
    assert out.started == ("waits",)


def test_landings_leave_the_eldest_its_next_block():
    """However many reservations ask, by right or not, the eldest gets a row in each step while all of them are still
    landing, until it has used the room that was left to it."""
    rig = Rig(32)
    rig.planner.add(make_spec("eldest", [0] * 4, 24, credit=1))
    rig.step()
    landing = 0
    for count in range(1, 25):
        for credit in (0, 3):
            spec = make_spec(f"d{count}.{credit}", range(100 * count, 100 * count + 9), 2, credit=credit)
            landing += rig.planner.reserve(spec) is not None
        if len(rig.tokens["eldest"]) <= 4 * 4:
            rig.step()
            assert len(rig.tokens["eldest"]) == count + 1
    assert landing >= 8
    assert rig.planner.stats().num_landing == landing


def test_a_landed_seq_can_be_preempted_and_finishes_with_the_same_tokens():
    """Once it runs it is a seq like any other: what is lost is computed here, and counted as such."""
    rig = Rig(8)
    rig.planner.add(make_spec("local", [9] * 4, 20))
    rig.step()
    prompt = list(range(9))
    spec = make_spec("d", prompt, 14)
    held = rig.planner.reserve(spec)
    assert held is not None
    rig.write_kv(prompt, held.block_ids)
    rig.planner.land(spec.seq_id, first_token(prompt))
    rig.run()
    stats = rig.planner.stats()
    assert stats.preemptions > 0
    assert tuple(rig.tokens["d"]) == fake_answer(prompt, 14)[1:]
    assert stats.prompt_tokens_computed == 4
    assert stats.extra["tokens_recomputed"] > 0
