"""The simulated clients: what they ask, what they hear, and what they must have heard in the end."""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, ClassVar

import anyio

from services.engine.fake_runner import VOCAB_SIZE, fake_answer
from services.gateway.choice import Shown
from services.gateway.errors import ApiError
from services.gateway.generation import Delta, Generation, Services
from shared.hashing import block_hashes, chain_root
from shared.ids import Incarnation, RequestId
from shared.messages import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from tests.sim.world import World

BLOCK = 4
ROOT = chain_root()


@lru_cache(4096)
def _answer(prompt: tuple[int, ...], max_tokens: int, seed: int, choice: int = 0) -> tuple[int, ...]:
    return fake_answer(prompt, max_tokens, seed=seed, choice=choice)


class Words:
    """Stands for the tokenizer: token 7 is the text `7 `."""

    vocab_size = VOCAB_SIZE
    max_token_bytes = None
    end_token_ids = ()
    chat_template = None
    template_tokens: ClassVar[dict[str, str]] = {}

    def detokenizer(self, *, skip_special_tokens: bool = True) -> "Words":
        return self

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return ""


@dataclass(frozen=True)
class Queued:
    """How an ask comes through the Redis queue in place of HTTP."""

    bad: str = ""  # what is wrong with it, see `submits.BAD_STATUS`; "" = nothing
    again_after: float | None = None  # submitted again under the same id, seconds later
    again_seed: int | None = None  # and then with another seed
    reply: bool = False  # wants a copy of the result


@dataclass(frozen=True)
class Ask:
    """What one client will do."""

    name: str
    at: float  # seconds after the start
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    priority: int = 0
    stop_token: int | None = None
    stop_text: str = ""
    leaves_after: float | None = None  # seconds after its arrival
    reads_every: float = 0.0  # a slow client pauses between reads
    queued: Queued | None = None
    num_choices: int = 1

    def tokens(self, choice: int = 0) -> tuple[int, ...]:
        """All that could come, from the fake model's definition."""
        return _answer(self.prompt, self.max_tokens, self.seed, choice)

    def expected(self, choice: int = 0) -> tuple[str, str]:
        """Text and reason, from the fake model's definition."""
        text, reason = self._ending(choice)
        return text, "length" if reason == "length" else "stop"

    def is_cut(self, choice: int) -> bool:
        """Whether it ends with the stop string, of which no worker knows."""
        return self._ending(choice)[1] == "cut"

    def _ending(self, choice: int) -> tuple[str, str]:
        shown: list[str] = []
        for token in self.tokens(choice):
            if token == self.stop_token:
                return "".join(shown), "stop"
            shown.append(f"{token} ")
            text = "".join(shown)
            if self.stop_text and self.stop_text in text:
                return text[: text.index(self.stop_text)], "cut"
        return "".join(shown), "length"

    def expected_all(self) -> tuple[tuple[str, str], ...]:
        """Of each choice."""
        return tuple(self.expected(choice) for choice in range(self.num_choices))

    def request(self, gateway: Incarnation) -> GenerateRequest:
        stops = () if self.stop_token is None else (self.stop_token,)
        return GenerateRequest(
            request_id=RequestId(self.name),
            gateway=gateway,
            token_ids=self.prompt,
            root_hash=ROOT,
            block_hashes=block_hashes(ROOT, self.prompt, BLOCK),
            sampling=SamplingParams(max_tokens=self.max_tokens, seed=self.seed, stop_token_ids=stops),
            priority=self.priority,
            num_choices=self.num_choices,
        )


def draw_asks(
    rng: Random, count: int, rate: float, leavers: float, *, talkative: bool, queued: float = 0.15
) -> list[Ask]:
    """Arrivals in bursts, short and long prompts, shared prefixes, stops, cancels, slow readers, submissions.

    :param queued: part of the asks that come through the Redis queue.
    """
    prefixes = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((4, 8, 12, 17)))) for _ in range(4)]
    at, asks = 0.0, []
    for i in range(count):
        at += rng.expovariate(rate) if rng.random() < 0.8 else 0.0
        prompt = rng.choice(prefixes) if rng.random() < 0.4 else ()
        more = rng.choice((1, 2, 5, 9, 9, 16, 21)) if rng.random() < 0.93 else rng.randrange(40, 90)
        prompt += tuple(rng.randrange(VOCAB_SIZE) for _ in range(more))
        max_tokens = rng.choice((1, 2, 3, 5, 8, 9)) if rng.random() < (0.75 if talkative else 0.95) else 40
        ask = _draw(rng, f"r{i}", at, prompt, max_tokens, leavers)
        asks.append(_through_queue(rng, ask) if rng.random() < queued else ask)
    return asks


def _through_queue(rng: Random, ask: Ask) -> Ask:
    bad = rng.choice(("json", "value", "long", "request", "reply", "id")) if rng.random() < 0.1 else ""
    again_after = rng.choice((0.0, 0.1, 3.0)) if rng.random() < 0.2 and bad != "id" else None
    again_seed = rng.randrange(100) if again_after is not None and not bad and rng.random() < 0.5 else None
    queued = Queued(bad, again_after, again_seed, bad == "reply" or rng.random() < 0.3)
    return replace(ask, stop_token=None, leaves_after=None, reads_every=0.0, priority=0, queued=queued)


def _draw(rng: Random, name: str, at: float, prompt: tuple[int, ...], max_tokens: int, leavers: float) -> Ask:
    seed, dice = rng.randrange(100), rng.random()
    ask = Ask(name, at, prompt, max_tokens, seed, rng.choice((0, 0, 0, 1, -1)))
    if rng.random() < leavers:
        return Ask(**{**vars(ask), "leaves_after": rng.expovariate(8)})
    if dice < 0.1 or (max_tokens > 20 and dice < 0.5):
        answer = _answer(prompt, max_tokens, seed)
        return Ask(**{**vars(ask), "stop_token": rng.choice(answer)})
    if dice < 0.15:
        answer = _answer(prompt, max_tokens, seed)
        return Ask(**{**vars(ask), "stop_text": f"{rng.choice(answer)} "})
    if dice < 0.2:
        return Ask(**{**vars(ask), "reads_every": rng.uniform(0.05, 0.6)})
    return ask


def with_choices(rng: Random, ask: Ask) -> Ask:
    """The same for several choices, of which mostly one ends early with a stop string, which only the gateway knows."""
    num_choices, max_tokens = rng.choice((2, 2, 3, 4)), rng.choice((2, 6, 9, 16))
    if len(ask.prompt) < 40:
        max_tokens += rng.choice((0, 0, 0, 14))
    ask = replace(ask, num_choices=num_choices, max_tokens=max_tokens, stop_text="")
    if rng.random() < 0.8:
        answer = ask.tokens(rng.randrange(num_choices))
        ask = replace(ask, stop_text=f"{rng.choice(answer[: 1 + max_tokens // 2])} ")
    return ask


@dataclass
class Call:
    """One client's side of its request."""

    ask: Ask
    heard: list[list[str]] = field(init=False)  # by choice
    reasons: dict[int, str] = field(default_factory=dict)  # of the choices that have ended
    outcome: str = ""  # stop, length, left, broken, error; "" = still open
    error: str = ""
    ends: Counter[int] = field(default_factory=Counter)  # by choice
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    broken: bool = False  # its gateway died: nothing reaches it any more
    started_at: float = 0.0
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        self.heard = [[] for _ in range(self.ask.num_choices)]

    @property
    def is_open(self) -> bool:
        return not self.outcome

    def end(self, outcome: str, now: float, error: str = "") -> None:
        if self.is_open:
            self.outcome, self.error, self.ended_at = outcome, error, now

    def hear(self, delta: Delta) -> None:
        if self.broken:
            return
        self.heard[delta.choice].append(delta.text)
        if delta.finish_reason is not None:
            self.ends[delta.choice] += 1
            self.reasons[delta.choice] = delta.finish_reason

    async def talk(self, services: Services, gateway: Incarnation, world: "World") -> None:
        """The HTTP request, from arrival to end, inside its gateway."""
        clock = world.clock
        self.started_at = clock.now()
        stops = [self.ask.stop_text] if self.ask.stop_text else []
        try:
            with self.scope:
                async with Generation(
                    services,
                    [self.ask.request(gateway)],
                    Shown(stops=tuple(stops)),
                    endpoint="completions",
                    stream=True,
                    arrived_at=services.clock.now(),
                ) as generation:
                    while deltas := await generation.read():
                        for delta in deltas:
                            self.hear(delta)
                        world.judge.hints.heard(self)
                        if self.ask.reads_every:
                            await clock.sleep(self.ask.reads_every)
                self.end(self.reasons.get(0, "nothing"), clock.now())
        except ApiError as exc:
            self.end("error", clock.now(), f"{exc.status} {exc.code or exc.message}")
        if self.is_open:  # it was cancelled
            self.end("left", clock.now())
            world.judge.left(self)

    def fault(self) -> str:
        """What is wrong with what was heard; "" if nothing."""
        if self.is_open:
            return "never ended"
        is_whole = self.outcome not in ("left", "broken", "error")
        for choice, (text, reason) in enumerate(self.ask.expected_all()):
            heard = "".join(self.heard[choice])
            if is_whole or self.ends[choice]:
                if heard != text:
                    return f"heard {heard!r} of choice {choice}, expected {text!r}"
                if self.reasons.get(choice) != reason:
                    return f"choice {choice} ended by {self.reasons.get(choice)}, expected {reason}"
                if self.ends[choice] != 1:
                    return f"{self.ends[choice]} ends of choice {choice}"
            elif not text.startswith(heard):
                return f"heard {heard!r} of choice {choice}, expected a beginning of {text!r}"
        return ""
