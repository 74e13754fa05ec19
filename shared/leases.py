"""The life of a request in Redis. Every change of state is one fenced script of `shared/lua/`.

queued      admitted, waits for dispatch
dispatched  tasks written, credit taken; lives by its workers' heartbeats
prefill     the prefill worker holds the lease
decode      the decode worker holds the lease
done        Finished is out; the record and the token log stay for `KEEP_S`, for repairs and repeats
cancelled   as done, by the client's wish
requeue leads from dispatched, prefill and decode back to queued, at the next epoch.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shared.errors import BusError
from shared.ids import AttemptId, Incarnation, RequestId
from shared.keys import CONTROL_TTL_S, NOBODY, Keys
from shared.messages import (
    Admitted,
    Cancel,
    CreditFreed,
    DecodeTask,
    Ended,
    Finished,
    GenerateRequest,
    PrefillTask,
    RequestState,
    Tokens,
    decode_request,
    encode,
)
from shared.randomness import Randomness
from shared.redis_link import RedisLink
from shared.scripts import Scripts

KEEP_S = 60
FOREVER_MS = (1 << 53) - 1  # what Lua's numbers hold exactly
CONTROL_MS = int(CONTROL_TTL_S * 1000)
NO_LIMIT = 1 << 52
MAX_EMITTED = 1024
"""Items of one entry: Lua unpacks no more than some thousand values at once."""
MAX_ASKED = 4
"""Times to ask for the deployment's key: a Redis that has just lost everything has lost that too."""
LIVE = (b"dispatched", b"prefill", b"decode")

AdmitAnswer = Literal["admitted", "full", "duplicate", "unknown"]
"""unknown: the gateway has not greeted, or is about to be buried."""
DispatchAnswer = Literal["dispatched", "stale", "no_credit", "worker_gone", "deposed"]
RequeueAnswer = Literal["requeued", "failed", "stale"]
Holding = Literal["held", "handed_on", "stale"]
"""held: the lease is the caller's; handed_on: same attempt, decode has it; stale: drop the work."""
RecordState = Literal["live", "ended", "lost"]
_HOLDINGS: dict[int, Holding] = {1: "held", 2: "handed_on", 0: "stale"}


@dataclass(frozen=True, slots=True)
class Fence:
    """What proves that a worker still works for a request."""

    request_id: RequestId
    epoch: int
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One placement, ready to be written."""

    request_id: RequestId
    epoch: int
    attempt: AttemptId
    term: int
    decode: Incarnation
    credit_blocks: int
    decode_task: DecodeTask
    prefill: Incarnation | None = None
    prefill_task: PrefillTask | None = None


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """u32 little endian, as the token log keeps them."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed)


class Leases:
    """The request face of the cell. Workers' registrations are in `shared.roster`."""

    def __init__(self, link: RedisLink, keys: Keys, randomness: Randomness) -> None:
        self._link, self._keys, self._randomness = link, keys, randomness
        self._scripts = Scripts(link)

    # --- gateway ---

    async def admit(
        self, request: GenerateRequest, max_queued: int, epoch: int = 1, outputs: Sequence[Sequence[int]] = ()
    ) -> AdmitAnswer:
        """Queue a request for dispatch, unless `max_queued` others wait already.

        :param epoch: above 1 for what may have been admitted before and was forgotten: above all that it had then.
        :param outputs: tokens sent then, by choice.
        """
        assert epoch > 1 or not any(outputs), "the log of epoch 1 is not read"
        return await self._admit(request, epoch, outputs, max_queued)

    async def readmit(self, request: GenerateRequest, epoch: int, *outputs: Sequence[int]) -> AdmitAnswer:
        """Queue a request that Redis has lost, however many wait.

        :param epoch: above all that its gateway has heard of.
        :param outputs: tokens already sent, by choice.
        """
        return await self._admit(request, epoch, outputs, NO_LIMIT)

    async def _admit(
        self, request: GenerateRequest, epoch: int, outputs: Sequence[Sequence[int]], max_queued: int
    ) -> AdmitAnswer:
        request_id = request.request_id
        keys = [
            *(self._keys.request(request_id), self._keys.queued(), self._keys.sched().key),
            *(self._keys.gateways(), self._keys.open(request.gateway), self._keys.log(request_id)),
            self._keys.tokens(request.gateway).key,
        ]
        message = encode(Admitted(request_id=request_id, epoch=epoch))
        args = [request_id, encode(request), request.gateway, max_queued, message, epoch]
        args += [pack_tokens(outputs[c] if c < len(outputs) else ()) for c in range(request.num_choices)]
        return (await self._scripts.run("admit", keys, args)).decode()

    async def states(self, request_ids: Sequence[RequestId]) -> list[RecordState]:
        """What Redis says of each, aligned."""
        states = await self._link.batch([("HGET", self._keys.request(i), "st") for i in request_ids])
        return ["lost" if st is None else "live" if st in (b"queued", *LIVE) else "ended" for st in states]

    async def are_queued(self, request_ids: Sequence[RequestId]) -> list[bool]:
        """Whether each waits for dispatch, aligned."""
        states = await self._link.batch([("HGET", self._keys.request(i), "st") for i in request_ids])
        return [state == b"queued" for state in states]

    async def cancel(self, request_id: RequestId, reason: str) -> bool:
        """No further work on the request; False if it had ended already."""
        while True:
            gw, ep, pw, dw = await self._fields(request_id, "gw", "ep", "pw", "dw")
            if gw is None:
                return False
            epoch, prefill, decode = int(ep or 0), _text(pw), _text(dw)
            keys = [
                *(self._keys.request(request_id), self._keys.queued(), self._keys.leases()),
                *(self._keys.tokens(_inc(gw)).key, self._keys.sched().key, self._keys.log(request_id)),
                *(self._keys.control(Incarnation(prefill)).key, self._keys.control(Incarnation(decode)).key),
                *(self._keys.open(_inc(gw)), self._keys.held(Incarnation(prefill))),
            ]
            messages = (
                Cancel(request_id=request_id, epoch=epoch, reason=reason),
                Finished(request_id, epoch, "cancelled", error=reason),
                Ended(request_id=request_id),
            )
            args = [request_id, epoch, prefill, decode, *map(encode, messages), KEEP_S * 1000, CONTROL_MS]
            answer = await self._scripts.run("cancel", keys, args)
            if answer != b"moved":
                return answer == b"cancelled"

    async def cancel_choice(self, request_id: RequestId, epoch: int, choice: int) -> bool:
        """Tell the decode worker that has the request at this epoch that one choice's text is complete for the client.
        A hint: nothing of the request changes in Redis."""
        (dw,) = await self._fields(request_id, "dw")
        if not dw:
            return False
        keys = [self._keys.request(request_id), self._keys.control(_inc(dw)).key]
        message = Cancel(request_id=request_id, epoch=epoch, reason="stop string", choice=choice)
        return bool(await self._scripts.run("cancel_choice", keys, [epoch, dw, encode(message), CONTROL_MS]))

    async def token_log(self, request_id: RequestId, choice: int = 0) -> tuple[int, ...]:
        """Tokens emitted so far; empty for an unknown request."""
        packed = await self._link.call(lambda: self._link.client.get(self._keys.log(request_id, choice)))
        return unpack_tokens(packed or b"")

    # --- scheduler ---

    async def lead(self, incarnation: Incarnation) -> int:
        """Take leadership; the term to dispatch under."""
        return await self._scripts.run("lead", [self._keys.leader()], [incarnation])

    async def load(self, request_id: RequestId) -> RequestState | None:
        """The request, its epoch and the tokens already sent; None once it has ended."""
        body, epoch, state = await self._fields(request_id, "body", "ep", "st")
        if body is None or state not in (b"queued", *LIVE):
            return None
        request = decode_request(body)
        if int(epoch or 0) <= 1:
            return RequestState(request=request, epoch=int(epoch or 0))
        logs = [await self.token_log(request_id, choice) for choice in range(request.num_choices)]
        others = tuple(logs[1:]) if any(logs[1:]) else ()
        return RequestState(request=request, epoch=int(epoch or 0), output=logs[0], others=others)

    async def queued(self) -> list[Admitted]:
        """Requests that wait for dispatch, oldest first."""
        ids = await self._link.call(lambda: self._link.client.zrange(self._keys.queued(), 0, -1))
        return [admitted for admitted in await self._with_epochs(ids) if admitted.epoch]

    async def dispatch(self, d: Dispatch) -> DispatchAnswer:
        """Credit, fence and tasks in one script. `stale`: not queued at this epoch any more."""
        prefill = d.prefill or NOBODY
        keys = [
            *(self._keys.request(d.request_id), self._keys.queued(), self._keys.leader()),
            *(self._keys.worker(d.decode), self._keys.held(d.decode), self._keys.work(d.decode).key),
            *(self._keys.worker(prefill), self._keys.held(prefill), self._keys.work(prefill).key),
        ]
        prefill_task = encode(d.prefill_task) if d.prefill_task else b""
        args = [
            *(d.request_id, d.epoch, d.attempt, d.term, d.decode, d.credit_blocks),
            *(encode(d.decode_task), prefill, prefill_task),
        ]
        return (await self._scripts.run("dispatch", keys, args)).decode()

    async def expired(self) -> list[tuple[RequestId, int]]:
        """Requests whose lease ran out, with their epochs."""
        now_ms = await self.redis_now_ms()
        ids = await self._link.call(lambda: self._link.client.zrangebyscore(self._keys.leases(), "-inf", now_ms))
        return [(admitted.request_id, admitted.epoch) for admitted in await self._with_epochs(ids)]

    async def requeue(
        self,
        request_id: RequestId,
        epoch: int,
        reason: str,
        max_attempts: int,
        lost: str = "",
        until_ms: int = FOREVER_MS,
    ) -> RequeueAnswer:
        """Send a lost request round again at the next epoch, or fail it after `max_attempts`.

        :param lost: the worker that died, or that gives the request up; "" if the lease ran out.
        :param until_ms: Redis' time after which a lease that ran out is not taken any more.
        """
        gw, pw, dw = await self._fields(request_id, "gw", "pw", "dw")
        if gw is None or not dw:
            return "stale"
        prefill, decode = Incarnation(_text(pw)), Incarnation(_text(dw))
        keys = [
            *(self._keys.request(request_id), self._keys.queued(), self._keys.leases()),
            *(self._keys.tokens(_inc(gw)).key, self._keys.sched().key, self._keys.log(request_id)),
            *(self._keys.control(prefill).key, self._keys.control(decode).key, self._keys.held(prefill)),
            self._keys.open(_inc(gw)),
        ]
        messages = (
            Admitted(request_id=request_id, epoch=epoch + 1),
            Cancel(request_id=request_id, epoch=epoch, reason=reason),
            Finished(request_id, epoch, "error", error=f"{reason}, {max_attempts} attempts"),
            Ended(request_id=request_id),
        )
        args = [
            *(request_id, epoch, prefill, decode, lost, max_attempts),
            *(*map(encode, messages), KEEP_S * 1000, CONTROL_MS, until_ms),
        ]
        return (await self._scripts.run("requeue", keys, args)).decode()

    async def fail(self, request_id: RequestId, epoch: int, error: str) -> bool:
        """End a queued request that no worker can ever serve."""
        (gw,) = await self._fields(request_id, "gw")
        if gw is None:
            return False
        keys = [
            *(self._keys.request(request_id), self._keys.queued(), self._keys.tokens(_inc(gw)).key),
            *(self._keys.sched().key, self._keys.log(request_id), self._keys.open(_inc(gw))),
        ]
        messages = (Finished(request_id, epoch, "error", error=error), Ended(request_id=request_id))
        return bool(await self._scripts.run("fail", keys, [request_id, epoch, *map(encode, messages), KEEP_S * 1000]))

    async def deployment_key(self) -> bytes:
        """The deployment's secret for capabilities, made by whoever asks first. 32 bytes.

        :raises BusError: Redis loses it again and again.
        """
        key, client = self._keys.deployment_key(), self._link.client
        for _ in range(MAX_ASKED):
            known = await self._link.call(lambda: client.get(key))
            if known is not None:
                return bytes.fromhex(known.decode())
            fresh = self._randomness.token(32)
            await self._link.call(lambda f=fresh: client.setnx(key, f))
        raise BusError("redis forgets the deployment's key again and again")

    async def redis_now_ms(self) -> int:
        seconds, micros = await self._link.call(lambda: self._link.client.time())
        return seconds * 1000 + micros // 1000

    # --- workers ---

    async def accept(
        self,
        fence: Fence,
        holder: Incarnation,
        phase: Literal["prefill", "decode"],
        lease_s: float,
        prefill: Incarnation | None = None,
        *,
        in_vain: bool = False,
    ) -> Holding:
        """Take the lease, with the whole lease period before it.

        :param prefill: for decode, the worker that holds the lease until now.
        :param in_vain: what prefill computes is not wanted any more, and it is told.
        """
        other = prefill or NOBODY
        keys = [self._keys.request(fence.request_id), self._keys.leases(), self._keys.held(other)]
        keys.append(self._keys.control(other).key)
        told = b""
        if in_vain and prefill:
            told = encode(Cancel(request_id=fence.request_id, epoch=fence.epoch, reason="decode computes the prompt"))
        args = [fence.request_id, fence.epoch, fence.attempt, holder, phase, int(lease_s * 1000), told, CONTROL_MS]
        return _HOLDINGS[await self._scripts.run("accept", keys, args)]

    async def renew(self, holder: Incarnation, fences: Sequence[Fence], lease_s: float) -> list[Holding]:
        """Prove progress on several requests. Aligned with `fences`."""
        if not fences:
            return []
        keys = [self._keys.leases(), *(self._keys.request(f.request_id) for f in fences)]
        args: list[Any] = [holder, int(lease_s * 1000)]
        for fence in fences:
            args += (fence.request_id, fence.epoch, fence.attempt)
        return [_HOLDINGS[answer] for answer in await self._scripts.run("renew", keys, args)]

    async def emit(self, gateway: Incarnation, items: Sequence[tuple[Tokens, AttemptId]]) -> list[bool]:
        """Send tokens of several requests of one gateway. Aligned; False: stale, drop the work."""
        answers: list[int] = []
        for start in range(0, len(items), MAX_EMITTED):
            keys = [self._keys.tokens(gateway).key]
            args: list[Any] = []
            for tokens, attempt in items[start : start + MAX_EMITTED]:
                keys += (self._keys.request(tokens.request_id), self._keys.log(tokens.request_id, tokens.choice))
                args += (tokens.epoch, attempt, tokens.index, pack_tokens(tokens.token_ids), encode(tokens))
            answers += await self._scripts.run("emit", keys, args)
        assert -1 not in answers, "a worker emitted past the end of the token log"
        return [answer == 1 for answer in answers]

    async def complete(
        self,
        fence: Fence,
        gateway: Incarnation,
        finished: Finished,
        decode: Incarnation,
        prefill: Incarnation | None = None,
    ) -> bool:
        """The request's end. False: it was not this attempt's to end."""
        keys = [
            *(self._keys.request(fence.request_id), self._keys.leases(), self._keys.tokens(gateway).key),
            *(self._keys.sched().key, self._keys.log(fence.request_id)),
            *(self._keys.worker(decode), self._keys.held(decode), self._keys.held(prefill or NOBODY)),
            self._keys.open(gateway),
        ]
        ended = encode(Ended(request_id=fence.request_id))
        args = [fence.request_id, fence.epoch, fence.attempt, encode(finished), ended, KEEP_S * 1000]
        return bool(await self._scripts.run("complete", keys, args))

    async def refund(self, holder: Incarnation, request_id: RequestId, epoch: int, keep: int | None = None) -> int:
        """Give back decode credit: all of it when the work was dropped (None), or all but `keep` blocks. The blocks
        given back; the same call again gives back nothing."""
        keys = [self._keys.worker(holder), self._keys.held(holder), self._keys.sched().key]
        message = encode(CreditFreed(incarnation=holder))
        args = [f"{request_id}/{epoch}", "" if keep is None else keep, message]
        return await self._scripts.run("refund", keys, args)

    # --- helpers ---

    async def _fields(self, request_id: RequestId, *names: str) -> list[bytes | None]:
        return await self._link.call(lambda: self._link.client.hmget(self._keys.request(request_id), *names))

    async def _with_epochs(self, ids: Sequence[bytes]) -> list[Admitted]:
        requests = [RequestId(raw.decode()) for raw in ids]
        epochs = await self._link.batch([("HGET", self._keys.request(request_id), "ep") for request_id in requests])
        pairs = zip(requests, epochs, strict=True)
        return [Admitted(request_id=request_id, epoch=int(epoch or 0)) for request_id, epoch in pairs]


def _text(raw: bytes | None) -> str:
    return raw.decode() if raw else ""


def _inc(raw: bytes | None) -> Incarnation:
    return Incarnation(_text(raw))
