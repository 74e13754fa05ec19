"""What the scheduler has in flight: its own books, corrected by what Redis says of the workers.

Redis owns the decode credit; the ledger adds what was dispatched since the last `refresh`. Seqs and queued prompt
tokens are counted from dispatch until the request ends or, on the prefill worker, until decode has taken over.
`reconcile` compares with what Redis says a worker holds: it learns of finished prefills, of requests that an earlier
scheduler dispatched, and of ends whose message was lost.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.scheduler.placement import Candidate, Placement
from shared.ids import BlockCount, Incarnation, RequestId, TokenCount
from shared.messages import Registration
from shared.roster import WorkerView


@dataclass(slots=True)
class _InFlight:
    """A dispatched request."""

    epoch: int
    placement: Placement
    number: int | None = None  # of its confirmation, in order; None while Redis has not answered
    prefilled: bool = False  # decode has taken over, the prefill worker is done with it

    def num_seqs_on(self, incarnation: Incarnation) -> int:
        """A prompt is one seq, and its choices are one each."""
        return self.placement.num_seqs if incarnation == self.placement.decode else 1

    def holders(self) -> tuple[Incarnation, ...]:
        p = self.placement
        return (p.decode,) if p.prefill is None or self.prefilled else (p.decode, p.prefill)


@dataclass(slots=True)
class _Load:
    """One worker, as the ledger knows it."""

    registration: Registration
    takes_work: bool
    credit_taken: int
    num_seqs: int = 0
    prefill_tokens: int = 0
    num_inherited: int = 0  # held by the worker, dispatched by an earlier scheduler

    def candidate(self) -> Candidate:
        r = self.registration
        return Candidate(
            incarnation=r.incarnation,
            role=r.role,
            fingerprint=r.fingerprint,
            protocol=r.protocol,
            block_size=r.block_size,
            num_blocks=BlockCount(r.num_blocks),
            max_model_len=TokenCount(r.max_model_len),
            max_num_seqs=r.max_num_seqs,
            free_blocks=BlockCount(max(0, r.num_blocks - self.credit_taken)),
            num_seqs=self.num_seqs + self.num_inherited,
            prefill_tokens=TokenCount(self.prefill_tokens),
        )


class Ledger:
    """Owns the scheduler's picture of the workers. `check()` proves that the sums are those of the requests."""

    def __init__(self) -> None:
        self._loads: dict[Incarnation, _Load] = {}
        self._in_flight: dict[RequestId, _InFlight] = {}
        self._confirmed = 0

    def epoch_of(self, request_id: RequestId) -> int:
        """Epoch under which the request is in flight; 0 = it is not."""
        known = self._in_flight.get(request_id)
        return known.epoch if known else 0

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_workers(self) -> int:
        """Workers that take new work."""
        return sum(load.takes_work for load in self._loads.values())

    @property
    def num_confirmed(self) -> int:
        """Dispatches of all time: marks a moment for `reconcile`."""
        return self._confirmed

    def refresh(self, views: Sequence[WorkerView]) -> None:
        """Take over what Redis says: who is there, who takes work, how much credit is taken."""
        seen = {view.registration.incarnation for view in views}
        for incarnation in [i for i in self._loads if i not in seen]:
            del self._loads[incarnation]
        for view in views:
            incarnation = view.registration.incarnation
            takes_work = view.alive and not view.draining
            load = self._loads.get(incarnation)
            if load is None:
                self._loads[incarnation] = load = _Load(view.registration, takes_work, view.credit_taken)
                self._recount(incarnation, load)
            else:
                load.takes_work, load.credit_taken = takes_work, view.credit_taken

    def reconcile(self, incarnation: Incarnation, held: Collection[tuple[RequestId, int]], confirmed: int) -> None:
        """Compare with what the worker holds by Redis' word.

        :param held: (request, epoch) of all tasks that the worker has and has not given up.
        :param confirmed: `num_confirmed` before `held` was read: later ones are not judged by it.
        """
        load = self._loads.get(incarnation)
        if load is None:
            return
        theirs = set(held)
        for request_id, known in list(self._in_flight.items()):
            if incarnation not in known.holders():
                continue
            if (request_id, known.epoch) in theirs:
                theirs.discard((request_id, known.epoch))
            elif known.number is not None and known.number <= confirmed:
                self._not_held(request_id, known, incarnation)
        load.num_inherited = sum(self.epoch_of(request_id) != epoch for request_id, epoch in theirs)

    def _not_held(self, request_id: RequestId, known: _InFlight, incarnation: Incarnation) -> None:
        if incarnation == known.placement.decode:
            self.forget(request_id)
            return
        self._count(known, -1)
        known.prefilled = True
        self._count(known, +1)

    def candidates(self) -> list[Candidate]:
        """Workers that may get work."""
        return [load.candidate() for load in self._loads.values() if load.takes_work]

    def incarnations(self) -> list[Incarnation]:
        """All workers that are not buried."""
        return list(self._loads)

    def fingerprints(self) -> frozenset[str]:
        """Kinds of pools among the workers that may get work."""
        return frozenset(load.registration.fingerprint for load in self._loads.values() if load.takes_work)

    def block_size(self) -> int:
        """Tokens per block of the workers; 0 = none is there, or they differ."""
        sizes = {load.registration.block_size for load in self._loads.values()}
        return sizes.pop() if len(sizes) == 1 else 0

    def registration(self, incarnation: Incarnation) -> Registration:
        return self._loads[incarnation].registration

    def take(self, request_id: RequestId, epoch: int, placement: Placement) -> None:
        """A request is being dispatched. Booked before Redis is told, as its end may be heard of before the answer."""
        self.forget(request_id)
        self._in_flight[request_id] = known = _InFlight(epoch, placement)
        self._count(known, +1)
        if decode := self._loads.get(placement.decode):
            decode.credit_taken += placement.credit_blocks

    def confirm(self, request_id: RequestId, epoch: int) -> None:
        """Redis has written the dispatch; ignored where the request has ended already."""
        known = self._in_flight.get(request_id)
        if known is not None and known.epoch == epoch:
            self._confirmed += 1
            known.number = self._confirmed

    def forget(self, request_id: RequestId, before_epoch: int | None = None) -> None:
        """A request ended, was refused, or went back to the queue with `before_epoch`. Unknown ones are ignored. The
        credit comes back with the next `refresh`."""
        known = self._in_flight.get(request_id)
        if known is None or (before_epoch is not None and known.epoch >= before_epoch):
            return
        del self._in_flight[request_id]
        self._count(known, -1)

    def drain(self, incarnation: Incarnation) -> None:
        """The worker takes nothing new from now on."""
        if load := self._loads.get(incarnation):
            load.takes_work = False

    def bury(self, incarnation: Incarnation) -> None:
        """The worker is dead. What it had in flight ends or is queued again by its own messages."""
        self._loads.pop(incarnation, None)

    def check(self) -> None:
        """Assert that each worker's sums are those of the requests in flight on it."""
        for incarnation, load in self._loads.items():
            fresh = _Load(load.registration, load.takes_work, load.credit_taken)
            self._recount(incarnation, fresh)
            assert (load.num_seqs, load.prefill_tokens) == (fresh.num_seqs, fresh.prefill_tokens), incarnation

    def _recount(self, incarnation: Incarnation, load: _Load) -> None:
        """Sum up over all requests: for a worker that comes into view again, and for `check`."""
        mine = [known for known in self._in_flight.values() if incarnation in known.holders()]
        load.num_seqs = sum(k.num_seqs_on(incarnation) for k in mine)
        load.prefill_tokens = sum(k.placement.uncached_tokens for k in mine if self._computer(k) == incarnation)

    @staticmethod
    def _computer(known: _InFlight) -> Incarnation | None:
        """Who still has the prompt to compute, as far as is known."""
        return None if known.prefilled else known.placement.prefill or known.placement.decode

    def _count(self, known: _InFlight, sign: int) -> None:
        for incarnation in known.holders():
            if load := self._loads.get(incarnation):
                load.num_seqs += sign * known.num_seqs_on(incarnation)
        computer = self._computer(known)
        if computer is not None and (load := self._loads.get(computer)):
            load.prefill_tokens += sign * known.placement.uncached_tokens
