"""The items of a response's output: reasoning, messages and function calls, in the order in which a model writes them.

Streamed or not, they are made the same way: the pieces of the answer go in, OpenAI's typed events come out, and the
items are what the events have said.
"""

from collections.abc import Iterable
from typing import Any, Literal

from services.gateway.answer import CallBegan, CallPart, Content, Piece, Reasoning
from services.gateway.chat_wire import call_id

Event = tuple[str, dict[str, Any]]
"""Its type, and what it holds beside."""
Status = Literal["in_progress", "completed", "incomplete"]
_ID_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXT_EVENT = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class OutputItems:
    """One response's. At most one item is open, the last one."""

    def __init__(self, response_id: str) -> None:
        self.items: list[dict[str, Any]] = []  # those that are complete
        self._response_id = response_id
        self._num_calls = 0
        self._kind = ""  # of the open item; "" = none is
        self._name = ""  # of the open call
        self._parts: list[str] = []

    def push(self, pieces: Iterable[Piece]) -> list[Event]:
        """The events of these pieces."""
        out: list[Event] = []
        for piece in pieces:
            match piece:
                case Reasoning():
                    out += self._text("reasoning", piece.text)
                case Content():
                    out += self._text("message", piece.text)
                case CallBegan():
                    out += self._begin("function_call", piece.name)
                case CallPart():
                    out += self._more("response.function_call_arguments", piece.text)
        return out

    def finish(self, status: Status) -> list[Event]:
        """The answer is over; one without any text has an empty message. :param status: of the last item."""
        begun = [] if self._kind or self.items else self._begin("message")
        return begun + self._end(status)

    def _text(self, kind: str, text: str) -> list[Event]:
        begun = [] if self._kind == kind else self._begin(kind)
        return begun + self._more(_TEXT_EVENT[kind], text)

    def _begin(self, kind: str, name: str = "") -> list[Event]:
        out = self._end("completed")
        self._kind, self._name, self._parts = kind, name, []
        self._num_calls += kind == "function_call"
        out.append(("response.output_item.added", {"output_index": len(self.items), "item": self._item("in_progress")}))
        if kind != "function_call":
            out.append(("response.content_part.added", self._place() | {"part": self._part("")}))
        return out

    def _more(self, event: str, text: str) -> list[Event]:
        self._parts.append(text)
        return [(f"{event}.delta", self._place() | {"delta": text} | self._logprobs())]

    def _end(self, status: Status) -> list[Event]:
        if not self._kind:
            return []
        text, place = "".join(self._parts), self._place()
        if self._kind == "function_call":
            done = {"name": self._name, "arguments": text}
            out: list[Event] = [("response.function_call_arguments.done", place | done)]
        else:
            out = [
                (f"{_TEXT_EVENT[self._kind]}.done", place | {"text": text} | self._logprobs()),
                ("response.content_part.done", place | {"part": self._part(text)}),
            ]
        item = self._item(status)
        out.append(("response.output_item.done", {"output_index": len(self.items), "item": item}))
        self.items.append(item)
        self._kind = ""
        return out

    def _item(self, status: Status) -> dict[str, Any]:
        """The open item. In progress it has no text yet."""
        text = "".join(self._parts)
        item: dict[str, Any] = {"id": self._item_id(), "type": self._kind, "status": status}
        if self._kind == "function_call":
            number = call_id(self._response_id, 0, self._num_calls - 1)
            return item | {"call_id": number, "name": self._name, "arguments": text}
        content = [] if status == "in_progress" else [self._part(text)]
        if self._kind == "reasoning":
            return item | {"summary": [], "content": content}
        return item | {"role": "assistant", "content": content}

    def _item_id(self) -> str:
        return f"{_ID_PREFIX[self._kind]}-{self._response_id.partition('-')[2]}-{len(self.items)}"

    def _place(self) -> dict[str, Any]:
        place = {"item_id": self._item_id(), "output_index": len(self.items)}
        return place if self._kind == "function_call" else place | {"content_index": 0}

    def _logprobs(self) -> dict[str, Any]:
        """What events of text hold in any case; nobody can ask for them here."""
        return {"logprobs": []} if self._kind == "message" else {}

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
