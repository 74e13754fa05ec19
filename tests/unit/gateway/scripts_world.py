"""The scripts of submissions on a real Redis, for the tests beside it."""

from dataclasses import dataclass

from shared.clock import SystemClock
from shared.ids import Incarnation
from shared.keys import Keys
from shared.randomness import SeededRandomness
from shared.redis_link import RedisLink
from shared.submissions import End, ResultItem, Submission, Submissions

KEYS = Keys("queue-test")
A, B = Incarnation("gw-a"), Incarnation("gw-b")
DONE = End(200, "result", b"{}")


@dataclass
class Queue:
    link: RedisLink

    def gateway(self, owner: Incarnation) -> Submissions:
        return Submissions(self.link, KEYS, SystemClock(), SeededRandomness(ord(owner[-1])), owner, 60.0)

    async def submit(self, name: str = "job", **fields: str) -> str:
        pairs = [part for pair in {"id": name, "request": "{}", **fields}.items() for part in pair]
        return (await self.link.client.execute_command("XADD", KEYS.submit(), "*", *pairs)).decode()

    async def taken(self, gateway: Submissions, **fields: str) -> Submission:
        """Submitted, read and opened by a gateway."""
        await self.submit(**fields)
        (submission,) = await gateway.read(10, 1)
        assert await gateway.open(submission) is not None
        return submission

    async def stream(self, key: str) -> list[tuple[str, dict[str, str]]]:
        found = await self.link.client.xrange(key)
        return [(i.decode(), {k.decode(): v.decode() for k, v in values.items()}) for i, values in found]

    async def num_pending(self) -> int:
        return (await self.link.client.xpending(KEYS.submit(), "gateways"))["pending"]


def item(offset: int, text: str, choice: int = 0) -> ResultItem:
    """A token for each character."""
    return ResultItem(choice, offset, tuple(map(ord, text)), text, offset + len(text))
