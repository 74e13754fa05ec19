"""What a worker knows of its request's choices: how far each is, and which have ended. A request ends with the last."""

from dataclasses import dataclass, field

from services.engine.seq import finish_reason
from shared.ids import RequestId
from shared.messages import Finished, FinishReason, RequestState


@dataclass(slots=True)
class Choices:
    num_output: list[int]
    reasons: dict[int, FinishReason] = field(default_factory=dict)  # of those that have ended

    @classmethod
    def of(cls, state: RequestState, max_model_len: int) -> "Choices":
        """As the token logs say."""
        self = cls([len(output) for output in state.outputs])
        for choice, output in enumerate(state.outputs):
            total = len(state.request.token_ids) + len(output)
            if reason := finish_reason(state.request.sampling, output, total, max_model_len):
                self.reasons[choice] = reason
        return self

    @property
    def over(self) -> bool:
        return len(self.reasons) == len(self.num_output)

    @property
    def open(self) -> list[int]:
        return [choice for choice in range(len(self.num_output)) if choice not in self.reasons]

    def said(self, choice: int, num_output: int, finish: FinishReason | None) -> bool:
        """A choice has so many output tokens now, and may have ended with the last. True: the request has."""
        self.num_output[choice] = num_output
        if finish is None:
            return False
        self.reasons[choice] = finish
        return self.over

    def finished(self, request_id: RequestId, epoch: int, num_cached_tokens: int) -> Finished:
        """The request's end."""
        first, *others = self.num_output
        return Finished(request_id, epoch, self.reasons[0], first, num_cached_tokens, "", tuple(others))
