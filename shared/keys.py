"""Every Redis key and stream of a cell, in one place. All share one hash tag, so that a script may touch any
of them, and a cluster keeps a cell in one slot."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec

from shared.ids import Incarnation, RequestId
from shared.messages import ControlMsg, GatewayMsg, IndexEventMsg, MatchQuery, MatchReply, SchedulerMsg, WorkerMsg

M = TypeVar("M")

NOBODY = Incarnation("-")
"""Stands where a request has no prefill worker: its keys exist never."""

REPLY_TTL_S = 60.0
"""Answers are worth something for milliseconds; whoever asked may have died."""

CONTROL_TTL_S = 600.0
"""A worker reads its control messages at once; what is said to one that was forgotten must not stay for ever."""

# One decoder per channel, built once; `Any` because a union type is not a `type` to a type checker.
_sched: Callable[[bytes], Any] = msgspec.msgpack.Decoder(SchedulerMsg).decode
_work: Callable[[bytes], Any] = msgspec.msgpack.Decoder(WorkerMsg).decode
_control: Callable[[bytes], Any] = msgspec.msgpack.Decoder(ControlMsg).decode
_tokens: Callable[[bytes], Any] = msgspec.msgpack.Decoder(GatewayMsg).decode
_kv: Callable[[bytes], Any] = msgspec.msgpack.Decoder(IndexEventMsg).decode
_index: Callable[[bytes], Any] = msgspec.msgpack.Decoder(MatchQuery).decode
_reply: Callable[[bytes], Any] = msgspec.msgpack.Decoder(MatchReply).decode


@dataclass(frozen=True)
class Channel(Generic[M]):
    """A stream and the type of what flows in it."""

    key: str
    decode: Callable[[bytes], M]
    ttl_s: float | None = None  # the stream goes so long after the last message: nobody may be left to read it


@dataclass(frozen=True)
class Keys:
    """Keys of one cell."""

    cell: str

    @cached_property
    def _tag(self) -> str:
        return f"{{{self.cell}}}:"

    def _key(self, *parts: str) -> str:
        return self._tag + ":".join(parts)

    # streams
    def sched(self) -> Channel[SchedulerMsg]:
        return Channel(self._key("sched"), _sched)

    def work(self, incarnation: Incarnation) -> Channel[WorkerMsg]:
        return Channel(self._key("work", incarnation), _work)

    def control(self, incarnation: Incarnation) -> Channel[ControlMsg]:
        return Channel(self._key("control", incarnation), _control, CONTROL_TTL_S)

    def tokens(self, gateway: Incarnation) -> Channel[GatewayMsg]:
        return Channel(self._key("tokens", gateway), _tokens)

    def kv(self) -> Channel[IndexEventMsg]:
        return Channel(self._key("kv"), _kv)

    def index(self) -> Channel[MatchQuery]:
        return Channel(self._key("index"), _index)

    def reply(self, incarnation: Incarnation) -> Channel[MatchReply]:
        return Channel(self._key("reply", incarnation), _reply, REPLY_TTL_S)

    # queue submissions (`shared.submissions`); plain fields, as their other end is a client
    def submit(self) -> str:
        """Stream: what clients of the queue ask."""
        return self._key("submit")

    def dead(self) -> str:
        """Stream: submissions that failed for good, with the reason."""
        return self._key("dead")

    def result(self, submission_id: str) -> str:
        """Stream: tokens, text and end of a submission. Entry ids are `<tokens out so far>-<n>`."""
        return self._key("result", submission_id)

    def replies(self, name: str = "") -> str:
        """Stream: a copy of the results of all submissions that name it; with "", the prefix of all such streams."""
        return self._key("replies", name)

    def submission(self, submission_id: str) -> str:
        """Hash: entry state owner reply total seq tries, and per choice n:<choice> (tokens out), c:<choice> (characters
        out)."""
        return self._key("sub", submission_id)

    # state, written by Lua only
    def request(self, request_id: RequestId) -> str:
        """Hash: st ep at term gw pw dw ho tries body, nc (choices, if several), fin (the `Finished`, once
        done), nonce (of the last adoption)."""
        return self._key("req", request_id)

    def log(self, request_id: RequestId, choice: int = 0) -> str:
        """String: the tokens already emitted, u32 little endian each. Scripts are given choice 0's key and make those
        of the others from it: the choice is the last part."""
        return self._key("log", request_id, str(choice))

    def queued(self) -> str:
        """Sorted set: requests that wait for dispatch, by Redis time of arrival (us)."""
        return self._key("queued")

    def leases(self) -> str:
        """Sorted set: accepted requests, by deadline (Redis time, ms)."""
        return self._key("leases")

    def workers(self) -> str:
        """Sorted set: worker incarnations, by the deadline of the next heartbeat (Redis time, ms)."""
        return self._key("workers")

    def worker(self, incarnation: Incarnation) -> str:
        """Hash: reg state blocks taken."""
        return self._key("worker", incarnation)

    def held(self, incarnation: Incarnation) -> str:
        """Hash: `<request>/<epoch>` -> decode credit in blocks (0 on a prefill worker)."""
        return self._key("held", incarnation)

    def leader(self) -> str:
        """Hash: term incarnation of the scheduler that may dispatch."""
        return self._key("leader")

    def gateways(self) -> str:
        """Sorted set: gateway incarnations, by the deadline of the next greeting (Redis time, ms; 0 = being buried)."""
        return self._key("gateways")

    def open(self, gateway: Incarnation) -> str:
        """Set: requests of a gateway that have not ended."""
        return self._key("open", gateway)

    def deployment_key(self) -> str:
        return self._key("deployment_key")

    # who may ask (`shared.api_keys`, `shared.rate_limits`)
    def api_keys(self) -> str:
        """Hash: key id -> record (JSON, the secret's digest in it)."""
        return self._key("apikeys")

    def rate(self, key_id: str) -> str:
        """Hash: r t (what is left in the buckets of requests and tokens), at (ms); c:<request> (tokens charged)."""
        return self._key("rate", key_id)

    def busy(self, key_id: str) -> str:
        """Sorted set: the key's requests under way, by the deadline of the next renewal (Redis time, ms)."""
        return self._key("busy", key_id)
