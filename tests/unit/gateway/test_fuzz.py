"""Bodies that no client would send: every answer is 200 or an error in OpenAI's shape, and never the server's fault.

`BATON_FUZZ_BODIES=100000 pytest tests/unit/gateway/test_fuzz.py` for the long run.
"""

import json
import os
from collections import Counter
from random import Random
from typing import Any

import pytest

from services.gateway import responses
from services.gateway.params import REFUSED
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.test_output import say

pytestmark = pytest.mark.anyio
NUM_BODIES = int(os.environ.get("BATON_FUZZ_BODIES", "1500"))
COMMON: dict[str, list[Any]] = {
    "max_tokens": [0, 1, 3, 16],
    "max_completion_tokens": [1, 5],
    "temperature": [0, 0.5, 1, 2],
    "top_p": [0.1, 1],
    "top_k": [-1, 0, 5],
    "min_p": [0, 0.5, 1],
    "seed": [1, -5, 2**62],
    "n": [1, 2, 5],
    "stop": ["a", ["b", "c"], "one"],
    "stop_token_ids": [[], [5, 6]],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, {}],
    "presence_penalty": [-2, 0, 1.5],
    "frequency_penalty": [-2, 0, 1.5],
    "repetition_penalty": [0.5, 1, 3],
    "logit_bias": [{}, {"5": 1}, {"9": -100, "10": 3.5}],
    "min_tokens": [0, 2],
    "prompt_logprobs": [0, 3],
    "ignore_eos": [True],
    "skip_special_tokens": [True, False],
    "include_stop_str_in_output": [True],
    "user": ["u"],
    "metadata": [{"a": "b"}],
    "priority": [0, -3, 7],
    "model": ["default", "smol"],
    "response_format": [{"type": "text"}],
    "store": [True],
}
OF_COMPLETIONS = {
    "prompt": ["hi", ["a", "b"], [5, 6], [[5], [7, 8]]],
    "logprobs": [0, 5],
    "echo": [True, False],
    "best_of": [1, 3, 5],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OF_CHAT: dict[str, list[Any]] = {
    "messages": [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "t"}]}],
    ],
    "logprobs": [True, False],
    "top_logprobs": [0, 4],
    "tools": [[], [TOOL], [TOOL, {"type": "function", "function": {"name": "g"}}]],
    "tool_choice": ["none", "auto", {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": [True, False],
    "chat_template_kwargs": [{}, {"x": 1}],
    "add_generation_prompt": [True],
}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OF_RESPONSES = {
    "input": [
        "hi",
        [{"role": "user", "content": "hi"}],
        [CALL, {**CALL, "type": "function_call_output", "output": "x"}],
    ],
    "instructions": ["Be short."],
    "max_output_tokens": [1, 5],
    "tools": [[], [{"type": "function", "name": "f", "parameters": {}}]],
    "tool_choice": ["none", "auto", {"type": "function", "name": "f"}],
    "text": [{"format": {"type": "text"}}, {}],
    "include": [[], ["reasoning.encrypted_content"]],
    "store": [False],
}
KINDS = {
    "/v1/completions": ("prompt", OF_COMPLETIONS, REFUSED),
    "/v1/chat/completions": ("messages", OF_CHAT, REFUSED),
    "/v1/responses": ("input", OF_RESPONSES, responses.REFUSED | REFUSED),
    "/tokenize": ("prompt", {"add_special_tokens": [True, False], "messages": OF_CHAT["messages"]}, REFUSED),
    "/detokenize": ("tokens", {}, REFUSED),
}


def junk(rng: Random, depth: int = 0) -> Any:
    """Any JSON value, mostly the awkward ones."""
    kind = rng.randrange(12 if depth < 3 else 9)
    if kind == 9:
        return [junk(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind >= 10:
        names = ["type", "text", "content", "role", "5", "-1", "include_usage", "json_schema", "\ud800", ""]
        return {rng.choice(names): junk(rng, depth + 1) for _ in range(rng.randrange(4))}
    words = ["", "a", "\ud800", "\x00", "user", "text", "NaN", "9" * 400, "\N{PARROT}" * 20, "x" * 1500]
    return [
        None,
        rng.random() < 0.5,
        rng.choice([0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**30]),
        rng.choice([0.0, -0.0, 1e308, -1e308, 5e-324, 0.5]),
        rng.choice(words),
        rng.choice(words),
        rng.randint(-10, 200),
        [],
        {},
    ][kind]


def body(rng: Random, path: str) -> dict[str, Any]:
    """Mostly right, with one to three wounds; sometimes all wrong."""
    need, own, refused = KINDS[path]
    known = {name: values for name, values in COMMON.items() if path != "/v1/responses" or name not in refused}
    known |= {need: [[5, 6]]} | own
    names = [need, *rng.sample(sorted(known), rng.randrange(8))]
    out = {name: rng.choice(known[name]) for name in names}
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        out[rng.choice([*known, *refused, "unknown"])] = junk(rng)
    if rng.random() < 0.05:
        out.pop(need, None)
    return out


def raw(rng: Random, value: Any) -> bytes:
    """As JSON, now and then cut or flipped."""
    data = json.dumps(value).encode()
    if rng.random() < 0.03:
        return data[: rng.randrange(len(data) + 1)]
    if rng.random() < 0.03:
        at = rng.randrange(len(data))
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    return data


def check_other(path: str, text: str, sent: bytes) -> None:
    """An answer that is not one of completions."""
    if text.startswith("event: "):
        events = [event.partition("data: ")[2] for event in text.split("\n\n")[:-1]]
        assert json.loads(events[-1])["type"] in ("response.completed", "response.incomplete"), sent
    else:
        name = {"/v1/responses": "output", "/tokenize": "tokens", "/detokenize": "prompt"}[path]
        assert name in json.loads(text), sent


def check(path: str, status: int, text: str, sent: bytes) -> None:
    assert status in (200, 400, 404, 413, 415), f"{status} for {sent[:2000]!r}: {text[:500]}"
    if status == 200:
        if path == "/v1/responses" or "tokenize" in path:
            check_other(path, text, sent)
        elif text.startswith("data: "):
            assert text.endswith("data: [DONE]\n\n"), sent
            assert not any("error" in json.loads(e[6:]) for e in text.split("\n\n")[:-2]), sent
        else:
            assert json.loads(text)["choices"], sent
        return
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}, sent
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["param"] is None or isinstance(error["param"], str)


@pytest.mark.timeout(max(120, NUM_BODIES // 20))
async def test_no_body_breaks_the_server(gateway: Gateway) -> None:
    """Right, half right and broken bodies to every endpoint; some of them are answered, most are refused."""
    rng = Random(20261129)
    gateway.port.script = say(gateway.ids("one two"), gateway.ids("three"), [5, 6, 900])
    seen: Counter[int] = Counter()
    async with gateway.client() as client:
        for _ in range(NUM_BODIES):
            (path,) = rng.choices(list(KINDS), (4, 4, 4, 1, 1))
            sent = raw(rng, body(rng, path) if rng.random() < 0.98 else junk(rng))
            answer = await client.post(path, content=sent, headers={"content-type": "application/json"})
            check(path, answer.status_code, answer.text, sent)
            seen[answer.status_code] += 1
            gateway.port.admitted.clear()
            gateway.port.cancelled.clear()
            gateway.observer.seen.clear()
    print(dict(seen))
    assert seen[200] > NUM_BODIES / 10
    assert seen[400] > NUM_BODIES / 10
