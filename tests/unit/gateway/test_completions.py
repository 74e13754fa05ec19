"""Both endpoints against a scripted model: what a client gets back, and what the workers are asked."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from shared.hashing import block_hashes, chain_root
from shared.messages import Finished, Tokens
from tests.unit.gateway.conftest import Gateway, make_gateway
from tests.unit.gateway.fakes import answer, worker
from tests.unit.shared.tokenizer.test_tokenizer import tiny

pytestmark = pytest.mark.anyio
TEXT = "Hello 🦜 there, END of it"


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json={"prompt": "hi", **body})
    assert response.status_code == 200, response.text
    return response.json()


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream; `[DONE]` as a string."""
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def test_a_completion_has_text_reason_and_usage(gateway: Gateway):
    """The whole answer at once."""
    said = gateway.ids(TEXT)
    gateway.port.script = answer(said, num_cached_tokens=16)
    async with gateway.client() as client:
        body = await complete(client, max_tokens=len(said), model="default")
    assert body["object"] == "text_completion"
    assert body["model"] == "smol"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length"}]
    prompt = len(gateway.ids("hi"))
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(said),
        "total_tokens": prompt + len(said),
        "prompt_tokens_details": {"cached_tokens": 16},
    }


async def test_a_streamed_completion_has_the_same_text_and_ends_as_openai_does(gateway: Gateway):
    """Chunks of text, one for each token that completes some; the reason; the usage alone; [DONE]."""
    said = gateway.ids(TEXT)
    gateway.port.script = answer(said)
    async with gateway.client() as client:
        body = {"prompt": "hi", "max_tokens": len(said), "stream_options": {"include_usage": True}}
        *chunks, usage, done = await events(client, "/v1/completions", body)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(said)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == TEXT
    assert "\ufffd" not in "".join(texts)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    prefixes = [gateway.tokenizer.decode(said[: i + 1]).rstrip("\ufffd") for i in range(len(said))]
    assert len(set(prefixes)) < len(said), "the sample has no character of several tokens"
    assert texts == [b.removeprefix(a) for a, b in pairwise(["", *prefixes]) if a != b] + [""]


async def test_a_chat_stream_begins_with_the_role_and_ends_with_an_empty_delta(gateway: Gateway):
    """OpenAI's order of chunks."""
    gateway.port.script = answer(gateway.ids("Hey you"), reason="stop")
    messages = [{"role": "user", "content": "hi"}]
    async with gateway.client() as client:
        first, *texts, last, done = await events(client, "/v1/chat/completions", {"messages": messages})
    assert first["object"] == "chat.completion.chunk"
    assert first["id"].startswith("chatcmpl-")
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in texts) == "Hey you"
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert "usage" not in last
    assert done == "[DONE]"


async def test_a_chat_is_rendered_by_the_models_template(gateway: Gateway):
    """The worker gets the template's tokens, with text parts joined."""
    gateway.port.script = answer(gateway.ids("Hey"), reason="stop")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": parts}]
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", json={"messages": messages})
    assert response.json()["choices"][0]["message"] == {"role": "assistant", "content": "Hey", "refusal": None}
    assert response.json()["object"] == "chat.completion"
    want = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert list(gateway.port.admitted[0].token_ids) == gateway.ids(want)


async def test_the_request_carries_everything_that_was_asked(gateway: Gateway):
    """Sampling, hashes under the deployment's root, the gateway's name."""
    gateway.port.script = answer([5])
    prompt = list(range(1000, 1040))
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 42, "max_tokens": 9}
    async with gateway.client() as client:
        await complete(client, prompt=prompt, **fields)
    request = gateway.port.admitted[0]
    sampling = request.sampling
    asked = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, sampling.max_tokens)
    assert asked == (0.5, 0.9, 7, 42, 9)
    assert request.token_ids == tuple(prompt)
    assert request.root_hash == chain_root()
    assert request.block_hashes == block_hashes(chain_root(), prompt, 16)
    assert len(request.block_hashes) == 2
    assert request.gateway == "gw"
    assert sampling.stop_token_ids == (2,)


async def test_what_is_not_asked_gets_openais_defaults(gateway: Gateway):
    """16 tokens for a completion, the configured number for a chat, temperature 1, a random seed."""
    gateway.port.script = answer([5])
    async with gateway.client() as client:
        await complete(client)
        await complete(client)
        await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    first, second, chat = (request.sampling for request in gateway.port.admitted)
    assert (first.max_tokens, chat.max_tokens) == (16, 256)
    assert (first.temperature, first.top_p, first.top_k) == (1.0, 1.0, 0)
    assert first.seed != second.seed


async def test_a_default_is_bounded_by_what_fits(gateway: Gateway):
    """Nobody who named no max_tokens is told that it is too large."""
    gateway.port.script = answer([5])
    async with gateway.client() as client:
        await complete(client, prompt=[7] * 2045)
    assert gateway.port.admitted[0].sampling.max_tokens == 3


async def test_ignore_eos_leaves_the_end_tokens_out(gateway: Gateway):
    """Nothing but max_tokens ends it then."""
    gateway.port.script = answer([5])
    async with gateway.client() as client:
        await complete(client, ignore_eos=True)
    assert gateway.port.admitted[0].sampling.stop_token_ids == ()


async def test_the_end_token_is_counted_but_not_shown(gateway: Gateway):
    """`<|im_end|>` ends the text without being in it."""
    gateway.port.script = answer([*gateway.ids("Yes"), 2], reason="stop")
    async with gateway.client() as client:
        body = await complete(client)
    assert body["choices"][0]["text"] == "Yes"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(gateway.ids("Yes")) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_ends_the_text_and_cancels_the_work(gateway: Gateway, stream: bool):
    """Cut before the stop string, reason `stop`, the request cancelled upstream, later tokens not counted."""
    said = gateway.ids("one two EN") + gateway.ids("D three")
    gateway.port.script = lambda r: [Tokens(r.request_id, 1, 0, i, (t,)) for i, t in enumerate(said)]
    async with gateway.client() as client:
        body = {"prompt": "hi", "stop": ["END", "never"], "max_tokens": 100}
        if stream:
            *chunks, done = await events(client, "/v1/completions", body)
            text, reason = "".join(c["choices"][0]["text"] for c in chunks), chunks[-1]["choices"][0]["finish_reason"]
            assert done == "[DONE]"
        else:
            whole = await complete(client, **body)
            text, reason = whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]
            assert whole["usage"]["completion_tokens"] == len(gateway.ids("one two EN")) + 1
            assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}  # told with the first token
        await gateway.port.cancel_seen.wait()
    assert (text, reason) == ("one two ", "stop")
    assert gateway.port.cancelled == [(gateway.port.admitted[0].request_id, "stop string")]


async def test_text_held_for_a_stop_string_comes_out_at_the_end(gateway: Gateway):
    """A start of a stop string that stays one is ordinary text."""
    said = gateway.ids("one EN")
    gateway.port.script = answer(said)
    async with gateway.client() as client:
        body = await complete(client, stop="END", max_tokens=len(said))
    assert body["choices"][0] == {"index": 0, "text": "one EN", "logprobs": None, "finish_reason": "length"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["texts", "ids"])
async def test_several_prompts_are_several_requests(gateway: Gateway, stream: bool, kind: str):
    """Choices carry the prompt's index; usage is the sum."""
    texts = ["one", "two three", "four"]
    prompts: list[Any] = [gateway.ids(t) for t in texts] if kind == "ids" else texts
    gateway.port.script = lambda r: answer(list(r.token_ids), reason="stop")(r)  # says the prompt
    async with gateway.client() as client:
        if stream:
            *chunks, done = await events(client, "/v1/completions", {"prompt": prompts})
            assert done == "[DONE]"
            got = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(3)]
        else:
            body = await complete(client, prompt=prompts)
            got = [choice["text"] for choice in body["choices"]]
            assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
            assert body["usage"]["completion_tokens"] == sum(len(gateway.ids(t)) for t in texts)
    assert got == texts
    assert len({request.request_id for request in gateway.port.admitted}) == 3


async def test_a_request_that_goes_on_elsewhere_is_seamless(gateway: Gateway):
    """Repeats, a raised epoch and stale tokens leave no trace in the text."""
    said = gateway.ids("alpha beta gamma")
    last = len(said) - 1

    def script(request: Any) -> list[Any]:
        rid = request.request_id
        before = [Tokens(rid, 1, 0, i, (t,)) for i, t in enumerate(said[:last])]
        after = [Tokens(rid, 2, 0, 0, tuple(said[:1])), Tokens(rid, 1, 0, last, (99,))]
        return [*before, *after, Tokens(rid, 2, 0, last, (said[last],)), Finished(rid, 2, "stop", len(said))]

    gateway.port.script = script
    async with gateway.client() as client:
        assert (await complete(client))["choices"][0]["text"] == "alpha beta gamma"


async def test_special_tokens_in_a_prompt_are_special(gateway: Gateway):
    """As in vLLM: the text of a special token is that token."""
    gateway.port.script = answer([5])
    async with gateway.client() as client:
        await complete(client, prompt="a<|im_end|>")
    assert gateway.port.admitted[0].token_ids[-1] == 2


async def test_models_lists_the_one_served(gateway: Gateway):
    """By its name, and by `default`."""
    async with gateway.client() as client:
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["smol"]
        for name in ("smol", "default"):
            assert (await client.get(f"/v1/models/{name}")).json() == listed["data"][0]
        missing = await client.get("/v1/models/other/name")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_each_finished_request_is_observed(gateway: Gateway):
    """One summary, with the client's latencies on the gateway's clock."""
    said = gateway.ids("a b c")
    async with gateway.client() as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: complete(client, max_tokens=3))
            await gateway.port.admit_seen.wait()
            rid = gateway.port.admitted[0].request_id
            for i, token_id in enumerate(said):
                gateway.clock.advance(0.5)
                gateway.port.emit(Tokens(rid, 1, 0, i, (token_id,)))
                await anyio.wait_all_tasks_blocked()
            gateway.clock.advance(1.0)
            gateway.port.emit(Finished(rid, 1, "length", 3, 1))
    (summary,) = gateway.observer.of("finished")
    assert summary.request_id == rid
    assert (summary.ttft_s, summary.tpot_s, summary.e2e_s) == (0.5, 0.5, 2.5)
    assert (summary.num_output_tokens, summary.num_cached_tokens, summary.reason) == (3, 1, "length")
    assert gateway.observer.of("admitted") == [len(gateway.ids("hi"))]
    assert len(gateway.app.state.streams) == 0


async def test_large_inputs_are_handled_off_the_event_loop(gateway: Gateway):
    """A large body is decoded and a long text tokenised elsewhere; small ones are not worth it."""
    gateway.port.script = answer([5])
    gateway.port.live = [worker("decode", 100_000)]
    async with gateway.client() as client:
        await complete(client, prompt="word " * 100)
        assert gateway.offload.names == []
        await complete(client, prompt="word " * 5_000)
        assert gateway.offload.names == ["_tokens"]
        await complete(client, prompt="word " * 50_000)
        assert gateway.offload.names == ["_tokens", "_decode", "_tokens"]
    assert len(gateway.port.admitted[2].token_ids) == 50_001


async def test_special_tokens_are_put_before_a_prompt_unless_told_otherwise(tmp_path: Path):
    """vLLM's `add_special_tokens`, with a tokenizer that has a BOS: on for completions, off for chats."""
    gateway = make_gateway(tiny(tmp_path, pre="llama-bpe", chat_template="{{ messages[0]['content'] }}"))
    plain = gateway.ids("hi")
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with gateway.client() as client:
        gateway.port.script = answer(plain)
        for told, in_completions, in_chats in ((None, [1], []), (True, [1], [1]), (False, [], [])):
            await client.post("/v1/completions", json={"prompt": "hi", "add_special_tokens": told})
            assert list(gateway.port.admitted[-1].token_ids) == in_completions + plain
            await client.post("/v1/chat/completions", json=chat | {"add_special_tokens": told})
            assert list(gateway.port.admitted[-1].token_ids) == in_chats + plain
