"""Submissions through Redis: a client XADDs a request to `submit` and reads its answer from `result:<id>`.

An entry of `submit` has the fields `request` (the JSON body), `id` (the client's; the entry's own if left out), and
if wanted `reply` (a stream that gets a copy), `endpoint` (completions | chat), `deadline_ms` and `tenant` (on whose
account: whoever may submit is trusted to say so).

waiting   in the stream, or pending with a gateway that is gone
open      a gateway owns it: it alone may write the result, and it says now and then that it lives
done      the end is in the result, the entry is acknowledged; id and result stay for the TTL
Whoever takes over an open one (`open`) fences the owner before it: every write checks the owner. And the entry, since
Redis may have lost one and been given another under the same id, which the same gateway has as well.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from shared.api_keys import TENANT
from shared.bus import blocking, with_group
from shared.clock import Clock
from shared.ids import Incarnation, RequestId
from shared.keys import Keys
from shared.leases import CONTROL_MS
from shared.messages import Admitted, Cancel, GenerateRequest, encode
from shared.randomness import Randomness
from shared.redis_link import RedisLink
from shared.scripts import Arg, Scripts

GROUP = "gateways"
MAX_DEAD = 10_000
"""Dead letters kept, about; beyond, the oldest go."""
FIELDS = (b"request", b"id", b"reply", b"endpoint", b"deadline_ms", b"tenant")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,127}")
_REPLY = re.compile(r"[\x21-\x7e]{1,256}")
_DEADLINE = re.compile(r"\d{1,12}")
_CLAIM_AT_ONCE = 64
_READ_AT_ONCE = 1024  # entries of a result: a few milliseconds of work

AdoptAnswer = Literal["adopted", "unknown", "lost"]
WriteAnswer = Literal["out", "lost", "gap"]
_WRITTEN: dict[int, WriteAnswer] = {1: "out", 0: "lost", -1: "gap"}


@dataclass(frozen=True, slots=True)
class Submission:
    """One entry of `submit`. With a `fault` it cannot be served, and the other fields may be defaults."""

    entry: str
    id: str
    raw: tuple[tuple[bytes, bytes], ...]  # known fields as they came, for the dead-letter list
    request: bytes = b""
    reply: str = ""
    endpoint: str = ""
    deadline_ms: int | None = None  # after the entry was written
    tenant: str = ""
    fault: str = ""

    @property
    def written_ms(self) -> int:
        """When the entry was written, Redis time."""
        return int(self.entry.partition("-")[0])

    @property
    def name(self) -> str:
        """Of the work: the same at whatever gateway, and another one should the id be used again."""
        return f"sub-{self.entry}"


@dataclass(frozen=True, slots=True)
class Progress:
    """What of a result is out already, by choice."""

    age_ms: int  # since the entry was written
    tries: int  # how often it was opened since the last token
    tokens: Mapping[int, int] = field(default_factory=dict)
    chars: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResultItem:
    """Tokens of a choice and the text that became certain with them."""

    choice: int
    offset: int  # index of the first token
    token_ids: tuple[int, ...]
    text: str
    chars: int  # of the choice's text, this item's included


@dataclass(frozen=True, slots=True)
class End:
    """The last entry of a result. `dead` is the reason for a dead letter, if it is to have one."""

    status: int  # as in HTTP
    kind: Literal["result", "error"]
    answer: bytes  # JSON
    dead: str = ""


def read_entry(keys: Keys, entry: str, fields: Sequence[bytes]) -> Submission:
    """A submission from an entry's names and values; never fails: what is wrong becomes its `fault`."""
    known = {name: value for name, value in zip(fields[::2], fields[1::2], strict=True) if name in FIELDS}
    raw = tuple(known.items())
    request = known.get(b"request", b"")
    named = _text(known.get(b"id", entry.encode()))
    reply, endpoint = _text(known.get(b"reply", b"")), _text(known.get(b"endpoint", b""))
    deadline, tenant = _text(known.get(b"deadline_ms", b"")), _text(known.get(b"tenant", b""))
    reply_ok = not reply or (reply.startswith(keys.replies()) and bool(_REPLY.fullmatch(reply)))
    checks = {
        "id must have 1 to 128 characters of A-Z a-z 0-9 . _ : @ + = -": bool(_ID.fullmatch(named)),
        f"reply must begin with {keys.replies()}": reply_ok,
        "deadline_ms must be a number of milliseconds": not deadline or bool(_DEADLINE.fullmatch(deadline)),
        "tenant must have 1 to 64 characters of A-Z a-z 0-9 . _ -": not tenant or bool(TENANT.fullmatch(tenant)),
        "there is no field `request`": bool(request),
    }
    fault = next((text for text, good in checks.items() if not good), "")
    return Submission(
        entry=entry,
        id=named if _ID.fullmatch(named) else entry,
        raw=raw,
        request=request,
        reply=reply if reply_ok else "",
        endpoint=endpoint,
        deadline_ms=int(deadline) if deadline and not fault else None,
        tenant="" if fault else tenant,
        fault=fault,
    )


class Submissions:
    """A gateway's way to the queue of submissions."""

    def __init__(
        self,
        link: RedisLink,
        keys: Keys,
        clock: Clock,
        randomness: Randomness,
        owner: Incarnation,
        result_ttl_s: float,
    ) -> None:
        self._link, self._keys, self._clock, self._randomness = link, keys, clock, randomness
        self._owner, self._ttl_ms = owner, int(result_ttl_s * 1000)
        self._scripts = Scripts(link)

    async def read(self, max_entries: int, timeout_s: float | None = None) -> list[Submission]:
        """Entries that no gateway has; waits for at least one, and is empty after `timeout_s`."""

        def command(block_ms: int) -> list[Any]:
            return [
                *("XREADGROUP", "GROUP", GROUP, self._owner, "COUNT", max_entries, "BLOCK", block_ms),
                *("STREAMS", self._keys.submit(), ">"),
            ]

        reply = await with_group(
            self._link,
            self._keys.submit(),
            GROUP,
            lambda: blocking(self._link, self._clock, command, timeout_s),
        )
        return self._entries(reply[0][1]) if reply else []

    async def claim(self, min_idle_s: float, max_entries: int) -> list[Submission]:
        """Entries of gateways that were silent for so long, and this one's own that it knows nothing of."""
        key, run = self._keys.submit(), self._link.client.execute_command
        found: list[Submission] = []
        cursor = b"0-0"
        while len(found) < max_entries:
            count = min(_CLAIM_AT_ONCE, max_entries - len(found))
            args = ("XAUTOCLAIM", key, GROUP, self._owner, int(min_idle_s * 1000), cursor, "COUNT", count)
            reply = await with_group(self._link, key, GROUP, lambda a=args: self._link.call(lambda: run(*a)))
            cursor, entries = reply[0], reply[1]
            found += self._entries([entry for entry in entries if entry and entry[1]])
            if cursor == b"0-0":
                break
        return found

    async def open(self, s: Submission) -> Progress | None:
        """Own the submission. None: it is a repeat of another entry, or has ended, and is acknowledged; or Redis has
        lost it."""
        keys = [self._keys.submission(s.id), self._keys.submit(), *([s.reply] if s.reply else [])]
        nonce = self._randomness.token(8)
        args = [self._owner, GROUP, s.entry, s.id, self._keys.result(s.id), self._ttl_ms, nonce]
        answer = await self._scripts.run("submit_open", keys, args)
        if answer[0] != b"open":
            return None
        values = dict(zip(answer[2][::2], answer[2][1::2], strict=True))
        return Progress(
            age_ms=answer[1] - s.written_ms,
            tries=int(values[b"tries"]),
            tokens={int(name[2:]): int(value) for name, value in values.items() if name.startswith(b"n:")},
            chars={int(name[2:]): int(value) for name, value in values.items() if name.startswith(b"c:")},
        )

    async def adopt(self, s: Submission, request: GenerateRequest) -> AdoptAnswer:
        """Go on with a request that this or another gateway admitted: its events come to this gateway from now on,
        beginning with what tells a stream to read the token log. `unknown`: it has to be admitted."""
        request_id, nonce = request.request_id, self._randomness.token(8)
        while True:
            ep, pw, dw, gw = await self._request_fields(request_id)
            prefill, decode = Incarnation(_text(pw)), Incarnation(_text(dw))
            epoch = int(ep or 0)
            keys = [
                *(self._keys.submission(s.id), self._keys.request(request_id), self._keys.queued()),
                *(self._keys.leases(), self._keys.tokens(self._owner).key, self._keys.sched().key),
                *(self._keys.log(request_id), self._keys.control(prefill).key, self._keys.control(decode).key),
                *(self._keys.held(prefill), self._keys.open(self._owner), self._keys.open(Incarnation(_text(gw)))),
            ]
            messages = (
                encode(request),
                encode(Admitted(request_id=request_id, epoch=epoch + 1)),
                encode(Cancel(request_id=request_id, epoch=epoch, reason="another gateway goes on")),
            )
            args = [self._owner, request_id, epoch, prefill, decode, _text(gw), *messages, nonce, CONTROL_MS]
            args.append(s.entry)
            answer = await self._scripts.run("submit_adopt", keys, args)
            if answer != b"moved":
                return answer.decode()

    async def written(self, s: Submission) -> dict[int, tuple[int, ...]]:
        """The tokens that its result has, by choice."""
        key, last, tokens = self._keys.result(s.id), b"0-0", dict[int, list[int]]()
        while True:
            read = ("XREAD", "COUNT", _READ_AT_ONCE, "BLOCK", 1, "STREAMS", key, last)
            reply = await self._link.call(lambda r=read: self._link.client.execute_command(*r))
            for entry, fields in reply[0][1] if reply else ():
                values, last = dict(zip(fields[::2], fields[1::2], strict=True)), entry
                if b"tokens" not in values:
                    continue
                known = tokens.setdefault(int(values[b"choice"]), [])
                assert int(values[b"offset"]) == len(known), "a result with a hole"
                known += msgspec.json.decode(values[b"tokens"])
            if not reply or len(reply[0][1]) < _READ_AT_ONCE:
                return {choice: tuple(token_ids) for choice, token_ids in tokens.items()}

    async def write(self, s: Submission, items: Sequence[ResultItem]) -> WriteAnswer:
        """Append to the result. `lost`: another gateway or entry owns the submission; `gap`: open it again."""
        args: list[Arg] = [self._owner, self._ttl_ms, s.id, s.entry]
        for item in items:
            tokens = "[" + ",".join(map(str, item.token_ids)) + "]"
            args += (item.choice, item.offset, len(item.token_ids), item.chars, tokens, item.text)
        return _WRITTEN[await self._scripts.run("result_add", self._result_keys(s), args)]

    async def end(self, s: Submission, end: End) -> bool:
        """Write the end and acknowledge the entry. False: another gateway or entry owns the submission."""
        sub, result, *reply = self._result_keys(s)
        keys = [sub, result, self._keys.submit(), self._keys.dead(), *reply]
        letter: list[Arg] = [part for pair in s.raw for part in pair]
        if b"id" not in dict(s.raw):
            letter = ["id", s.id, *letter]
        args = [
            *(self._owner, GROUP, s.entry, self._ttl_ms, s.id, end.status, end.kind, end.answer),
            *(end.dead, MAX_DEAD, *letter),
        ]
        return bool(await self._scripts.run("submit_end", keys, args))

    async def renew(self, owned: Sequence[Submission]) -> list[bool]:
        """Say that this gateway still works on them. Aligned; False: it has ended, or is another's now."""
        return await self._renew(owned, 0)

    async def release(self, owned: Sequence[Submission], lease_s: float) -> None:
        """Give them up: another gateway may take them at once."""
        await self._renew(owned, int(lease_s * 1000) + 1)

    async def _renew(self, owned: Sequence[Submission], idle_ms: int) -> list[bool]:
        answers: list[bool] = []
        for start in range(0, len(owned), _CLAIM_AT_ONCE):
            some = owned[start : start + _CLAIM_AT_ONCE]
            keys = [self._keys.submit()]
            for s in some:
                keys += (self._keys.submission(s.id), self._keys.result(s.id))
            args = [self._owner, GROUP, idle_ms, self._ttl_ms, *(s.entry for s in some)]
            answers += [answer == 1 for answer in await self._scripts.run("submit_renew", keys, args)]
        return answers

    def _result_keys(self, s: Submission) -> list[str]:
        return [self._keys.submission(s.id), self._keys.result(s.id), *([s.reply] if s.reply else [])]

    async def _request_fields(self, request_id: RequestId) -> list[bytes | None]:
        key = self._keys.request(request_id)
        return await self._link.call(lambda: self._link.client.hmget(key, "ep", "pw", "dw", "gw"))

    def _entries(self, entries: Sequence[Any]) -> list[Submission]:
        return [read_entry(self._keys, entry.decode(), fields) for entry, fields in entries]


def _text(raw: bytes | None) -> str:
    return raw.decode("utf-8", "replace") if raw else ""
