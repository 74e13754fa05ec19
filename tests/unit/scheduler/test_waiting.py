"""The queue of requests that wait for dispatch."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.placement import Demand
from services.scheduler.waiting import Waiting, WaitingQueue, waiting_of
from shared.clock import ManualClock
from shared.hashing import block_hashes
from shared.ids import RequestId, TokenCount
from shared.messages import RequestState
from tests.unit.scheduler.cell import request_of


def waiting(name: str, epoch: int = 1, priority: int = 0) -> Waiting:
    return Waiting(
        RequestId(name), epoch, priority, Demand(TokenCount(1), TokenCount(1)), request_of(name).root_hash, ()
    )


operation = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 9), st.integers(1, 3), st.integers(-1, 1), st.floats(0, 20)),
    st.tuples(st.just("remove"), st.integers(0, 9), st.just(0), st.just(0), st.just(0.0)),
)


@given(st.lists(operation, max_size=60))
def test_order_is_by_due_time(operations: list[tuple[str, int, int, int, float]]) -> None:
    """Against a sorted list of arrival plus ten seconds a level: bounded, one entry per request, the highest epoch
    wins, and a resumed request counts one level better."""
    clock = ManualClock()
    queue, model, epochs = WaitingQueue(6, clock, 10.0), {}, {}
    for arrival, (kind, name, epoch, priority, pause) in enumerate(operations):
        clock.advance(pause)
        request_id = RequestId(str(name))
        if kind == "remove":
            queue.remove(request_id)
            model.pop(request_id, None)
            continue
        known = model.get(request_id)
        is_full = known is None and len(model) == 6
        assert queue.push(waiting(request_id, epoch, priority)) is not is_full
        if not is_full and (known is None or epochs[request_id] < epoch):
            level = priority - 1 if epoch > 1 else priority
            model[request_id], epochs[request_id] = (clock.now() + 10.0 * level, level, arrival), epoch
        want = sorted(model, key=lambda r: model[r])
        assert [w.request_id for w in queue.heads(100)] == want
        assert [w.request_id for w in queue.heads(2)] == want[:2]
        assert len(queue) == len(want)


def test_a_stream_of_better_requests_does_not_starve_a_worse_one() -> None:
    """One urgent request arrives each second and one is served each second: a request three levels worse waits for
    thirty seconds' worth of them and no longer."""
    clock = ManualClock()
    queue = WaitingQueue(4096, clock, 10.0)
    queue.push(waiting("patient", priority=3))
    for second in range(60):
        queue.push(waiting(f"urgent-{second}"))
        served = queue.heads(1)[0].request_id
        queue.remove(served)
        if served == "patient":
            assert second == 31  # of equals, the better level goes first
            return
        clock.advance(1.0)
    raise AssertionError("starved")


def test_a_resumed_request_asks_for_what_it_has_said_too() -> None:
    """Hashes of a resumed request cover prompt and output, as if they were one prompt; what is left shrinks."""
    request = request_of("r", num_tokens=40, max_tokens=100)
    state = RequestState(request=request, epoch=2, output=tuple(range(500, 530)))
    got = waiting_of(state, block_size=16)
    assert got.demand == Demand(TokenCount(70), TokenCount(70), num_shared_tokens=40)
    assert got.block_hashes == block_hashes(request.root_hash, state.token_ids, 16)
    assert len(got.block_hashes) == 4
    tiny = waiting_of(RequestState(request=request_of("s", num_tokens=3), epoch=2, output=tuple(range(40))), 16)
    assert len(tiny.block_hashes) == 2
