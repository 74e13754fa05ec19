"""The queue of requests that wait for dispatch."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.placement import Demand
from services.scheduler.waiting import Waiting, WaitingQueue, waiting_of
from shared.hashing import block_hashes
from shared.ids import RequestId, TokenCount
from shared.messages import RequestState
from tests.unit.scheduler.cell import request_of


def waiting(name: str, epoch: int = 1, priority: int = 0) -> Waiting:
    return Waiting(
        RequestId(name), epoch, priority, Demand(TokenCount(1), TokenCount(1)), request_of(name).root_hash, ()
    )


operation = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 9), st.integers(1, 3), st.integers(-1, 1)),
    st.tuples(st.just("remove"), st.integers(0, 9), st.just(0), st.just(0)),
)


@given(st.lists(operation, max_size=60))
def test_order_is_priority_then_epoch_then_arrival(operations: list[tuple[str, int, int, int]]) -> None:
    """Against a sorted list: bounded, one entry per request, the highest epoch wins."""
    queue, model = WaitingQueue(6), {}
    for arrival, (kind, name, epoch, priority) in enumerate(operations):
        request_id = RequestId(str(name))
        if kind == "remove":
            queue.remove(request_id)
            model.pop(request_id, None)
            continue
        known = model.get(request_id)
        is_full = known is None and len(model) == 6
        assert queue.push(waiting(request_id, epoch, priority)) is not is_full
        if not is_full and (known is None or known[1] > -epoch):
            model[request_id] = (priority, -epoch, arrival)
        want = sorted(model, key=lambda r: model[r])
        assert [w.request_id for w in queue.heads(100)] == want
        assert [w.request_id for w in queue.heads(2)] == want[:2]
        assert len(queue) == len(want)


def test_a_resumed_request_asks_for_what_it_has_said_too() -> None:
    """Hashes of a resumed request cover prompt and output, as if they were one prompt; what is left shrinks."""
    request = request_of("r", num_tokens=40, max_tokens=100)
    state = RequestState(request=request, epoch=2, output=tuple(range(500, 530)))
    got = waiting_of(state, block_size=16)
    assert got.demand == Demand(TokenCount(70), TokenCount(70))
    assert got.block_hashes == block_hashes(request.root_hash, state.token_ids, 16)
    assert len(got.block_hashes) == 4
    tiny = waiting_of(RequestState(request=request_of("s", num_tokens=3), epoch=2, output=tuple(range(40))), 16)
    assert len(tiny.block_hashes) == 2
