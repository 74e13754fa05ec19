"""Cancels that arrived before their task was read: control is read first, so the order can turn round."""

from shared.ids import RequestId

MAX_REMEMBERED = 4096


class Tombstones:
    """Remembers the last few thousand; the fences in Redis catch what was forgotten."""

    def __init__(self) -> None:
        self._epochs: dict[RequestId, int] = {}

    def add(self, request_id: RequestId, epoch: int) -> None:
        self._epochs[request_id] = max(epoch, self._epochs.pop(request_id, 0))
        while len(self._epochs) > MAX_REMEMBERED:
            self._epochs.pop(next(iter(self._epochs)))

    def covers(self, request_id: RequestId, epoch: int) -> bool:
        """Whether a task of this epoch was cancelled before it came."""
        return self._epochs.get(request_id, 0) >= epoch

    def forget(self, request_id: RequestId) -> None:
        """What was cancelled was an earlier life of the request."""
        self._epochs.pop(request_id, None)
