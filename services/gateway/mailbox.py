"""What one HTTP request has received and not yet written: bounded, and never in the way of others."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from shared.messages import Finished, TokenLogprobs

MAX_ITEMS = 32
"""Items kept apart; beyond, a slow client's tokens are merged into the last item of their choice."""


@dataclass(slots=True)
class Item:
    """Tokens of one choice that arrived together, or its end (`finished`, without tokens)."""

    choice: int
    token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the tokens, if they were asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Mailbox:
    """Owned by one HTTP request; its streams put, its response takes. `put` never waits.

    At most MAX_ITEMS items plus two for each choice, whatever the client does; the tokens in them are
    bounded by the request's own `max_tokens`.
    """

    def __init__(self, max_items: int = MAX_ITEMS) -> None:
        self._max_items = max_items
        self._items: list[Item] = []
        self._last: dict[int, Item] = {}
        self._filled = anyio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(
        self,
        choice: int,
        token_ids: list[int],
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        last = self._last.get(choice)
        if last is not None and len(self._items) >= self._max_items:
            last.token_ids.extend(token_ids)
            last.logprobs.extend(logprobs)
            return
        self._append(Item(choice, list(token_ids), None, list(logprobs), prompt_logprobs))

    def finish(self, choice: int, finished: Finished) -> None:
        self._append(Item(choice, finished=finished))

    async def take(self) -> list[Item]:
        """Everything that is here, oldest first; waits if there is nothing."""
        if not self._items:
            self._filled = anyio.Event()
            await self._filled.wait()
        items, self._items = self._items, []
        self._last.clear()
        return items

    def _append(self, item: Item) -> None:
        self._items.append(item)
        self._last[item.choice] = item
        self._filled.set()
