"""Planted bugs. Each one must make some seed fail; one that survives shows a hole in the simulation.

Where two guards stand behind one another (an epoch and a random attempt id; a digest and a source's `held`), taking one
away alone changes nothing that anybody could see: such mutants take both, or break what the guard itself promises.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from services.decode.job import Job, Phase
from services.decode.worker import DecodeWorker
from services.gateway.keeper import Keeper
from services.gateway.streams import RequestStream, Streams
from services.prefill.worker import PrefillWorker
from services.prefix_index.index import PrefixIndex
from services.scheduler.reaper import Reaper
from services.transfer.fetch import Fetch
from services.transfer.landing import Ticket
from services.transfer.offers import OfferBook
from shared.ids import Incarnation
from shared.leases import Leases
from shared.messages import ReleaseAnswer, Tokens
from shared.roster import Roster
from shared.scripts import sources
from shared.worker_link import WorkerLink
from tests.sim.plan import Plan, draw


@dataclass(frozen=True)
class Mutant:
    """A bug, and the faults under which it should show."""

    name: str
    kinds: tuple[str, ...] | None = None  # faults to draw from; None = all
    script: str = ""
    old: str = ""
    new: str = ""
    patches: tuple[tuple[Any, str, Any], ...] = ()
    leavers: float = 0.1
    sizes: tuple[tuple[str, int], ...] = ()  # of the plan

    def plan(self, seed: int, num_requests: int) -> Plan:
        plan = draw(seed, num_requests, kinds=self.kinds, every_s=0.4, pace=10, leavers=self.leavers)
        return replace(plan, thorough=True, **dict(self.sizes))

    def overrides(self) -> dict[str, str]:
        if not self.script:
            return {}
        text = sources()[self.script]
        assert self.old in text, f"mutant {self.name}: the script has changed"
        return {self.script: text.replace(self.old, self.new)}

    @contextmanager
    def planted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, replacement in self.patches:
                assert hasattr(owner, name), f"mutant {self.name}: {name} is gone"
                stack.enter_context(patch.object(owner, name, replacement))
            yield


def lua(
    name: str,
    script: str,
    old: str,
    new: str = "",
    kinds: Sequence[str] | None = None,
    patches: tuple[tuple[Any, str, Any], ...] = (),
) -> Mutant:
    return Mutant(name, None if kinds is None else tuple(kinds), script, old, new, patches)


def python(name: str, owner: Any, attribute: str, replacement: Any, kinds: Sequence[str] | None = None) -> Mutant:
    return Mutant(name, None if kinds is None else tuple(kinds), patches=((owner, attribute, replacement),))


def few_attempts(name: str, old: str, new: str) -> Mutant:
    return Mutant(name, ("crash", "bad_steps"), "requeue", old, new, sizes=(("max_attempts", 3),))


# --- replacements ---------------------------------------------------------------------------------

_refund = DecodeWorker._refund
_expired = Leases.expired
_heartbeat = Roster.heartbeat
_load = Leases.load


async def _no_full_refund(self: DecodeWorker, request_id: Any, epoch: int, blocks: int | None) -> None:
    if blocks is not None:
        await _refund(self, request_id, epoch, blocks)


def _stale_without_refund(self: DecodeWorker, request_id: Any, epoch: int) -> None:
    self.cancel(request_id, epoch, "stale")


_queue_of_leases: dict[str, None] = {}


async def _expired_by_fifo(self: Leases) -> Any:
    """The oldest entry blocks all others."""
    everything = await self._link.call(lambda: self._link.client.zrange(self._keys.leases(), 0, -1))
    for key in [key for key in _queue_of_leases if key.encode() not in everything]:
        del _queue_of_leases[key]
    for member in everything:
        _queue_of_leases.setdefault(member.decode())
    found = await _expired(self)
    head = next(iter(_queue_of_leases), None)
    return [pair for pair in found if pair[0] == head]


async def _expired_or_not(self: Leases) -> Any:
    members = await self._link.call(lambda: self._link.client.zrange(self._keys.leases(), 0, -1))
    return [(admitted.request_id, admitted.epoch) for admitted in await self._with_epochs(members)]


def _always_held(self: OfferBook, release: Any, reader: Any) -> ReleaseAnswer:
    offer = self.find((release.request_id, release.epoch))
    if offer is not None and offer.is_open:
        offer.end("released", "")
    return ReleaseAnswer(request_id=release.request_id, epoch=release.epoch, answer="held")


async def _release_unconfirmed(self: Fetch, link: Any) -> None:
    link.post(self._release_message())


_decode_end = DecodeWorker._end


def _end_drops(self: DecodeWorker, job: Job, refund: bool) -> None:
    _decode_end(self, job, refund)
    if job.phase is Phase.LANDING:
        self._engine.drop(job.seq_id)


async def _load_without_log(self: Leases, request_id: Any) -> Any:
    state = await _load(self, request_id)
    return None if state is None else type(state)(request=state.request, epoch=state.epoch)


def _accept_any_epoch(self: RequestStream, event: Any, now: float) -> None:
    if isinstance(event, Tokens) and event.epoch < self.epoch and self.is_open:
        self._accept_tokens(event, now)
        return
    _accept(self, event, now)


_accept = RequestStream.accept


def _accept_repeats(self: RequestStream, event: Tokens, now: float) -> None:
    self._take(list(event.token_ids), now)


async def _state_of_now(self: WorkerLink, task: Any) -> Any:
    state = await self._leases.load(task.request_id)
    return state if state is not None and state.epoch == task.epoch else None


async def _heartbeat_always(self: Roster, incarnation: Any) -> bool:
    await _heartbeat(self, incarnation)
    return True


_index_apply = PrefixIndex.apply


def _apply_over_gaps(self: PrefixIndex, message: Any) -> bool:
    worker = self._workers.get(message.incarnation)
    if worker is not None and message.seq > worker.last_seq:
        worker.last_seq = message.seq - 1
    return _index_apply(self, message)


async def _everybody(self: Roster) -> Any:
    members = await self._link.call(lambda: self._link.client.zrange(self._keys.workers(), 0, -1))
    return [Incarnation(member.decode()) for member in members]


_close = Streams.close


def _close_without_cancel(self: Streams, stream: RequestStream, *, cancel: str = "") -> None:
    _close(self, stream)


async def _do_nothing(self: Any, *_args: Any) -> None:
    return None


def _ignore(self: Any, *_args: Any) -> None:
    return None


# --- the list -------------------------------------------------------------------------------------

CRASHES = ("crash", "freeze", "partition")
NAPS = ("nap",)
ISLANDS = ("island",)

MUTANTS: tuple[Mutant, ...] = (
    lua(
        "emit asks for no fence",
        "emit",
        "if not live or r[1] ~= ARGV[a + 1] or r[2] ~= ARGV[a + 2] then",
        "if not live then",
        NAPS,
    ),
    lua("emit goes on after the end", "emit", "if not live or r[1]", "if r[1]"),
    lua(
        "emit appends what the log has",
        "emit",
        "string.sub(ARGV[a + 4], (have - index) * 4 + 1)",
        "ARGV[a + 4]",
    ),
    lua("producers trim", "emit", "return out", "redis.call('XTRIM', KEYS[1], 'MAXLEN', 3)\nreturn out"),
    lua(
        "complete keeps the credit",
        "complete",
        "if credit then redis.call('HINCRBY', KEYS[6], 'taken', -credit) end\nredis.call('HDEL', KEYS[7], held)",
    ),
    lua("complete forgets one of the two books", "complete", "redis.call('HDEL', KEYS[7], held)"),
    lua(
        "complete asks for no fence",
        "complete",
        "if r[2] ~= ARGV[2] or r[3] ~= ARGV[3] then return 0 end",
        "",
        ISLANDS,
    ),
    lua("complete leaves the request open", "complete", "redis.call('SREM', KEYS[9], ARGV[1])"),
    lua("cancel misses prefill", "cancel", "if ARGV[3] ~= '-' then", "if false then"),
    lua("cancel misses decode", "cancel", "redis.call('XADD', KEYS[8], '*', 'm', ARGV[5])"),
    lua("cancel leaves it in the queue", "cancel", "redis.call('ZREM', KEYS[2], ARGV[1])"),
    lua("cancel keeps the lease", "cancel", "redis.call('ZREM', KEYS[3], ARGV[1])"),
    lua(
        "accept asks for no fence",
        "accept",
        "if r[2] ~= ARGV[2] or r[3] ~= ARGV[3] then return 0 end",
        "",
        NAPS,
    ),
    lua(
        "accept lets prefill take the lease back", "accept", "if r[1] == 'decode' and ARGV[5] == 'prefill'", "if false"
    ),
    lua(
        "requeue without a marker",
        "requeue",
        "redis.call('XADD', KEYS[4], '*', 'm', cmsgpack",
        "local _ = (cmsgpack",
        CRASHES,
    ),
    lua("requeue at the same epoch", "requeue", "tonumber(ARGV[2]) + 1\n", "tonumber(ARGV[2])\n", CRASHES),
    Mutant(
        "the reaper takes live leases",
        (),
        "requeue",
        "if not deadline or tonumber(deadline) >",
        "if not deadline or 0 >",
        ((Leases, "expired", _expired_or_not),),
    ),
    lua(
        "requeue tells nobody", "requeue", "redis.call('XADD', KEYS[8], '*', 'm', ARGV[8])", "", ("freeze", "partition")
    ),
    lua("dispatch for a deposed scheduler", "dispatch", "return 'deposed'", "local _ = 0", ("usurp", "freeze")),
    lua("dispatch takes no credit", "dispatch", "redis.call('HINCRBY', KEYS[4], 'taken', ARGV[6])"),
    lua("dispatch leaves it in the queue", "dispatch", "redis.call('ZREM', KEYS[2], ARGV[1])"),
    lua("a refund that can be had twice", "refund", "redis.call('HDEL', KEYS[2], ARGV[1])", "local _ = 0"),
    lua("a burial that fences nobody", "bury", "redis.call('HSET', KEYS[2], 'state', 'dead')", "", CRASHES),
    python("no refund on cancel", DecodeWorker, "_refund", _no_full_refund),
    python("no refund of a refused end", DecodeWorker, "_stale", _stale_without_refund),
    python("decode ignores cancels", DecodeWorker, "cancel", _ignore),
    python("prefill ignores cancels", PrefillWorker, "cancel", _ignore),
    python("reaper by FIFO", Leases, "expired", _expired_by_fifo, ("freeze", "partition", "hang")),
    python("reaping right after a reconnect", Reaper, "_may_reap", lambda self: True, ("redis_down",)),
    python("a gateway is never buried", Reaper, "_bury_gateway", _do_nothing, ("crash",)),
    python("a source always says held", OfferBook, "release", _always_held),
    python("release is not confirmed", Fetch, "_release", _release_unconfirmed),
    python("no digest is compared", Ticket, "settle", lambda self: [], ("flip",)),
    Mutant("blocks are dropped under a fetch", (), patches=((DecodeWorker, "_end", _end_drops),), leavers=0.7),
    python("requeue ignores the token log", Leases, "load", _load_without_log, CRASHES),
    python("a gateway believes old epochs", RequestStream, "accept", _accept_any_epoch, ("crash", "ghost", "ghost")),
    python("a gateway takes repeats", RequestStream, "_accept_tokens", _accept_repeats, ("ghost",)),
    python("lost requests stay lost", Keeper, "_readmit", _do_nothing, ("wipe",)),
    python("a task's state is that of now", WorkerLink, "_state_of", _state_of_now, ("bad_steps", "doze")),
    python("the buried go on", Roster, "heartbeat", _heartbeat_always, ("freeze", "partition")),
    python("leases are renewed without progress", WorkerLink, "_is_stuck", lambda self, progress: False, ("hang",)),
    python("the index overlooks holes", PrefixIndex, "apply", _apply_over_gaps, ("kv_loss",)),
    python("no sign after the last KV event", WorkerLink, "_sign", _do_nothing, ("kv_loss",)),
    lua(
        "renew asks for no fence",
        "renew",
        "r[1] ~= ARGV[a + 2] or r[2] ~= ARGV[a + 3] or (r[4]",
        "(r[4]",
        ISLANDS,
    ),
    lua(
        "renew asks for no holder", "renew", "elseif r[3] ~= ARGV[1] then", "elseif false then", ("crash", "partition")
    ),
    few_attempts("no limit of attempts", "if tonumber(r[6]) + 1 >= tonumber(ARGV[6]) then", "if false then"),
    few_attempts("attempts are not counted", "'tries', r[6] + 1", "'tries', r[6]"),
    lua("requeue asks for no epoch", "requeue", "if r[2] ~= ARGV[2] or r[3] ~=", "if r[3] ~=", CRASHES),
    lua(
        "requeue leaves prefill's book",
        "requeue",
        "redis.call('HDEL', KEYS[9], ARGV[1] .. '/' .. ARGV[2])",
        "",
        CRASHES,
    ),
    lua("requeue keeps the lease", "requeue", "redis.call('ZREM', KEYS[3], ARGV[1])", "", CRASHES),
    lua(
        "accept of what has ended",
        "accept",
        "if r[1] ~= 'dispatched' and r[1] ~= 'prefill' and r[1] ~= 'decode' then return 0 end",
    ),
    lua("dispatch beyond the credit", "dispatch", "return 'no_credit'", "local _ = 0"),
    lua(
        "dispatch again at the same epoch",
        "dispatch",
        "if r[1] ~= 'queued' or r[2] ~= ARGV[2] then return 'stale' end",
        "if r[2] ~= ARGV[2] then return 'stale' end",
        ("usurp", "lost_replies"),
    ),
    lua(
        "a lost answer is a second dispatch",
        "dispatch",
        "if r[2] == ARGV[2] and r[3] == ARGV[3] then return 'dispatched' end",
        "if r[2] == ARGV[2] and r[3] == ARGV[3] then r[1] = 'queued' end",
        ("lost_replies",),
    ),
    lua("a refund that is not written down", "refund", "redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])", "local _ = 0"),
    lua("emit keeps no log", "emit", "redis.call('APPEND', log, fresh)", ""),
    lua("the log stays for ever", "complete", "redis.call('PEXPIRE', KEYS[5], ARGV[6])"),
    Mutant("the queue has no bound", None, "admit", "return 'full'", "local _ = 0", sizes=(("max_queued", 8),)),
    lua(
        "a lost answer admits twice",
        "admit",
        "if redis.call('EXISTS', KEYS[1]) == 1 then return 'duplicate' end",
        "",
        ("lost_replies",),
    ),
    lua(
        "the living are buried",
        "bury",
        "if not deadline or tonumber(deadline) >",
        "if not deadline or 0 >",
        patches=((Roster, "dead_workers", _everybody),),
    ),
    python("who leaves is served on", Streams, "close", _close_without_cancel),
    python("a gap is not repaired", Streams, "_repair", _do_nothing, CRASHES),
)

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
