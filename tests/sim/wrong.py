"""Methods with a bug in them, for `mutants.py` to plant."""

from dataclasses import replace
from typing import Any

from services.decode.job import Job, Phase
from services.decode.worker import DecodeWorker
from services.gateway.streams import RequestStream, Streams
from services.prefix_index.index import PrefixIndex
from services.scheduler.ledger import Ledger
from services.transfer.fetch import Fetch
from services.transfer.offers import OfferBook
from shared.bus import RedisReader
from shared.ids import Incarnation
from shared.leases import Leases
from shared.messages import ReleaseAnswer, Tokens
from shared.roster import Roster
from shared.worker_link import WorkerLink

_refund = DecodeWorker._refund
_expired = Leases.expired
_heartbeat = Roster.heartbeat
_load = Leases.load
_take_lease = Leases.accept


async def no_full_refund(self: DecodeWorker, request_id: Any, epoch: int, blocks: int | None) -> None:
    if blocks is not None:
        await _refund(self, request_id, epoch, blocks)


def stale_without_refund(self: DecodeWorker, request_id: Any, epoch: int) -> None:
    self.cancel(request_id, epoch, "stale")


_queue_of_leases: dict[str, None] = {}


async def expired_by_fifo(self: Leases) -> Any:
    """The oldest entry blocks all others."""
    everything = await self._link.call(lambda: self._link.client.zrange(self._keys.leases(), 0, -1))
    for key in [key for key in _queue_of_leases if key.encode() not in everything]:
        del _queue_of_leases[key]
    for member in everything:
        _queue_of_leases.setdefault(member.decode())
    found = await _expired(self)
    head = next(iter(_queue_of_leases), None)
    return [pair for pair in found if pair[0] == head]


async def expired_or_not(self: Leases) -> Any:
    members = await self._link.call(lambda: self._link.client.zrange(self._keys.leases(), 0, -1))
    return [(admitted.request_id, admitted.epoch) for admitted in await self._with_epochs(members)]


def always_held(self: OfferBook, release: Any, reader: Any) -> ReleaseAnswer:
    offer = self.find((release.request_id, release.epoch))
    if offer is not None and offer.is_open:
        offer.end("released", "")
    return ReleaseAnswer(request_id=release.request_id, epoch=release.epoch, answer="held")


async def release_unconfirmed(self: Fetch, link: Any) -> None:
    link.post(self._release_message())


_decode_end = DecodeWorker._end


def end_drops(self: DecodeWorker, job: Job, refund: bool) -> None:
    _decode_end(self, job, refund)
    if job.phase is Phase.LANDING:
        self._engine.drop(job.seq_id)


async def load_without_log(self: Leases, request_id: Any) -> Any:
    state = await _load(self, request_id)
    return None if state is None else type(state)(request=state.request, epoch=state.epoch)


async def accept_in_silence(self: Leases, *args: Any, in_vain: bool = False) -> Any:
    return await _take_lease(self, *args)


def accept_any_epoch(self: RequestStream, event: Any, now: float) -> None:
    if isinstance(event, Tokens) and event.epoch < self.epoch and self.is_open:
        self._accept_tokens(event, now)
        return
    _accept(self, event, now)


_accept = RequestStream.accept


def accept_repeats(self: RequestStream, event: Tokens, now: float) -> None:
    self._take(event.choice, list(event.token_ids), now)


async def state_of_now(self: WorkerLink, task: Any) -> Any:
    state = await self._leases.load(task.request_id)
    return state if state is not None and state.epoch == task.epoch else None


async def heartbeat_always(self: Roster, incarnation: Any) -> bool:
    await _heartbeat(self, incarnation)
    return True


_index_apply = PrefixIndex.apply


def apply_over_gaps(self: PrefixIndex, message: Any) -> bool:
    worker = self._workers.get(message.incarnation)
    if worker is not None and message.seq > worker.last_seq:
        worker.last_seq = message.seq - 1
    return _index_apply(self, message)


async def everybody(self: Roster) -> Any:
    members = await self._link.call(lambda: self._link.client.zrange(self._keys.workers(), 0, -1))
    return [Incarnation(member.decode()) for member in members]


_command = RedisReader._command


def read_from_where_it_was(self: RedisReader, block_ms: int) -> Any:
    self._outages, self._began_at = self._link.outages, self._clock.now()
    return _command(self, block_ms)


_close = Streams.close


def close_without_cancel(self: Streams, stream: RequestStream, *, cancel: str = "") -> None:
    _close(self, stream)


async def do_nothing(self: Any, *_args: Any) -> None:
    return None


def ignore(self: Any, *_args: Any) -> None:
    return None


_candidates = Ledger.candidates


def candidates_without_end(self: Ledger) -> Any:
    """As if all of every worker were free."""
    return [replace(one, free_blocks=one.num_blocks) for one in _candidates(self)]
