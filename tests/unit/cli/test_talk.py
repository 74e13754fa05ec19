"""What the CLI says to services and reads from them: chat and metrics."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from services.cli.chat import Conversation, chat, stream_answer, turn
from services.cli.errors import CommandError
from services.cli.status import figures, parse_metrics


def chunk(text: str) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}) + "\n\n"


ROLE = 'data: {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}\n\n'
USAGE = 'data: {"choices": [], "usage": {"total_tokens": 3}}\n\n'
DONE = "data: [DONE]\n\n"


class Server:
    """Answers each POST with the next script; remembers the bodies."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.scripts: list[tuple[int, str]] = []
        self.bodies: list[dict[str, object]] = []


@contextmanager
def serving(*scripts: tuple[int, str]) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, '{"data": [{"id": "tiny"}]}')

        def do_POST(self) -> None:
            server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer(*server.scripts.pop(0))

        def answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{http.server_port}")
    server.scripts = list(scripts)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def test_one_message_prints_its_answer(capsys: pytest.CaptureFixture[str]):
    """Pieces come out joined; role and usage chunks show nothing; the request is a plain chat completion."""
    with serving((200, ROLE + chunk("Hel") + chunk("lo 😀") + USAGE + DONE)) as server:
        chat(Conversation(server.url, system="Be brief.", max_tokens=5, temperature=0.0), "Hi")
    assert capsys.readouterr().out == "Hello 😀\n"
    assert server.bodies == [
        {
            "model": "default",
            "stream": True,
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "max_tokens": 5,
            "temperature": 0.0,
        }
    ]


def test_a_conversation_remembers_until_it_is_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The second turn carries the first; after /reset there is none; /exit leaves."""
    lines = iter(["one", "two", "/help", "", "/reset", "three", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    with serving(*[(200, chunk(f"a{i}") + DONE) for i in range(3)]) as server:
        chat(Conversation(server.url), None)
    said = [[message["content"] for message in body["messages"]] for body in server.bodies]  # type: ignore[union-attr]
    assert said == [["one"], ["one", "a0", "two"], ["three"]]
    assert "tiny" in capsys.readouterr().out


def test_ctrl_c_stops_an_answer_and_keeps_what_came(capsys: pytest.CaptureFixture[str]):
    """The conversation goes on from the part that was shown."""
    conversation = Conversation("http://unused")

    def interrupted(_request: httpx.Request) -> httpx.Response:
        def body() -> Iterator[bytes]:
            yield chunk("part").encode()
            raise KeyboardInterrupt

        return httpx.Response(200, content=body())

    with httpx.Client(transport=httpx.MockTransport(interrupted)) as client:
        turn(client, conversation, "Hi")
    assert conversation.messages[-1] == {"role": "assistant", "content": "part"}
    assert "[stopped]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (429, '{"error": {"message": "The queue is full."}}', r"The queue is full\. \(HTTP 429\)"),
        (502, "bad gateway", "HTTP 502: bad gateway"),
        (200, chunk("x") + 'data: {"error": {"message": "worker lost"}}\n\n', "worker lost"),
        (200, chunk("x"), "the answer broke off"),
        (200, "data: {nonsense\n\n", "not a chat completion"),
    ],
)
def test_a_failed_turn_is_forgotten(status: int, body: str, message: str):
    """The error is told as the server put it, and the message can be sent again."""
    with serving((status, body)) as server, httpx.Client(trust_env=False) as client:
        conversation = Conversation(server.url)
        with pytest.raises(CommandError, match=message):
            turn(client, conversation, "Hi")
        assert conversation.messages == []


def test_nobody_there():
    """The message says how to start a server."""
    with httpx.Client(trust_env=False) as client, pytest.raises(CommandError, match="start it with"):
        list(stream_answer(client, Conversation("http://127.0.0.1:1")))


def test_metrics_are_summed_over_labels():
    """Comments and odd lines are skipped; labels may hold anything."""
    text = '# HELP a b\na{x="}1 2"} 3\na{x="z"} 4.5\nb 1e3 1700000000\nodd\nc{} NaN?\n'
    assert parse_metrics(text) == {"a": 7.5, "b": 1000.0}


def test_figures_are_the_few_that_matter():
    """A worker's and a gateway's key numbers in words; faults only where there are any."""
    worker = {
        "baton_decode_engine_blocks_free": 90.0,
        "baton_decode_engine_blocks_total": 100.0,
        "baton_decode_fetch_failed_total": 2.0,
        "baton_decode_failed_total": 0.0,
        "python_gc_objects_collected_total": 5.0,
    }
    assert figures(worker) == "blocks free 90/100, fetches failed 2"
    gateway = {"baton_gateway_requests_total": 3.0, "baton_gateway_ttft_seconds_sum": 0.5}
    assert figures(gateway | {"baton_gateway_ttft_seconds_count": 2.0}) == "done 3, mean TTFT 250 ms"
