"""Everything that a client is refused, and that nothing it sends makes the server fail."""

import json
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.params import REFUSED
from shared.messages import Finished, GenerateRequest, Tokens
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.fakes import answer, worker

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "x"}]


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a refusal, whose shape is OpenAI's."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["type"]
    assert "Traceback" not in response.text
    return body["error"]


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.0}, "top_k"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ["ok", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 5}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    ({"model": 5}, "model"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"logprobs": 0.5}, "logprobs"),
    ({"logprobs": "yes"}, "logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": "much"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"stop_token_ids": [99999999]}, "stop_token_ids"),
    ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output"),
    ({"skip_special_tokens": 0}, "skip_special_tokens"),
    ({"echo": 1}, "echo"),
    ({"priority": 5000}, "priority"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"suffix": "x"}, "suffix"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda x: json.dumps(x)[:40])
async def test_a_bad_field_is_named(gateway: Gateway, path: str, fields: dict[str, Any], param: str):
    """400, and `param` says which field; nothing reaches the workers."""
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    async with gateway.client() as client:
        assert error(await client.post(path, json={**prompt, **fields}), 400)["param"] == param
    assert gateway.port.admitted == []


@pytest.mark.parametrize(
    "prompt",
    [None, "", {}, 5, [], [""], [[]], ["a", 5], [5, "a"], [[1], "a"], [1.5], [True], [-1], [49152], [[1], [2**64]]],
    ids=lambda x: json.dumps(x)[:30],
)
async def test_a_bad_prompt_is_named(gateway: Gateway, prompt: Any):
    """Empty, mixed, or ids outside of the vocabulary."""
    async with gateway.client() as client:
        assert error(await client.post(COMPLETIONS, json={"prompt": prompt}), 400)["param"] == "prompt"


async def test_too_many_prompts_are_refused(gateway: Gateway):
    """One HTTP request cannot fill the queue."""
    async with gateway.client() as client:
        assert error(await client.post(COMPLETIONS, json={"prompt": ["x"] * 129}), 400)["param"] == "prompt"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([*USER, {"role": "robot", "content": "x"}], "messages[1].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ],
    ids=lambda x: json.dumps(x)[:50],
)
async def test_a_bad_message_is_named(gateway: Gateway, messages: Any, param: str):
    """Down to the part of the message that is wrong."""
    async with gateway.client() as client:
        assert error(await client.post(CHAT, json={"messages": messages}), 400)["param"] == param


async def test_harmless_values_of_refused_fields_are_accepted(gateway: Gateway):
    """Clients send defaults along; they change nothing."""
    gateway.port.script = answer([5])
    harmless = {name: values[0] for name, values in REFUSED.items()}
    ignored = {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "x_unknown": [1]}
    nulls = dict.fromkeys(["max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "n", "tools"])
    async with gateway.client() as client:
        for fields in (harmless, ignored, nulls):
            response = await client.post(COMPLETIONS, json={"prompt": "x", **fields})
            assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b'"x"', 400, "invalid_json"),
        (b"nul", 400, "invalid_json"),
        (b'{"prompt": "\xff"}', 400, "invalid_json"),
        (b'{"prompt": NaN}', 400, "invalid_json"),
        (b'{"prompt": 1e999}', 400, "invalid_json"),
        (b'{"x":' * 50_000 + b"1" + b"}" * 50_000, 400, "invalid_json"),
        (b"[" * 500_000, 400, "invalid_json"),
        (b"9" * 100_000, 400, "invalid_json"),
        (b'{"prompt": "' + b"x" * (1 << 20) + b'"}', 413, "body_too_large"),
    ],
    ids=lambda x: str(x)[:24],
)
async def test_a_bad_body_is_refused(gateway: Gateway, body: bytes, status: int, code: str):
    """Broken, deep, huge: a 400 or 413."""
    async with gateway.client() as client:
        headers = {"content-type": "application/json"}
        assert error(await client.post(COMPLETIONS, content=body, headers=headers), status)["code"] == code


async def test_half_a_surrogate_pair_is_a_400(gateway: Gateway):
    """JSON can escape text that UTF-8 cannot carry."""
    async with gateway.client() as client:
        for field in (b'"prompt": "\\udc00 and more text"', b'"prompt": "x", "stop": "\\ud800\\ud800 and more"'):
            headers = {"content-type": "application/json"}
            error(await client.post(COMPLETIONS, content=b"{" + field + b"}", headers=headers), 400)


async def test_a_body_of_unknown_length_is_not_read_to_its_end(gateway: Gateway):
    """Reading stops at the limit."""
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while sent < 100 << 20:
            sent += 1 << 16
            yield b"x" * (1 << 16)

    async with gateway.client() as client:
        headers = {"content-type": "application/json"}
        response = await client.post(COMPLETIONS, content=endless(), headers=headers)
    assert error(response, 413)["code"] == "body_too_large"
    assert response.headers["connection"] == "close"
    assert sent < 2 << 20


async def test_another_content_type_is_a_415(gateway: Gateway):
    """Form data is not JSON; JSON with a charset, or of a subtype, is."""
    gateway.port.script = answer([5])
    async with gateway.client() as client:
        error(await client.post(COMPLETIONS, data={"prompt": "x"}), 415)
        for kind in ("application/json; charset=utf-8", "application/vnd.api+json", "APPLICATION/JSON"):
            response = await client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": kind})
            assert response.status_code == 200


async def test_unknown_models_routes_and_methods(gateway: Gateway):
    """404, 404, 405, in the same shape."""
    async with gateway.client() as client:
        assert error(await client.post(COMPLETIONS, json={"prompt": "x", "model": "gpt"}), 404)["param"] == "model"
        assert error(await client.get("/v1/nothing"), 404)["code"] == "unknown_url"
        response = await client.get(COMPLETIONS)
        error(response, 405)
        assert "POST" in response.headers["allow"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_prompt_beyond_the_context_is_named(gateway: Gateway, path: str):
    """Too long by tokens, hopeless by bytes, or together with max_tokens; the smallest worker decides."""
    gateway.port.live = [worker("decode", 4096), worker("prefill", 64)]
    async with gateway.client() as client:
        for text, extra in (("a b " * 64, {}), ("x" * 100_000, {}), ("hi", {"max_tokens": 64})):
            body = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
            assert error(await client.post(path, json=body | extra), 400)["code"] == "context_length_exceeded"
    assert gateway.port.admitted == []


async def test_a_full_queue_is_a_429_with_retry_after(gateway: Gateway):
    """And of several prompts, those that were admitted already are cancelled."""
    gateway.port.capacity = 2
    async with gateway.client() as client:
        response = await client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]})
        assert error(response, 429)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) > 0
        await gateway.port.cancel_seen.wait()
    admitted = {request.request_id for request in gateway.port.admitted}
    assert {request_id for request_id, _ in gateway.port.cancelled} <= admitted
    assert gateway.observer.of("refused") == [(429, "queue_full")]
    assert len(gateway.app.state.streams) == 0


@pytest.mark.parametrize("roles", [[], ["prefill"]])
async def test_without_a_decode_worker_it_is_a_503(gateway: Gateway, roles: list[Any]):
    """Prefill alone cannot answer."""
    gateway.port.live = [worker(role) for role in roles]
    async with gateway.client() as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x"})
    assert error(response, 503)["code"] == "no_worker"
    assert int(response.headers["retry-after"]) > 0


async def test_a_lost_queue_is_a_503(gateway: Gateway):
    """Redis away is no fault of the request."""
    gateway.port.broken = True
    async with gateway.client() as client:
        assert error(await client.post(COMPLETIONS, json={"prompt": "x"}), 503)["code"] == "unavailable"


async def test_a_crash_is_a_500_without_a_traceback(gateway: Gateway):
    """Bugs stay in the log."""

    def crash(request: GenerateRequest) -> Any:
        raise ZeroDivisionError("secret")

    gateway.port.script = crash
    async with gateway.client() as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x"})
    error(response, 500)
    assert "secret" not in response.text
    assert len(gateway.app.state.streams) == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("cancelled", 503)])
async def test_a_failure_before_the_first_token_has_its_status(
    gateway: Gateway, stream: bool, reason: Any, status: int
):
    """Also for a stream: nothing was promised yet. The worker's words stay in the log."""
    gateway.port.script = answer([], reason=reason, error="secret")
    async with gateway.client() as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
    error(response, status)
    assert "secret" not in response.text


async def test_a_failure_in_mid_stream_is_an_error_event_and_no_done(gateway: Gateway):
    """The text so far, then the error, then the end: a client cannot take it for a whole answer."""
    said = gateway.ids("one two")
    gateway.port.script = answer(said, reason="error", error="secret")
    async with gateway.client() as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
    assert response.status_code == 200
    *chunks, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == "one two"
    assert json.loads(last)["error"]["type"] == "server_error"
    assert "[DONE]" not in response.text
    assert "secret" not in response.text
    assert gateway.observer.of("finished")[0].reason == "error"


@pytest.mark.parametrize("why", ["shutting_down", "queue_timeout"])
async def test_what_the_server_does_not_go_on_with_says_why(gateway: Gateway, why: str):
    """In mid-stream as an `error` event, and the work upstream is cancelled."""
    said = gateway.ids("one")
    gateway.port.script = lambda request: [Tokens(request.request_id, 1, 0, 0, tuple(said))]
    async with gateway.client() as client, anyio.create_task_group() as tasks:

        async def refuse() -> None:
            await gateway.port.admit_seen.wait()
            await anyio.wait_all_tasks_blocked()
            gateway.app.state.streams.refuse_all(why)

        tasks.start_soon(refuse)
        response = await client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
    assert f'"code":"{why}"' in response.text
    assert "[DONE]" not in response.text
    assert [reason for _, reason in gateway.port.cancelled] == [why]


async def test_one_failed_prompt_fails_the_response_and_cancels_the_others(gateway: Gateway):
    """Half an answer is none."""

    def script(request: GenerateRequest) -> list[Any]:
        if request.request_id.endswith("-0"):
            return [Tokens(request.request_id, 1, 0, 0, (5,))]  # goes on and on
        return [Finished(request.request_id, 1, "error", error="x")]

    gateway.port.script = script
    async with gateway.client() as client:
        error(await client.post(COMPLETIONS, json={"prompt": ["a", "b"]}), 500)
        await gateway.port.cancel_seen.wait()
    assert gateway.port.cancelled == [(gateway.port.admitted[0].request_id, "sibling failed")]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
KNOWN = ["model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"]
KNOWN += ["seed", "stop", "ignore_eos", "stream", "stream_options", "user", "role", "content", "type", "text"]
KNOWN += list(REFUSED)
plausible = st.sampled_from([{"prompt": "x"}, {"prompt": [5, 6]}, {"messages": USER}, {"prompt": ["a", "b"]}])
noise = st.dictionaries(st.sampled_from(KNOWN), json_values, max_size=5)
bodies = st.builds(lambda a, b: {**a, **b}, plausible, noise)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("kind", ["objects", "bytes"])
async def test_no_body_makes_the_server_fail(gateway: Gateway, path: str, kind: str):
    """Whatever is sent, the answer is a 200 or a 4xx in OpenAI's shape."""
    gateway.port.script = answer([5], reason="stop")
    cases: list[bytes] = []

    @settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(bodies.map(lambda b: json.dumps(b).encode()) if kind == "objects" else st.binary(max_size=60))
    def collect(body: bytes) -> None:
        cases.append(body)

    collect()
    statuses: set[int] = set()
    async with gateway.client() as client:
        for body in cases:
            response = await client.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code < 500, body
            if response.status_code != 200:
                error(response, response.status_code)
            statuses.add(response.status_code)
    assert 400 in statuses
    assert kind == "bytes" or 200 in statuses, "the bodies are too wild to get anywhere"
    assert len(gateway.app.state.streams) == 0
