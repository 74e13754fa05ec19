"""Placement: who gets a request, at every threshold and over random fleets."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.placement import Candidate, Demand, Placement, Unplaceable, place
from shared.config import SchedulerConfig
from shared.ids import BlockCount, Incarnation, TokenCount

CONFIG = SchedulerConfig(min_handoff_tokens=17, growth_tokens=32)


def worker(name: str, role: str, **changes: object) -> Candidate:
    base = Candidate(
        incarnation=Incarnation(name),
        role=role,  # type: ignore[arg-type]
        fingerprint="f",
        protocol=1,
        block_size=16,
        num_blocks=BlockCount(100),
        max_model_len=TokenCount(1600),
        max_num_seqs=8,
        free_blocks=BlockCount(100),
        num_seqs=0,
        prefill_tokens=TokenCount(0),
    )
    return replace(base, **changes)


def demand(prompt: int, new: int = 32) -> Demand:
    return Demand(TokenCount(prompt), TokenCount(new))


P0, P1 = worker("p0", "prefill"), worker("p1", "prefill")
D0, D1 = worker("d0", "decode"), worker("d1", "decode")


def placed(want: Demand, fleet: list[Candidate], hits: dict[str, int] | None = None) -> Placement:
    known = {Incarnation(name): BlockCount(blocks) for name, blocks in (hits or {}).items()}
    answer = place(want, fleet, known, CONFIG)
    assert isinstance(answer, Placement), answer
    return answer


@pytest.mark.parametrize(
    ("prompt", "decode_hits", "handed_off"),
    [(16, 0, False), (17, 0, True), (32, 1, False), (33, 1, True), (176, 10, False), (177, 10, True), (160, 10, False)],
)
def test_handoff_needs_enough_uncached_tokens(prompt: int, decode_hits: int, handed_off: bool) -> None:
    """A prompt stays on decode while fewer than min_handoff_tokens of it are uncached there, to the token."""
    got = placed(demand(prompt), [P0, D0], {"d0": decode_hits})
    assert (got.prefill == "p0") is handed_off
    assert got.uncached_tokens == (prompt if handed_off else max(1, prompt - 16 * decode_hits))


@pytest.mark.parametrize("change", [{"fingerprint": "g"}, {"protocol": 2}, {"block_size": 8}])
def test_an_unequal_pair_is_never_routed(change: dict[str, object]) -> None:
    """A prefill worker with another pool, protocol or block size gets nothing; decode computes the prompt itself."""
    assert placed(demand(200), [replace(P0, **change), D0]).prefill is None


def test_without_a_prefill_worker_decode_does_all() -> None:
    """Aggregated mode is the same code path."""
    assert placed(demand(200), [D0]) == Placement(Incarnation("d0"), None, BlockCount(15), TokenCount(200))


def test_nobody_there_means_wait() -> None:
    """Without a decode worker a request waits, whatever it needs."""
    assert place(demand(200), [], {}, CONFIG) is None
    assert place(demand(10**6), [P0], {}, CONFIG) is None


@pytest.mark.parametrize(
    ("prompt", "new", "credit"), [(1, 1, 1), (16, 0, 1), (16, 1, 2), (40, 8, 3), (40, 9, 4), (40, 500, 5)]
)
def test_credit_covers_prompt_and_bounded_growth(prompt: int, new: int, credit: int) -> None:
    """Credit is blocks for the whole prompt and at most growth_tokens more, whatever is cached."""
    assert placed(demand(prompt, new), [D0], {"d0": 2}).credit_blocks == credit


def test_credit_is_taken_to_the_last_block() -> None:
    """A worker with exactly enough credit is chosen, one block less means wait."""
    assert placed(demand(40), [replace(D0, free_blocks=BlockCount(5))]).credit_blocks == 5
    assert place(demand(40), [replace(D0, free_blocks=BlockCount(4))], {}, CONFIG) is None


def test_what_can_never_fit_is_unplaceable() -> None:
    """A request that no idle worker could finish is refused with a reason, to the token."""
    small = replace(D0, num_blocks=BlockCount(10), free_blocks=BlockCount(0))
    assert place(demand(100, 60), [small], {}, CONFIG) is None
    answer = place(demand(100, 61), [small], {}, CONFIG)
    assert isinstance(answer, Unplaceable)
    assert "161 tokens" in answer.reason
    assert "160" in answer.reason
    too_long = place(demand(1601, 1), [D0], {}, CONFIG)
    assert isinstance(too_long, Unplaceable)
    assert "1600" in too_long.reason
    assert place(demand(100, 61), [small, replace(D1, free_blocks=BlockCount(0))], {}, CONFIG) is None


def test_the_context_limit_bounds_the_demand() -> None:
    """max_tokens beyond the context does not make a request unplaceable: it ends at the limit."""
    assert placed(demand(1590, 5000), [D0]).credit_blocks == 100


def test_decode_is_the_least_loaded() -> None:
    """Load is the fuller of batch and pool."""
    assert placed(demand(40), [replace(D0, num_seqs=4), D1]).decode == "d1"
    assert placed(demand(40), [D0, replace(D1, free_blocks=BlockCount(50))]).decode == "d0"
    assert placed(demand(40), [replace(D0, num_seqs=4), replace(D1, free_blocks=BlockCount(20))]).decode == "d0"


def test_hits_decide_only_among_equals() -> None:
    """Prefix hits break a near-tie of load, and never draw a request to a worker that is clearly busier."""
    big = [replace(D0, max_num_seqs=100, num_seqs=10), replace(D1, max_num_seqs=100)]
    assert placed(demand(200), big, {"d0": 10}).decode == "d0"
    assert placed(demand(200), [replace(big[0], num_seqs=11), big[1]], {"d0": 10}).decode == "d1"


def test_a_batch_has_a_bounded_queue() -> None:
    """A worker with twice its batch gets nothing more."""
    assert place(demand(40), [replace(D0, num_seqs=16)], {}, CONFIG) is None
    assert placed(demand(40), [replace(D0, num_seqs=15)]).decode == "d0"


def test_prefill_is_who_computes_least_before_this_prompt_is_done() -> None:
    """Queued tokens and hits are weighed in the same unit."""
    busy = replace(P0, prefill_tokens=TokenCount(100))
    assert placed(demand(200), [busy, P1, D0]).prefill == "p1"
    assert placed(demand(200), [busy, P1, D0], {"p0": 6}).prefill == "p1"
    assert placed(demand(200), [busy, P1, D0], {"p0": 7}).prefill == "p0"


def test_prefill_needs_a_pool_for_the_whole_prompt() -> None:
    """A prefill worker whose pool is smaller than the prompt is passed over."""
    small = replace(P0, num_blocks=BlockCount(12))
    assert placed(demand(192), [small, D0]).prefill == "p0"
    assert placed(demand(193), [small, D0]).prefill is None


def test_a_request_with_nothing_left_to_say_is_not_handed_off() -> None:
    """A resumed request whose last token is already out only needs its end."""
    assert placed(demand(200, 0), [P0, D0]).prefill is None


candidates = st.builds(
    worker,
    st.sampled_from([f"w{i}" for i in range(8)]),
    st.sampled_from(["prefill", "decode"]),
    fingerprint=st.sampled_from("fg"),
    protocol=st.sampled_from([1, 2]),
    num_blocks=st.integers(1, 40),
    free_blocks=st.integers(0, 40),
    num_seqs=st.integers(0, 20),
    max_model_len=st.sampled_from([64, 320, 1600]),
    prefill_tokens=st.integers(0, 500),
).map(lambda c: replace(c, free_blocks=min(c.free_blocks, c.num_blocks)))


@given(
    st.integers(1, 700),
    st.integers(0, 700),
    st.lists(candidates, max_size=8, unique_by=lambda c: c.incarnation),
    st.dictionaries(st.sampled_from([f"w{i}" for i in range(8)]), st.integers(0, 40)),
)
def test_every_placement_could_be_served(
    prompt: int, new: int, fleet: list[Candidate], hits: dict[Incarnation, BlockCount]
) -> None:
    """Over random fleets: placed only where it fits, refused only where it never could, waiting only otherwise."""
    decoders = [c for c in fleet if c.role == "decode"]

    def ever(c: Candidate) -> bool:
        return prompt <= c.max_model_len and ceil(min(prompt + new, c.max_model_len) / 16) <= c.num_blocks

    def now(c: Candidate) -> bool:
        credit = ceil(min(prompt + min(new, 32), c.max_model_len) / 16)
        return ever(c) and credit <= c.free_blocks and c.num_seqs < 16

    answer = place(demand(prompt, new), fleet, hits, CONFIG)
    if isinstance(answer, Unplaceable):
        assert decoders
        assert not any(map(ever, decoders))
    elif answer is None:
        assert not any(map(now, decoders))
        assert not decoders or any(map(ever, decoders))
    else:
        by_name = {c.incarnation: c for c in fleet}
        decode = by_name[answer.decode]
        assert decode.role == "decode"
        assert now(decode)
        left = max(1, prompt - 16 * hits.get(answer.decode, 0))
        if answer.prefill is None:
            pairs = [
                c
                for c in fleet
                if c.role == "prefill" and (c.fingerprint, c.protocol) == (decode.fingerprint, decode.protocol)
            ]
            fitting = [c for c in pairs if prompt <= min(c.max_model_len, 16 * c.num_blocks)]
            assert left < 17 or new == 0 or not fitting
        else:
            prefill = by_name[answer.prefill]
            assert left >= 17
            assert prefill.role == "prefill"
            assert (prefill.fingerprint, prefill.protocol) == (decode.fingerprint, decode.protocol)
