"""What a runner remembers between two steps: the tokens that it sampled, for a plan made before they were known."""

from collections.abc import Mapping, Sequence

from services.engine.types import SeqId, StepPlan

NO_TOKENS: Mapping[SeqId, int] = {}


class StepLost(Exception):
    """A plan was made ahead of a step that failed. The runner has not begun it."""


class LastTokens:
    """Of one runner."""

    def __init__(self) -> None:
        self._step = 0
        self._tokens: Mapping[SeqId, int] = NO_TOKENS

    def take(self, plan: StepPlan) -> Mapping[SeqId, int]:
        """The last token of each seq in the step before; forgotten here, so that a failed step leaves none.

        :raises StepLost: the plan builds on a step that was not run to its end.
        """
        tokens, step = self._tokens, self._step
        self._tokens, self._step = NO_TOKENS, 0
        if plan.after and step != plan.after:
            raise StepLost(f"step {plan.step} builds on step {plan.after}, which failed")
        return tokens

    def put(self, plan: StepPlan, sampled: Sequence[Sequence[int]]) -> None:
        """The step was run; `sampled` as in `StepResult`."""
        self._step = plan.step
        self._tokens = {item.seq_id: new[-1] for item, new in zip(plan.items, sampled, strict=True) if new}
