"""The choices of an answer that is not streamed, and the best of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.choice import Delta, Logged
from shared.messages import GenerateRequest, TokenLogprobs


@dataclass(slots=True)
class Answer:
    """A choice, as far as it has come. Mutated by `add` alone."""

    index: int  # of all choices that are generated
    parts: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # output tokens with each of the parts
    logged: list[Logged] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    reason: str = ""
    num_scored: int = 0
    score: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def mean_logprob(self) -> float:
        """By token, as OpenAI's `best_of` ranks."""
        return self.score / max(1, self.num_scored)

    def add(self, delta: Delta) -> None:
        self.parts.append(delta.text)
        self.counts.append(delta.num_output_tokens)
        self.logged += delta.logged
        self.reason = delta.finish_reason or self.reason
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if not delta.logged:
            return
        for one in delta.logged[len(delta.logged) - len(delta.token_ids) :]:
            self.num_scored += 1
            self.score += one.told.logprob if one.told else 0.0


def empty_answers(requests: Sequence[GenerateRequest]) -> list[Answer]:
    """One for each choice of each request, in order."""
    return [Answer(index) for index in range(sum(request.num_choices for request in requests))]


def best(answers: Sequence[Answer], n: int, best_of: int) -> list[Answer]:
    """Of each prompt's `best_of` choices the `n` most probable ones, the best first; all, if that is all."""
    if n == best_of:
        return list(answers)
    kept: list[Answer] = []
    for start in range(0, len(answers), best_of):
        ranked = sorted(answers[start : start + best_of], key=lambda answer: -answer.mean_logprob)
        kept += ranked[:n]
    return kept
