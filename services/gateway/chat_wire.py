"""The JSON of OpenAI's chat completions: text, reasoning and tool calls."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from services.gateway.answer import AnswerParser, AnswerShape, CallBegan, CallPart, Content, Piece, Reasoning
from services.gateway.answers import Answer
from services.gateway.choice import Delta, Logged
from services.gateway.generation import Usage
from services.gateway.wire import BaseWire, encode_json, usage_object


class ChatWire(BaseWire):
    """One response. Takes answers apart as `shape` says; a plain one costs nothing."""

    _KIND = "chat.completion.chunk"

    def __init__(self, response_id: str, created: int, model: str, include_usage: bool, shape: AnswerShape) -> None:
        super().__init__(response_id, created, model, include_usage)
        self._id = response_id
        self.shape = shape
        self._parsers: dict[int, AnswerParser] = {}  # of the streamed choices

    def first(self, num_choices: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._delta(i, delta) for i in range(num_choices))

    def chunk(self, delta: Delta) -> bytes:
        """The finish reason has an event of its own, with an empty delta, as OpenAI sends it."""
        return self._told(delta) + self._chunk(delta)

    def _told(self, delta: Delta) -> bytes:
        """Of the prompt, once: an event with an empty delta, before any text."""
        if self.writer is None or delta.choice != 0 or delta.prompt_logprobs is None:
            return b""
        told = self.writer.prompt_of(0, delta.prompt_logprobs)
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
        return self._event(self._KIND, [choice], extra=told) if told else b""

    def _chunk(self, delta: Delta) -> bytes:
        logprobs = self._logprobs(delta.logged) if delta.logged else None
        if self.shape.is_plain:
            text = {"content": delta.text}
            events = self._delta(delta.choice, text, logprobs=logprobs) if delta.text or logprobs else b""
            return events + (self._delta(delta.choice, {}, delta.finish_reason) if delta.finish_reason else b"")
        parser = self._parsers.setdefault(delta.choice, AnswerParser(self.shape))
        pieces = parser.push(delta.text, delta.num_output_tokens)
        if delta.finish_reason is not None:
            pieces += parser.finish()
        events = self._delta(delta.choice, {}, logprobs=logprobs) if logprobs else b""
        events += b"".join(self._delta(delta.choice, self._part(delta.choice, piece)) for piece in pieces)
        if delta.finish_reason is not None:
            events += self._delta(delta.choice, {}, _reason(delta.finish_reason, parser))
        return events

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._event(self._KIND, [], self._usage(usage, self._parsers.values()))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        parsers = [AnswerParser(self.shape) for _ in answers]
        choices = [
            self._choice(i, answer, parsers[i]) | {"logprobs": self._logprobs(answer.logged)}
            for i, answer in enumerate(answers)
        ]
        if self.writer is not None and answers[0].prompt_logprobs is not None:
            self._head |= self.writer.prompt_of(0, answers[0].prompt_logprobs)
        return encode_json(
            {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage(usage, parsers)}
        )

    def _logprobs(self, logged: Sequence[Logged]) -> dict[str, Any] | None:
        return self.writer.chat(logged) if self.writer is not None and self.writer.is_on else None

    def _usage(self, usage: Usage, parsers: Iterable[AnswerParser]) -> dict[str, Any]:
        if not self.shape.reasoning:
            return usage_object(usage)
        count = sum(parser.num_reasoning_tokens for parser in parsers)
        return usage_object(usage) | {"completion_tokens_details": {"reasoning_tokens": count}}

    def _choice(self, index: int, answer: Answer, parser: AnswerParser) -> dict[str, Any]:
        text, reason = answer.text, answer.reason
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if not self.shape.is_plain:
            message |= self._parts(index, parse(parser, answer))
            reason = _reason(reason, parser)
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def _parts(self, choice: int, pieces: list[Piece]) -> dict[str, Any]:
        """The message's fields."""
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, CallBegan):
                function = {"name": piece.name, "arguments": ""}
                calls.append({"id": call_id(self._id, choice, piece.index), "type": "function", "function": function})
            elif isinstance(piece, CallPart):
                calls[piece.index]["function"]["arguments"] += piece.text
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        out: dict[str, Any] = {"content": None if calls and not content else content}
        if calls:
            out["tool_calls"] = calls
        if self.shape.reasoning:
            out["reasoning_content"] = reasoning or None
        return out

    def _part(self, choice: int, piece: Piece) -> dict[str, Any]:
        """The delta of a streamed piece."""
        match piece:
            case Content():
                return {"content": piece.text}
            case Reasoning():
                return {"reasoning_content": piece.text}
            case CallBegan():
                call = {"index": piece.index, "id": call_id(self._id, choice, piece.index), "type": "function"}
                return {"tool_calls": [call | {"function": {"name": piece.name, "arguments": ""}}]}
            case CallPart():
                return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def _delta(
        self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._event(self._KIND, [choice])


def call_id(response_id: str, choice: int, index: int) -> str:
    """A function of the response, so that an answer which is written again says the same."""
    return "call_" + blake2b(f"{response_id}/{choice}/{index}".encode(), digest_size=12).hexdigest()


def parse(parser: AnswerParser, answer: Answer) -> list[Piece]:
    """All of an answer that is not streamed."""
    pieces: list[Piece] = []
    for text, num_tokens in zip(answer.parts, answer.counts, strict=True):
        pieces += parser.push(text, num_tokens)
    return pieces + parser.finish()


def _reason(reason: str, parser: AnswerParser) -> str:
    return "tool_calls" if reason == "stop" and parser.num_calls else reason
