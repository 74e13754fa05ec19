"""Clients of the Redis queue: they XADD, read their result once it has ended (the judge looks at each entry as it is
written), and submit again what Redis has lost."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import anyio

from shared.redis_link import RedisLink
from tests.sim.calls import Ask
from tests.sim.redis_sim import SimClient

if TYPE_CHECKING:
    from tests.sim.world import World

WAIT_MS = 500
TOO_LONG = 200  # tokens, more than any worker takes
BAD_STATUS = {"json": "400", "value": "400", "long": "400", "request": "400", "reply": "400", "id": "400"}
"""What may be wrong with a submission, and the status that its result must have."""


def body_of(ask: Ask) -> str:
    """The JSON of a completion; or what a careless client sends in its place."""
    assert ask.queued is not None
    prompt = list(ask.prompt) * (TOO_LONG if ask.queued.bad == "long" else 1)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": ask.max_tokens, "seed": ask.seed}
    if ask.stop_text:
        body["stop"] = [ask.stop_text]
    if ask.num_choices > 1:
        body["n"] = ask.num_choices
    if ask.queued.bad == "value":
        body["max_tokens"] = -1
    return json.dumps(body)[: -3 if ask.queued.bad == "json" else None]


@dataclass
class Submitter:
    """One client of the queue and its request."""

    ask: Ask
    texts: list[str] = field(init=False)  # by choice
    reasons: tuple[str, ...] = ()  # of the choices
    outcome: str = ""  # stop, length, error; "" = still open
    error: str = ""
    ends: int = 0
    entry: str = ""  # of the last submission that it knows of
    broken: bool = False
    started_at: float = 0.0
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        self._forget()

    @property
    def is_open(self) -> bool:
        return not self.outcome

    def _forget(self) -> None:
        self.texts, self.ends = [""] * self.ask.num_choices, 0

    async def run(self, world: World) -> None:
        """Submit, listen, and once more whenever Redis has lost everything."""
        assert self.ask.queued is not None
        await world.clock.sleep(self.ask.at)
        link = RedisLink(world.settings.redis, world.clock, SimClient(world.redis))
        link.be_patient()
        self.started_at = world.clock.now()
        async with anyio.create_task_group() as tasks:
            if self.ask.queued.again_after is not None:
                tasks.start_soon(self._again, world, link, self.ask.queued.again_after)
            while self.is_open:
                lives = world.num_wipes
                self._forget()
                await self._submit(world, link, self.ask)
                await self._listen(world, link, lives)

    async def _again(self, world: World, link: RedisLink, seconds: float) -> None:
        """The same id a second time, perhaps for something else: it is the same work."""
        assert self.ask.queued is not None
        await world.clock.sleep(seconds)
        await self._submit(world, link, self.other() or self.ask)

    def other(self) -> Ask | None:
        """What else was asked under the same id."""
        queued = self.ask.queued
        return None if queued is None or queued.again_seed is None else replace(self.ask, seed=queued.again_seed)

    async def _submit(self, world: World, link: RedisLink, ask: Ask) -> None:
        queued = ask.queued
        assert queued is not None
        fields = {"id": "not an id!" if queued.bad == "id" else ask.name, "request": body_of(ask)}
        if queued.reply:
            fields["reply"] = world.keys.replies("sim") if queued.bad != "reply" else "elsewhere"
        if queued.bad == "request":
            del fields["request"]
        pairs = [part for pair in fields.items() for part in pair]
        added = await link.call(lambda: link.client.execute_command("XADD", world.keys.submit(), "*", *pairs))
        self.entry = added.decode()

    async def _listen(self, world: World, link: RedisLink, lives: int) -> None:
        name = self.entry if self.ask.queued is not None and self.ask.queued.bad == "id" else self.ask.name
        key, last = world.keys.result(name), b"0-0"
        ended = world.judge.results.ending(name)
        if world.num_wipes == lives:  # else it was lost before anybody could say that it ended
            await ended.wait()
        while self.is_open:
            command = ("XREAD", "COUNT", 100, "BLOCK", WAIT_MS, "STREAMS", key, last)
            found = await link.call(lambda c=command: link.client.execute_command(*c))
            if world.num_wipes != lives:
                return
            for entry_id, fields in found[0][1] if found else ():
                last = entry_id
                self._hear(dict(zip(fields[::2], fields[1::2], strict=True)), world.clock.now())

    def _hear(self, values: dict[bytes, bytes], now: float) -> None:
        if b"status" not in values:
            self.texts[int(values[b"choice"])] += values[b"text"].decode()
            return
        self.ends += 1
        if self.is_open:
            self.ended_at = now
            answer = json.loads(values.get(b"result") or values[b"error"])
            if b"result" in values:
                self.reasons = tuple(choice["finish_reason"] for choice in answer["choices"])
                self.outcome = self.reasons[0]
            else:
                self.outcome, self.error = "error", f"{values[b'status'].decode()} {answer['error']['code']}"

    def end(self, outcome: str, now: float, error: str = "") -> None:
        """Nothing ends it but its result."""

    def fault(self) -> str:
        """What is wrong with what was heard; "" if nothing."""
        assert self.ask.queued is not None
        if self.is_open:
            return "never ended"
        if self.ends != 1:
            return f"{self.ends} ends"
        if bad := self.ask.queued.bad:
            right = self.outcome == "error" and self.error.startswith(BAD_STATUS[bad])
            return "" if right else f"{bad} is wrong with it, and it ended with {self.outcome} {self.error}"
        if self.outcome == "error":
            return ""  # the judge knows whether it may
        wanted = [ask.expected_all() for ask in (self.ask, self.other()) if ask is not None]
        said = tuple(zip_longest(self.texts, self.reasons))
        return "" if said in wanted else f"it ended with {said}, expected {wanted}"
