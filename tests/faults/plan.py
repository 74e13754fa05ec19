"""What a chaos run does, drawn from a seed: who asks what and when, and who is killed when."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["stream", "whole", "queue"]
REDIS = "redis"
PREFIXES = (
    "",
    "The keeper of the light counts ships. ",
    "In the long night of the storm the bell rang on the harbour wall, and nobody came to the quay. " * 2,
    "Once more the clerk wrote every name, every cargo and every debt into the great book of the port. " * 4,
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of one client."""

    number: int
    at_s: float  # since the start of the run
    kind: Kind
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Blow:
    """One SIGKILL, or a SIGSTOP for longer than the lease, and how long the victim stays away."""

    at_s: float
    victim: str
    away_s: float
    freezes: bool = False


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """`num_requests` arrive over `arrive_s` seconds; somebody dies every `period_s` until all are answered."""

    seed: int
    num_requests: int
    arrive_s: float
    period_s: float = 5.0
    redis_dies_at: int = 2  # the number of the blow (from 0) that hits Redis; the only one that does
    max_tokens: int = 320
    wipe: bool = False  # Redis comes back empty, as a new one would; then nobody uses its queue
    freeze: bool = False  # every third blow is a SIGSTOP, but for the gateway and Redis, whose clients would wait

    def asks(self) -> list[Ask]:
        """In order of arrival."""
        draw = random.Random(f"asks {self.seed}")
        prompts = [
            f"{draw.choice(PREFIXES)}{i} and {draw.randrange(10**6)}" for i in range(12 + self.num_requests // 16)
        ]
        return [
            Ask(
                number=i,
                at_s=self.arrive_s * i / self.num_requests,
                kind=draw.choices(("stream", "whole", "queue"), (5, 3, 0 if self.wipe else 2))[0],
                prompt=draw.choice(prompts),
                max_tokens=self._length(draw),
            )
            for i in range(self.num_requests)
        ]

    def _length(self, draw: random.Random) -> int:
        """Mostly short, some that take long enough to be hit in the middle."""
        most = self.max_tokens if draw.random() < 0.35 else max(2, self.max_tokens // 10)
        return draw.randint(1, most)

    def blows(self, services: list[str]) -> Iterator[Blow]:
        """Without end. Every service has its turn, in an order of its own each time."""
        draw = random.Random(f"blows {self.seed}")
        bag: list[str] = []
        number = 0
        while True:
            if number == self.redis_dies_at:
                victim = REDIS
            else:
                bag = bag or draw.sample(services, len(services))
                victim = bag.pop()
            number += 1
            if self.freeze and number % 3 == 0 and victim not in (REDIS, "gateway"):
                yield Blow(number * self.period_s, victim, draw.uniform(4.5, 7.0), freezes=True)
            else:
                yield Blow(number * self.period_s, victim, draw.uniform(0.05, 0.4 * self.period_s))
