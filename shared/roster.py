"""Who works in the cell: registrations, heartbeats, drain, death. All deadlines are Redis TIME."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shared.ids import Incarnation, RequestId
from shared.keys import Channel, Keys
from shared.messages import Registration, WorkerDraining, WorkerJoined, decode_registration, encode
from shared.redis_link import RedisLink
from shared.scripts import Scripts

MISSED_HEARTBEATS = 3
MISSED_GREETINGS = 10
"""Clients wait on a gateway's own connections: that it stood still for some seconds is no reason to drop them."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as Redis knows it."""

    registration: Registration
    alive: bool
    draining: bool
    credit_taken: int  # blocks


class Roster:
    """The worker face of the cell."""

    def __init__(self, link: RedisLink, keys: Keys, heartbeat_s: float) -> None:
        self._link, self._keys = link, keys
        self._ttl_ms = int(heartbeat_s * MISSED_HEARTBEATS * 1000)
        self._greeting_ttl_ms = int(heartbeat_s * MISSED_GREETINGS * 1000)
        self._scripts = Scripts(link)

    async def register(self, registration: Registration) -> None:
        """Join the cell. Repeatable."""
        incarnation = registration.incarnation
        keys = [self._keys.workers(), self._keys.worker(incarnation), self._keys.sched().key]
        joined = encode(WorkerJoined(incarnation=incarnation))
        args = [incarnation, encode(registration), registration.num_blocks, self._ttl_ms, joined]
        await self._scripts.run("register", keys, args)

    async def heartbeat(self, incarnation: Incarnation) -> bool:
        """Still alive. False: this incarnation was buried, the process must start a new life."""
        keys = [self._keys.workers(), self._keys.worker(incarnation)]
        return bool(await self._scripts.run("heartbeat", keys, [incarnation, self._ttl_ms]))

    async def retire(self, incarnation: Incarnation, state: Literal["draining", "dead"]) -> bool:
        """Take nothing new (`draining`), or leave for good (`dead`)."""
        keys = [self._keys.workers(), self._keys.worker(incarnation), self._keys.sched().key]
        message = encode(WorkerDraining(incarnation=incarnation))
        return bool(await self._scripts.run("retire", keys, [incarnation, state, message]))

    async def workers(self) -> list[WorkerView]:
        """All that are not buried, in the order of their names."""
        now_ms, scored = await self._deadlines(self._keys.workers())
        names = [self._keys.worker(Incarnation(incarnation.decode())) for incarnation, _ in scored]
        rows = await self._link.batch([("HMGET", name, "reg", "state", "taken") for name in names])
        views = []
        for (_, deadline), (reg, state, taken) in zip(scored, rows, strict=True):
            if reg is not None:
                alive = deadline > now_ms and state != b"dead"
                views.append(WorkerView(decode_registration(reg), alive, state == b"draining", int(taken or 0)))
        return sorted(views, key=lambda view: (view.registration.worker_id, view.registration.incarnation))

    async def held(self, incarnation: Incarnation) -> list[tuple[RequestId, int]]:
        """(request, epoch) of all tasks that the worker was given and has not given up; a prefill worker's until
        decode takes over."""
        return _held(await self._link.call(lambda: self._link.client.hkeys(self._keys.held(incarnation))))

    async def dead_workers(self) -> list[Incarnation]:
        """Those whose heartbeat is overdue and who are not forgotten yet."""
        return await self._overdue(self._keys.workers())

    async def bury(self, incarnation: Incarnation, until_ms: int) -> list[tuple[RequestId, int]] | None:
        """Declare an overdue worker dead and fence it. What it held, to be requeued; None: it came back, or Redis'
        time is past `until_ms`."""
        keys = [self._keys.workers(), self._keys.worker(incarnation), self._keys.held(incarnation)]
        held = await self._scripts.run("bury", keys, [incarnation, until_ms])
        return None if held is None else _held(held)

    async def forget(self, incarnation: Incarnation) -> None:
        """Delete a buried worker's keys, once all that it held was requeued."""
        keys = [
            *(self._keys.workers(), self._keys.worker(incarnation), self._keys.held(incarnation)),
            *(self._keys.work(incarnation).key, self._keys.control(incarnation).key),
        ]
        await self._scripts.run("forget", keys, [incarnation])

    # --- gateways ---

    async def greet(self, gateway: Incarnation) -> bool:
        """A gateway lives. True: Redis did not know it: new, given up, or Redis has lost its memory."""
        return bool(await self._scripts.run("greet", [self._keys.gateways()], [gateway, self._greeting_ttl_ms]))

    async def dead_gateways(self) -> list[Incarnation]:
        """Those whose greeting is overdue and who are not forgotten yet."""
        return await self._overdue(self._keys.gateways())

    async def bury_gateway(self, gateway: Incarnation, until_ms: int) -> list[RequestId] | None:
        """An overdue gateway admits nothing more. What it has open, to be cancelled; None: as for `bury`."""
        keys = [self._keys.gateways(), self._keys.open(gateway)]
        ids = await self._scripts.run("bury_gateway", keys, [gateway, until_ms])
        return None if ids is None else [RequestId(raw.decode()) for raw in ids]

    async def forget_gateway(self, gateway: Incarnation) -> None:
        """Delete its stream, once all that it had open was cancelled; nothing happens if it came back."""
        keys = [self._keys.gateways(), self._keys.open(gateway), self._keys.tokens(gateway).key]
        await self._scripts.run("forget_gateway", keys, [gateway])

    async def pull_in_deadlines(self, lease_s: float) -> int:
        """Redis' clock was set back, or may have been: no deadline stays further ahead than a renewal now would put it.
        How many did."""
        ttls = ((self._keys.workers(), self._ttl_ms), (self._keys.gateways(), self._greeting_ttl_ms))
        pairs = (*ttls, (self._keys.leases(), int(lease_s * 1000)))
        return sum([await self._scripts.run("clamp", [key], [ttl_ms]) for key, ttl_ms in pairs])

    async def stream_lengths(self, *channels: Channel[Any]) -> list[int]:
        """Entries in each, aligned: what nobody has consumed yet."""
        return await self._link.batch([("XLEN", channel.key) for channel in channels])

    async def _overdue(self, key: str) -> list[Incarnation]:
        now_ms, scored = await self._deadlines(key)
        return [Incarnation(raw.decode()) for raw, deadline in scored if deadline <= now_ms]

    async def _deadlines(self, key: str) -> tuple[int, list[tuple[bytes, float]]]:
        """Redis' time in ms, and all members with theirs: asked together, as there are few."""
        time, flat = await self._link.batch([("TIME",), ("ZRANGE", key, 0, -1, "WITHSCORES")])
        return int(time[0]) * 1000 + int(time[1]) // 1000, [*zip(flat[::2], map(float, flat[1::2]), strict=True)]


def _held(fields: Sequence[bytes]) -> list[tuple[RequestId, int]]:
    pairs = (field.decode().rpartition("/") for field in fields)
    return [(RequestId(request_id), int(epoch)) for request_id, _, epoch in pairs]
