"""Requests that wait for dispatch, in the order in which they are served.

A request is due when it arrives, plus `level_s` seconds for each number of its priority: a lower priority number is
served first, but a level is worth no more than that time, so nobody is overtaken for ever. A resumed request, which a
client sees already, counts one level better. The queue is bounded; what does not fit stays in Redis, which holds the
truth, and is fetched later.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

from services.scheduler.placement import Demand
from shared.clock import Clock
from shared.hashing import block_hash
from shared.ids import BlockHash, RequestId, TokenCount
from shared.messages import RequestState


@dataclass(frozen=True, slots=True)
class Waiting:
    """What placement needs of a request; its tokens stay in Redis."""

    request_id: RequestId
    epoch: int
    priority: int
    demand: Demand
    root_hash: BlockHash
    block_hashes: tuple[BlockHash, ...]  # of full blocks of prompt and tokens already sent


def waiting_of(state: RequestState, block_size: int) -> Waiting:
    """The numbers of a queued request. Hashes of a resumed one cover what it has said so far, as a worker that held it
    may still have those blocks."""
    request = state.request
    left = max(0, request.sampling.max_tokens - min(map(len, state.outputs)))
    # Choices that have parted are no one prompt any more, and logprobs of a prompt go out with its first token.
    whole = not state.others and (request.sampling.prompt_logprobs is None or request.sampling.max_tokens == 1)
    hashes = request.block_hashes
    if state.output and block_size > 0:
        hashes = _extend(hashes, request.root_hash, state.token_ids, block_size)
    return Waiting(
        request_id=request.request_id,
        epoch=state.epoch,
        priority=request.priority,
        demand=Demand(
            TokenCount(len(state.token_ids)),
            TokenCount(left),
            request.num_choices,
            len(request.token_ids),
            may_hand_off=whole,
        ),
        root_hash=request.root_hash,
        block_hashes=hashes,
    )


def _extend(
    hashes: tuple[BlockHash, ...], root: BlockHash, token_ids: tuple[int, ...], block_size: int
) -> tuple[BlockHash, ...]:
    """`hashes` and those of the full blocks that follow them."""
    chain = list(hashes)
    for start in range(len(chain) * block_size, len(token_ids) - block_size + 1, block_size):
        chain.append(block_hash(chain[-1] if chain else root, token_ids[start : start + block_size]))
    return tuple(chain)


_Key = tuple[float, int, int, RequestId]
"""Due, priority, arrival."""


class WaitingQueue:
    """Owns the order. One entry per request, of the highest epoch seen."""

    def __init__(self, max_waiting: int, clock: Clock, level_s: float) -> None:
        assert max_waiting > 0
        assert level_s > 0
        self._max_waiting, self._clock, self._level_s = max_waiting, clock, level_s
        self._order: list[_Key] = []
        self._by_id: dict[RequestId, tuple[_Key, Waiting]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def has_space(self) -> bool:
        """Less than half full: worth fetching what was left in Redis."""
        return 2 * len(self._order) < self._max_waiting

    def epoch_of(self, request_id: RequestId) -> int:
        """Epoch under which the request waits here; 0 = it does not."""
        entry = self._by_id.get(request_id)
        return entry[1].epoch if entry else 0

    def push(self, waiting: Waiting) -> bool:
        """Add a request, or replace it by a higher epoch. False: the queue is full, nothing changed. A repeat or a
        lower epoch is accepted and changes nothing."""
        known = self.epoch_of(waiting.request_id)
        if known >= waiting.epoch:
            return True
        if known == 0 and len(self._order) >= self._max_waiting:
            return False
        self.remove(waiting.request_id)
        self._arrivals += 1
        level = waiting.priority - (waiting.epoch > 1)
        due = self._clock.now() + level * self._level_s
        key = (due, level, self._arrivals, waiting.request_id)
        insort(self._order, key)
        self._by_id[waiting.request_id] = (key, waiting)
        return True

    def remove(self, request_id: RequestId) -> None:
        """Forget a request; unknown ones are ignored."""
        entry = self._by_id.pop(request_id, None)
        if entry is not None:
            del self._order[bisect_left(self._order, entry[0])]

    def heads(self, count: int) -> list[Waiting]:
        """The next ones to be served, in order."""
        return [self._by_id[key[3]][1] for key in self._order[:count]]
