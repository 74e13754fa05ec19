"""Submissions that failed for good, for an operator: list, look, submit again. Who writes them: `submit_end.lua`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shared.keys import Keys
from shared.redis_link import RedisLink
from shared.scripts import Scripts
from shared.submissions import FIELDS, GROUP, MAX_DEAD

RetryAnswer = Literal["gone", "open"]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    letter: str  # its entry in the list
    reason: str
    entry: str  # the submission's entry
    fields: tuple[tuple[bytes, bytes], ...]  # the submission, as it came

    @property
    def id(self) -> str:
        """The client's id, or what the server took in its place."""
        return dict(self.fields).get(b"id", self.entry.encode()).decode("utf-8", "replace")

    @property
    def died_ms(self) -> int:
        """Redis time."""
        return int(self.letter.partition("-")[0])


@dataclass(frozen=True, slots=True)
class QueueState:
    waiting: int  # no gateway has them
    open: int  # with a gateway
    dead: int


class DeadLetters:
    """The dead-letter list of a cell. Every method raises BusError."""

    def __init__(self, link: RedisLink, keys: Keys) -> None:
        self._link, self._keys = link, keys
        self._scripts = Scripts(link)

    async def state(self) -> QueueState:
        run = self._link.client.execute_command
        submitted = await self._link.call(lambda: run("XLEN", self._keys.submit()))
        groups: list[Any] = []
        if submitted:  # without the stream there is nothing to ask about
            groups = await self._link.call(lambda: run("XINFO GROUPS", self._keys.submit()))
        pending = sum(group["pending"] for group in groups if group["name"] == GROUP.encode())
        dead = await self._link.call(lambda: run("XLEN", self._keys.dead()))
        return QueueState(max(0, submitted - pending), pending, dead)

    async def latest(self, count: int = MAX_DEAD) -> list[DeadLetter]:
        """Newest first."""
        run = self._link.client.xrevrange
        found = await self._link.call(lambda: run(self._keys.dead(), count=count))
        return [_letter(letter, values) for letter, values in found]

    async def find(self, name: str) -> DeadLetter | None:
        """By the letter's own entry, the submission's entry or its id; the newest of several."""
        return next((x for x in await self.latest() if name in (x.letter, x.entry, x.id)), None)

    async def last_of_result(self, submission_id: str) -> dict[str, str]:
        """The end of a result, as far as it is still there."""
        run = self._link.client.xrevrange
        found = await self._link.call(lambda: run(self._keys.result(submission_id), count=1))
        return {
            name.decode(): value.decode("utf-8", "replace") for _, values in found for name, value in values.items()
        }

    async def retry(self, letter: DeadLetter) -> RetryAnswer | str:
        """Submit it again, under the same id and with the same fields. The new entry; `gone`: somebody else did it;
        `open`: a submission of this id is in work."""
        keys = [self._keys.submit(), self._keys.dead(), self._keys.submission(letter.id), self._keys.result(letter.id)]
        values: Sequence[bytes] = [part for pair in letter.fields for part in pair]
        answer = (await self._scripts.run("submit_retry", keys, [letter.letter, *values])).decode()
        return answer or "gone"


def _letter(letter: bytes, values: dict[bytes, bytes]) -> DeadLetter:
    fields = tuple((name, value) for name, value in values.items() if name in FIELDS)
    reason = values.get(b"reason", b"").decode("utf-8", "replace")
    return DeadLetter(letter.decode(), reason, values.get(b"entry", b"0-0").decode(), fields)
