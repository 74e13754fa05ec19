"""`baton chat`: a conversation in the terminal, through /v1/chat/completions as any client would have it."""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

from services.cli.errors import CommandError

HELP = "Type a message. /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


@dataclass(slots=True)
class Conversation:
    """What was said so far, and how to go on."""

    url: str
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    api_key: str = field(default="", repr=False)
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self) -> dict[str, object]:
        out: dict[str, object] = {"model": "default", "stream": True, "messages": self.messages}
        if self.max_tokens is not None:
            out["max_tokens"] = self.max_tokens
        if self.temperature is not None:
            out["temperature"] = self.temperature
        return out


def stream_answer(client: httpx.Client, conversation: Conversation) -> Iterator[str]:
    """Pieces of the answer to the conversation, as they come.

    :raises CommandError: no server, a refusal, or an answer that broke off.
    """
    try:
        with client.stream("POST", f"{conversation.url}/v1/chat/completions", json=conversation.body()) as answer:
            if answer.status_code != 200:
                answer.read()
                raise CommandError(_refusal(answer))
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield _piece(line.removeprefix("data: "))
    except httpx.ConnectError:
        raise CommandError(f"nothing answers at {conversation.url}; start it with './baton up'") from None
    except httpx.HTTPError as exc:
        raise CommandError(f"the answer broke off: {exc}") from None
    raise CommandError("the answer broke off")


def _piece(data: str) -> str:
    try:
        chunk = json.loads(data)
    except ValueError:
        raise CommandError(f"not a chat completion: {data[:200]}") from None
    if "error" in chunk:
        raise CommandError(str(chunk["error"].get("message", chunk["error"])))
    choices = chunk.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


def _refusal(answer: httpx.Response) -> str:
    try:
        return f"{answer.json()['error']['message']} (HTTP {answer.status_code})"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}: {answer.text[:200]}"


def turn(client: httpx.Client, conversation: Conversation, message: str) -> None:
    """One message and its answer, printed as it streams. A stopped answer stays in the conversation as far as
    it came; a failed one leaves it as it was."""
    conversation.messages.append({"role": "user", "content": message})
    pieces: list[str] = []
    try:
        for piece in stream_answer(client, conversation):
            pieces.append(piece)
            print(piece, end="", flush=True)
    except CommandError:
        conversation.messages.pop()
        raise
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    finally:
        print(flush=True)
    conversation.messages.append({"role": "assistant", "content": "".join(pieces)})


def chat(conversation: Conversation, message: str | None) -> None:
    """One answer to `message`, or a conversation until Ctrl-D.

    :raises CommandError: with `message`, anything that kept it from being answered; in a conversation only
        that there is no server at its start.
    """
    conversation.reset()
    with httpx.Client(headers=conversation.headers(), trust_env=False, timeout=httpx.Timeout(10, read=600)) as client:
        if message is not None:
            turn(client, conversation, message)
            return
        print(f"{served_model(client, conversation.url)}. {HELP}")
        _converse(client, conversation)


def _converse(client: httpx.Client, conversation: Conversation) -> None:
    while (message := _read_message()) is not None:
        if message == "/exit":
            return
        if message == "/reset":
            conversation.reset()
            print("Forgotten.")
        elif message.startswith("/"):
            print(HELP)
        elif message:
            try:
                turn(client, conversation, message)
            except CommandError as exc:
                print(f"baton: {exc}", file=sys.stderr)


def _read_message() -> str | None:
    """The next line; None at the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() editing and history, where Python has it
    while True:
        try:
            return input("\n> ").strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)")


def served_model(client: httpx.Client, url: str) -> str:
    """Name of the model that answers at `url`.

    :raises CommandError: nothing answers, or nothing that serves a model.
    """
    try:
        return str(client.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"])
    except httpx.ConnectError:
        raise CommandError(f"nothing answers at {url}; start it with './baton up'") from None
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as exc:
        raise CommandError(f"what answers at {url} serves no model: {exc}") from None
