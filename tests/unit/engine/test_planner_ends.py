"""The planner: how seqs end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.fake_runner import fake_answer
from services.engine.seq import finish_reason
from services.engine.types import StepResult
from shared.messages import SamplingParams
from tests.unit.engine.helpers import BLOCK, Rig, make_spec


def test_stop_token_is_reported_and_ends_the_seq():
    """A stop token ends the answer with itself as its last token."""
    answer = fake_answer([1, 2, 3], 5)
    rig = Rig(8)
    rig.planner.add(make_spec("s", [1, 2, 3], 9, stop=(answer[4],)))
    rig.run()
    assert tuple(rig.tokens["s"]) == answer
    assert rig.finished == {"s": "stop"}


def test_more_tokens_than_one_are_cut_where_the_seq_ends():
    """A step may yield several tokens per seq; what comes after the last one is not reported."""
    rig = Rig(8)
    rig.planner.add(make_spec("s", [1], 5))
    rig.planner.add(make_spec("t", [2], 9, stop=(11,)))
    plan = rig.planner.plan()
    assert plan is not None
    out = rig.planner.commit(plan, StepResult(((10, 11, 12), (10, 11, 12))))
    assert [(o.index, o.token_ids, o.finish) for o in out.outputs] == [(0, (10, 11, 12), None), (0, (10, 11), "stop")]
    plan = rig.planner.plan()
    assert plan is not None
    assert (plan.items[0].start, plan.items[0].token_ids) == (1, (10, 11, 12))
    out = rig.planner.commit(plan, StepResult(((13, 14, 15),)))
    assert [(o.index, o.token_ids, o.finish) for o in out.outputs] == [(3, (13, 14), "length")]
    assert rig.pool.takeable == 8


def test_a_seq_ends_at_the_model_length():
    """Prompt and output together never exceed `max_model_len`."""
    rig = Rig(8, max_len=10)
    rig.planner.add(make_spec("s", range(7), 100))
    rig.run()
    assert len(rig.tokens["s"]) == 3
    assert rig.finished == {"s": "length"}


def test_a_resumed_seq_continues_the_index_and_the_text():
    """Tokens already sent are not sampled again, count towards max_tokens, and the rest is the same text."""
    rig = Rig(16)
    rig.planner.add(make_spec("r", range(6), 10, sent=4))
    out = rig.step()
    assert out is not None
    assert out.outputs[0].index == 4
    rig.run()
    assert tuple(rig.tokens["r"]) == fake_answer(range(6), 10)[4:]
    assert rig.finished == {"r": "length"}


def test_choices_of_one_prompt_differ_and_share_its_blocks():
    """Two choices hit the same prompt blocks and get their own tokens."""
    rig = Rig(16)
    rig.planner.add(make_spec("c0", range(9), 5))
    rig.step()
    rig.planner.add(make_spec("c1", range(9), 5, choice=1))
    rig.run()
    assert tuple(rig.tokens["c0"]) == fake_answer(range(9), 5)
    assert tuple(rig.tokens["c1"]) == fake_answer(range(9), 5, choice=1)
    assert rig.planner.stats().prompt_tokens_cached == 8


def test_abort_while_a_step_is_in_flight():
    """The step's blocks go back at commit, and nothing is reported of the seq; a second abort is harmless."""
    rig = Rig(8)
    rig.planner.add(make_spec("gone", range(9), 5))
    rig.planner.add(make_spec("stays", [1], 5))
    plan = rig.planner.plan()
    assert plan is not None
    rig.planner.abort(plan.items[0].seq_id)
    rig.planner.abort(plan.items[0].seq_id)
    assert rig.pool.takeable == 4
    out = rig.planner.commit(plan, rig.runner.run(plan))
    rig.planner.check()
    assert [o.seq_id for o in out.outputs] == ["stays"]
    assert out.started == ("stays",)
    assert rig.pool.takeable == 7


def test_abort_of_a_waiting_seq_and_of_a_stranger():
    """Both are legal, and leave nothing behind."""
    rig = Rig(8)
    spec = make_spec("w", [1], 5)
    rig.planner.add(spec)
    rig.planner.abort(spec.seq_id)
    rig.planner.abort(spec.seq_id)
    assert not rig.planner.has_work
    assert rig.planner.plan() is None


def test_cache_events_follow_the_blocks():
    """A full block is announced once, at the step that filled it."""
    rig = Rig(8)
    spec = make_spec("e", range(8), 2)
    rig.planner.add(spec)
    out = rig.step()
    assert out is not None
    assert [event.hashes for event in out.kv_events] == [spec.block_hashes]
    rig.planner.add(make_spec("f", range(8), 2))
    rig.run()
    assert rig.planner.drain_events() == ()


def test_without_prefix_caching_nothing_is_kept():
    """The cache can be switched off: no hits, no events, all blocks free afterwards."""
    rig = Rig(8, caching=False)
    rig.planner.add(make_spec("a", range(9), 2))
    rig.run()
    assert rig.pool.num_free == 8
    assert rig.pool.hashes() == ()


@given(
    outputs=st.lists(st.integers(0, 5), max_size=6),
    max_tokens=st.integers(1, 6),
    stop=st.sets(st.integers(0, 5), max_size=2),
    num_prompt=st.integers(1, 4),
    max_len=st.integers(5, 10),
)
def test_finish_reason_is_found_at_the_same_token_by_replay(outputs, max_tokens, stop, num_prompt, max_len):
    """Walking over the output ends where the definition says: at the first of stop and length, stop before length."""
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop))
    ends = []
    for index, token in enumerate(outputs):
        if token in stop:
            ends.append((index, "stop"))
        elif index + 1 == max_tokens or num_prompt + index + 1 == max_len:
            ends.append((index, "length"))
    got = None
    for count in range(1, len(outputs) + 1):
        reason = finish_reason(sampling, outputs[:count], num_prompt + count, max_len)
        if reason:
            got = (count - 1, reason)
            break
    assert got == (ends[0] if ends else None)


def test_one_seq_must_fit_the_pool():
    """A planner refuses limits under which a lone seq could get stuck."""
    with pytest.raises(AssertionError, match="fit the pool"):
        Rig(2, max_len=2 * BLOCK + 1)
