"""The planner: who gets rows, who waits, who is preempted."""

import pytest

from services.engine.fake_runner import fake_answer
from services.engine.seq import ARRIVALS_PER_LEVEL
from shared.messages import FirstToken
from tests.unit.engine.helpers import Rig, make_spec


def rows(plan) -> dict[str, int]:
    """Rows per seq of a plan, in its order."""
    return {str(item.seq_id): len(item.token_ids) for item in plan.items}


@pytest.mark.parametrize("budget", [1, 3, 5, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_answers_do_not_depend_on_chunking_or_caching(budget: int, caching: bool):
    """The same tokens come out whatever the chunk size, with and without prefix hits."""
    rig = Rig(32, budget=budget, caching=caching)
    prompts = {"a": range(13), "b": [*range(8), 99], "c": [5], "d": range(16)}
    for name, prompt in prompts.items():
        rig.planner.add(make_spec(name, prompt, 9))
    rig.run()
    assert {name: tuple(got) for name, got in rig.tokens.items()} == {
        name: fake_answer(prompt, 9) for name, prompt in prompts.items()
    }
    assert set(rig.finished.values()) == {"length"}


def test_decode_rows_go_first_then_chunks_then_newcomers():
    """Under the budget a running answer keeps its row while prompts are cut to what is left."""
    rig = Rig(32, budget=6)
    rig.planner.add(make_spec("short", [1, 2], 9))
    rig.step()
    rig.planner.add(make_spec("long", range(20), 9))
    rig.planner.add(make_spec("next", range(50, 60), 9))
    plan = rig.planner.plan()
    assert plan is not None
    assert rows(plan) == {"short": 1, "long": 5}
    rig.note(rig.planner.commit(plan, rig.runner.run(plan)))
    for want in ({"short": 1, "long": 5}, {"short": 1, "long": 5}, {"short": 1, "long": 5}):
        plan = rig.planner.plan()
        assert plan is not None
        assert rows(plan) == want
        assert plan.items[1].sample is None or plan.items[1].start + 5 == 20
        rig.note(rig.planner.commit(plan, rig.runner.run(plan)))
    plan = rig.planner.plan()
    assert plan is not None
    assert rows(plan) == {"short": 1, "long": 1, "next": 4}


def test_a_step_that_has_enough_of_prompts_takes_no_further_one():
    """So the first prompt's token does not wait for the others; a prompt that is too short is given company."""
    rig = Rig(64, budget=24, prompts_until=8)
    rig.planner.add(make_spec("short", [1, 2, 3], 9))
    rig.planner.add(make_spec("long", range(10, 40), 9))
    rig.planner.add(make_spec("next", range(50, 60), 9))
    steps: list[dict[str, int]] = []
    for _ in range(4):
        plan = rig.planner.plan()
        assert plan is not None
        steps.append(rows(plan))
        rig.note(rig.planner.commit(plan, rig.runner.run(plan)))
    assert steps == [
        {"short": 3, "long": 21},
        {"short": 1, "long": 9},
        {"short": 1, "long": 1, "next": 10},
        {"short": 1, "long": 1, "next": 1},
    ]


@pytest.mark.parametrize("seqs", [2, 8])
def test_answers_go_on_while_the_first_in_rank_can_not_start(seqs: int):
    """It waits for a seat, or for a block that it has no right to; those that run lack a block each, and none is over
    its credit. They would wait for each other."""
    rig = Rig(4, seqs=seqs)
    rig.planner.add(make_spec("a", range(8), 6, credit=2))
    rig.planner.add(make_spec("b", range(20, 28), 6, credit=2))
    rig.step()
    rig.planner.add(make_spec("urgent", [1], 6, priority=-1))
    rig.run()
    assert rig.finished == dict.fromkeys(("a", "b", "urgent"), "length")


def test_no_more_seqs_run_than_seats():
    """`max_num_seqs` bounds the seqs of a step."""
    rig = Rig(32, seqs=2)
    for name in "abc":
        rig.planner.add(make_spec(name, [ord(name)], 3))
    plan = rig.planner.plan()
    assert plan is not None
    assert rows(plan) == {"a": 1, "b": 1}
    assert rig.planner.stats().num_waiting == 1


def test_waiting_order_is_priority_then_arrival():
    """A later seq of a better priority starts first."""
    rig = Rig(32, seqs=1)
    rig.planner.add(make_spec("first", [1], 1))
    rig.planner.add(make_spec("second", [2], 1))
    rig.planner.add(make_spec("urgent", [3], 1, priority=-1))
    rig.run()
    assert list(rig.finished) == ["urgent", "first", "second"]


def test_a_head_that_does_not_fit_is_not_overtaken():
    """Small seqs behind a large one wait with it, so that it is not starved."""
    rig = Rig(8)
    rig.planner.add(make_spec("runs", range(18), 8))
    rig.step()
    rig.planner.add(make_spec("large", range(100, 116), 2))
    rig.planner.add(make_spec("small", [7], 1))
    rig.step()
    assert rig.planner.stats().num_waiting == 2
    rig.run()
    assert next(iter(rig.finished)) == "runs"


def test_a_prefix_hit_is_not_computed_again():
    """A second seq computes only what follows the cached blocks, at least one row, and says how much was cached."""
    rig = Rig(16)
    rig.planner.add(make_spec("one", range(12), 1))
    rig.run()
    rig.planner.add(make_spec("two", range(12), 1))
    plan = rig.planner.plan()
    assert plan is not None
    assert (plan.items[0].start, rows(plan)) == (8, {"two": 4})
    out = rig.planner.commit(plan, rig.runner.run(plan))
    assert out.outputs[0].num_cached_tokens == 8
    assert out.outputs[0].token_ids == fake_answer(range(12), 1)
    assert out.started == ("two",)
    assert rig.planner.stats().prompt_tokens_cached == 8
    assert rig.planner.stats().prompt_tokens_computed == 16


def test_generated_tokens_can_be_hit_too():
    """A chat's next turn hits the blocks of the last answer."""
    rig = Rig(16)
    rig.planner.add(make_spec("turn1", range(6), 8))
    rig.run()
    follow_up = [*range(6), *rig.tokens["turn1"], 1, 2, 3]
    rig.planner.add(make_spec("turn2", follow_up, 2))
    plan = rig.planner.plan()
    assert plan is not None
    assert plan.items[0].start == 12  # 13 tokens have KV: the last sampled one was never fed


def test_growth_preempts_the_youngest_which_then_finishes_with_the_same_tokens():
    """A full pool takes blocks from the last comer; its answer is unchanged and no token comes twice."""
    rig = Rig(8)
    for name in "abc":
        rig.planner.add(make_spec(name, [ord(name)] * 5, 14))
    rig.run()
    stats = rig.planner.stats()
    assert stats.preemptions > 0
    assert next(iter(rig.finished)) == "a"
    for name in "abc":
        assert tuple(rig.tokens[name]) == fake_answer([ord(name)] * 5, 14)
    assert stats.output_tokens == 3 * 14
    assert stats.prompt_tokens_computed == 15


def test_recomputed_hits_are_not_counted_again():
    """A resumed seq that finds its own blocks cached does not report more cached tokens."""
    rig = Rig(8)
    outs = []
    for name in "ab":
        rig.planner.add(make_spec(name, [ord(name)] * 9, 14))
    while rig.planner.has_work:
        out = rig.step()
        assert out is not None
        outs += out.outputs
    assert rig.planner.stats().preemptions > 0
    assert {out.num_cached_tokens for out in outs} == {0}
    assert rig.planner.stats().prompt_tokens_cached == 0


def test_higher_priority_is_never_preempted_for_lower():
    """The urgent late-comer keeps its blocks; the earlier, less urgent seq is preempted."""
    rig = Rig(6)
    rig.planner.add(make_spec("slow", [1] * 7, 12, priority=5))
    rig.step()
    rig.planner.add(make_spec("fast", [2] * 7, 12))
    rig.run()
    assert rig.planner.stats().preemptions > 0
    assert list(rig.finished) == ["fast", "slow"]


def test_the_youngest_of_the_lowest_priority_is_preempted_first():
    """Among two seqs of one low priority the later one gives way, whatever came after them with a better one."""
    rig = Rig(12)
    for name, priority in (("best", 0), ("low1", 2), ("low2", 2), ("good", 1)):
        rig.planner.add(make_spec(name, [ord(name[-1])] * 7, 13, priority=priority))
    order = []
    while rig.planner.has_work:
        running = {str(seq) for seq in rig.running()}
        rig.step()
        order += sorted(running - {str(seq) for seq in rig.running()} - rig.finished.keys())
    assert order[:2] == ["low2", "low1"]
    for name in ("best", "low1", "low2", "good"):
        assert tuple(rig.tokens[name]) == fake_answer([ord(name[-1])] * 7, 13)


def test_a_stream_of_urgent_seqs_does_not_starve_a_patient_one():
    """A level of priority is worth a number of arrivals: after so many urgent newcomers it is the patient one's turn,
    and it keeps its turn until it ends."""
    rig = Rig(5, seqs=2)
    rig.planner.add(make_spec("patient", [1] * 5, 10, priority=1))
    for count in range(2 * ARRIVALS_PER_LEVEL):
        rig.planner.add(make_spec(f"urgent{count}", [2 + count] * 7, 10))
        for _ in range(10):
            rig.step()
        if "patient" in rig.finished:
            break
    assert rig.finished["patient"] == "length"
    assert rig.planner.stats().preemptions > 0
    assert tuple(rig.tokens["patient"]) == fake_answer([1] * 5, 10)


def test_growth_beyond_credit_does_not_touch_promised_blocks():
    """A seq over its credit waits while the other still grows within its own, and is preempted rather than it."""
    rig = Rig(8)
    rig.planner.add(make_spec("eldest", [0] * 4, 12, credit=4))
    rig.planner.add(make_spec("over", [1] * 4, 24, credit=1))
    rig.planner.add(make_spec("within", [2] * 4, 8, credit=3))
    rig.step()
    assert rig.pool.promised == 3 + 0 + 2
    while "within" not in rig.finished:
        out = rig.step()
        assert out is not None
        assert out.num_preempted == 0
    rig.run()
    assert list(rig.finished) == ["within", "eldest", "over"]
    assert {name: tuple(got) for name, got in rig.tokens.items()} == {
        "eldest": fake_answer([0] * 4, 12),
        "over": fake_answer([1] * 4, 24),
        "within": fake_answer([2] * 4, 8),
    }


def test_a_waiting_seq_takes_its_credit_back_from_those_over_theirs():
    """Starting within credit preempts what grew beyond it, but never the eldest."""
    rig = Rig(8)
    rig.planner.add(make_spec("eldest", [0] * 4, 20, credit=3))
    rig.planner.add(make_spec("over", [1] * 7, 20, credit=1))
    for _ in range(6):
        rig.step()
    assert rig.planner.stats().num_running == 2
    rig.planner.add(make_spec("new", [2] * 8, 2, credit=3))
    out = rig.step()
    assert out is not None
    assert out.num_preempted == 1
    assert out.started == ("new",)
    rig.run()
    assert len(rig.finished) == 3


def test_the_eldest_takes_from_those_within_their_credit_rather_than_wait():
    """With nobody over credit behind it, the eldest still goes on at every step."""
    rig = Rig(6)
    rig.planner.add(make_spec("eldest", [0] * 4, 16, credit=1))
    rig.planner.add(make_spec("within", [1] * 4, 12, credit=4))
    for count in range(1, 17):
        rig.step()
        assert len(rig.tokens["eldest"]) == count
    assert rig.planner.stats().preemptions > 0
    rig.run()
    assert tuple(rig.tokens["within"]) == fake_answer([1] * 4, 12)


def test_the_eldest_takes_from_those_over_credit_first():
    """A younger seq within its credit keeps its blocks as long as another behind is over."""
    rig = Rig(8)
    rig.planner.add(make_spec("eldest", [0] * 4, 16, credit=1))
    rig.planner.add(make_spec("over", [1] * 8, 9, credit=1))
    rig.planner.add(make_spec("within", [2] * 4, 12, credit=4))
    for count in range(1, 13):
        rig.step()
        assert (len(rig.tokens["eldest"]), len(rig.tokens["within"])) == (count, count)
    assert rig.planner.stats().preemptions == 1


def test_more_credit_than_the_pool_has_still_starts():
    """A promise is cut to the pool; the seq must not wait for blocks that do not exist."""
    rig = Rig(4)
    rig.planner.add(make_spec("s", range(6), 3, credit=100))
    rig.run()
    assert rig.finished == {"s": "length"}


def test_a_newcomer_does_not_take_the_block_that_a_running_seq_needs_next():
    """It waits instead of being preempted as soon as it has started."""
    rig = Rig(4)
    rig.planner.add(make_spec("runs", [0] * 7, 5))
    rig.step()
    rig.planner.add(make_spec("new", [1] * 5, 2))
    rig.run()
    assert rig.planner.stats().preemptions == 0
    assert list(rig.finished) == ["runs", "new"]


def test_a_preempted_seq_goes_before_its_equals_in_the_line():
    """What has run once resumes before what arrived earlier but never started."""
    rig = Rig(5, seqs=1)
    rig.planner.add(make_spec("runs", [0] * 4, 16))
    rig.step()
    rig.planner.add(make_spec("waits", [1] * 4, 1))
    landed = make_spec("landed", [2] * 4, 3)
    held = rig.planner.reserve(landed)
    assert held is not None
    rig.write_kv(landed.token_ids, held.block_ids)
    rig.planner.land(landed.seq_id, FirstToken(index=0, token_id=fake_answer([2] * 4, 1)[0]))
    rig.run()
    assert rig.planner.stats().preemptions == 1
    assert list(rig.finished) == ["runs", "landed", "waits"]
