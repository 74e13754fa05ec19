"""Clients of a chaos run. Each asks until it has its answer, and notes whatever it should never have seen."""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread
import httpx
import redis

from shared.keys import Keys
from shared.leases import unpack_tokens
from tests.faults.plan import Ask
from tests.oracle.oracle import Greedy, Oracle, first_difference

RETRY_S = 0.1
GIVE_UP_S = 240.0
"""A client's patience. Long, as on a small machine with much killed, restarts are most of the time."""
REFUSALS = ("no_worker", "unavailable", "queue_full")
"""What a gateway may say instead of an answer; the client then asks again."""


class BrokenReply(Exception):
    """The connection ended before the answer did."""


@dataclass(slots=True)
class Findings:
    """What the clients saw."""

    answered: Counter[str] = field(default_factory=Counter)  # by kind
    refused: Counter[str] = field(default_factory=Counter)  # by code
    broken: int = 0  # replies cut off by their gateway's death, and asked again
    faults: list[str] = field(default_factory=list)  # what must not be
    tokens: int = 0


class GatewayWatch:
    """When the gateway was away: only then may a connection break."""

    def __init__(self) -> None:
        self._away: list[tuple[float, float]] = []

    def died(self) -> None:
        self._away.append((time.monotonic(), float("inf")))

    @property
    def num_deaths(self) -> int:
        return len(self._away)

    def is_back(self, num_deaths: int) -> None:
        """It answered, asked after so many deaths: it may have died again since."""
        if self._away and num_deaths == len(self._away) and self._away[-1][1] == float("inf"):
            self._away[-1] = (self._away[-1][0], time.monotonic())

    def was_away(self, since: float, until: float) -> bool:
        return any(begin <= until and since <= end for begin, end in self._away)


class Judge:
    """Compares what a client got with the oracle."""

    def __init__(self, oracle: Oracle, asks: list[Ask]) -> None:
        self._oracle = oracle
        longest: dict[str, int] = {}
        for ask in asks:
            longest[ask.prompt] = max(longest.get(ask.prompt, 0), ask.max_tokens)
        self._want = {prompt: oracle.greedy(oracle.encode(prompt), count) for prompt, count in longest.items()}

    def tokens(self, ask: Ask, got: tuple[int, ...]) -> str:
        """What is wrong with the tokens; "" = nothing."""
        if len(got) != ask.max_tokens:
            return f"{len(got)} tokens, not {ask.max_tokens}"
        want = self._want[ask.prompt]
        wrong = first_difference(Greedy(want.token_ids[: len(got)], want.margins[: len(got)]), got)
        return "" if wrong is None else f"token {wrong} is {got[wrong]}, not {want.token_ids[wrong]}"

    def text(self, tokens: tuple[int, ...]) -> str:
        return self._oracle.decode(list(tokens))


class Clients:
    """All clients of one run."""

    def __init__(self, url: str, redis_url: str, keys: Keys, judge: Judge, watch: GatewayWatch) -> None:
        self._redis_url, self._keys, self._judge, self._watch = redis_url, keys, judge, watch
        # One client, each request on a connection of its own. A client for each would take so long to make that those
        # which ask again at once would be late with their requests' heads, which a gateway does not suffer.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=GIVE_UP_S, trust_env=False, limits=limits)
        self.findings = Findings()

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, ask: Ask) -> None:
        """Until answered; what went wrong is in the findings."""
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline:
            began = time.monotonic()
            try:
                wrong = await (self._ask_queue(ask, deadline) if ask.kind == "queue" else self._ask_http(ask))
            except BrokenReply as exc:
                await anyio.sleep(RETRY_S)
                if not self._watch.was_away(began, time.monotonic()):
                    self._fault(ask, f"broken by a living gateway: {exc}")
                    return
                self.findings.broken += 1
                continue
            if wrong is None:  # refused
                await anyio.sleep(RETRY_S)
                continue
            if wrong:
                self._fault(ask, wrong)
            else:
                self.findings.answered[ask.kind] += 1
                self.findings.tokens += ask.max_tokens
            return
        self._fault(ask, f"no answer within {GIVE_UP_S:.0f} s")

    def _fault(self, ask: Ask, what: str) -> None:
        self.findings.faults.append(f"{ask.kind} {ask.number} ({ask.max_tokens} tokens): {what}")

    async def _ask_http(self, ask: Ask) -> str | None:
        """What was wrong; "" = nothing; None = refused, ask again.

        :raises BrokenReply: the connection broke.
        """
        body = {"prompt": ask.prompt, "max_tokens": ask.max_tokens, "temperature": 0, "ignore_eos": True}
        try:
            if ask.kind == "stream":
                return await self._stream(ask, {**body, "stream": True})
            reply = await self._http.post("/v1/completions", json=body)
        except httpx.HTTPError as exc:
            raise BrokenReply(repr(exc)) from None
        if reply.status_code != 200:
            return self._refused(reply.status_code, reply.text)
        answer = reply.json()
        choice = answer["choices"][0]
        if choice["finish_reason"] != "length" or answer["usage"]["completion_tokens"] != ask.max_tokens:
            return f"a wrong end: {choice['finish_reason']}, {answer['usage']}"
        return await self._compare(ask, answer["id"], choice["text"])

    async def _stream(self, ask: Ask, body: dict[str, Any]) -> str | None:
        text, response_id, reason, done = "", "", None, False
        async with self._http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                return self._refused(reply.status_code, (await reply.aread()).decode())
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return f"an error event: {event['error']}"
                response_id = event["id"]
                text += event["choices"][0]["text"]
                reason = event["choices"][0]["finish_reason"] or reason
        if not done or reason != "length":
            return f"a clean end without an end: done {done}, reason {reason}, {len(text)} characters"
        return await self._compare(ask, response_id, text)

    def _refused(self, status: int, text: str) -> str | None:
        try:
            code = json.loads(text)["error"]["code"]
        except (ValueError, KeyError, TypeError):
            return f"{status} without a readable error: {text[:200]}"
        if code not in REFUSALS:
            return f"{status} {code}: {text[:200]}"
        self.findings.refused[code] += 1
        return None

    async def _compare(self, ask: Ask, response_id: str, text: str) -> str:
        """The token log is kept for a minute after the end."""
        packed = await self._redis(lambda client: client.get(self._keys.log(response_id)))
        tokens = unpack_tokens(packed or b"")
        return self._judge.tokens(ask, tokens) or (
            "" if text == self._judge.text(tokens) else f"text differs from its tokens: {text[:80]!r}"
        )

    async def _ask_queue(self, ask: Ask, deadline: float) -> str | None:
        name = f"chaos-{ask.number}"
        body = {"prompt": ask.prompt, "max_tokens": ask.max_tokens, "temperature": 0, "ignore_eos": True}
        entry = {"id": name, "request": json.dumps(body)}
        await self._redis(lambda client: client.xadd(self._keys.submit(), entry))
        while time.monotonic() < deadline:
            last = await self._redis(lambda client: client.xrevrange(self._keys.result(name), count=1))
            if last and b"status" in last[0][1]:
                entries = await self._redis(lambda client: client.xrange(self._keys.result(name)))
                return self._judge_result(ask, [values for _, values in entries])
            await anyio.sleep(0.25)
        return f"no result within {GIVE_UP_S:.0f} s"

    def _judge_result(self, ask: Ask, entries: list[dict[bytes, bytes]]) -> str:
        *parts, end = entries
        if end[b"status"] != b"200":
            return f"an error result: {end}"
        tokens: list[int] = []
        for part in parts:
            if b"status" in part or int(part[b"offset"]) != len(tokens):
                return f"a result that repeats or leaves out: {entries}"
            tokens += json.loads(part[b"tokens"])
        text = "".join(part[b"text"].decode() for part in parts)
        answer = json.loads(end[b"result"])["choices"][0]["text"]
        if not text == answer == self._judge.text(tuple(tokens)):
            return f"text differs from its tokens: {text[:80]!r}"
        return self._judge.tokens(ask, tuple(tokens))

    async def _redis(self, command: Callable[["redis.Redis[bytes]"], Any]) -> Any:
        """Until Redis answers: it dies too."""

        def once() -> Any:
            with redis.Redis.from_url(self._redis_url) as client:
                return command(client)

        while True:
            try:
                return await anyio.to_thread.run_sync(once)
            except (redis.ConnectionError, redis.BusyLoadingError, OSError):
                await anyio.sleep(RETRY_S)
