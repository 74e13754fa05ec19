"""What the README shows works as written, with the unmodified `openai` client and the embedded model."""

import contextlib
import io
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import openai
import pytest

from tests.flow.stack import ROOT, Stack
from tests.oracle.oracle import Oracle

pytestmark = [pytest.mark.anyio, pytest.mark.flow, pytest.mark.timeout(240)]
README = (ROOT / "README.md").read_text()
QUESTION = [{"role": "user", "content": "What is gravity?"}]


@pytest.fixture(scope="module")
def real() -> Iterator[Stack]:
    """As a user starts it: quantised weights."""
    with Stack(prefill=1, decode=1, model__dtype="auto") as stack:
        yield stack


@pytest.fixture
def client(real: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def here(text: str, stack: Stack) -> str:
    assert "http://127.0.0.1:8000" in text
    return text.replace("http://127.0.0.1:8000", stack.url)


def test_the_python_example_prints_an_answer(real: Stack) -> None:
    """Run as it stands, but for the port."""
    (example,) = [b for b in blocks("python") if "OpenAI(" in b]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names: dict[str, object] = {}
        exec(here(example, real), names)  # noqa: S102 - our own README
        names["client"].close()  # type: ignore[attr-defined]
    assert "gravity" in printed.getvalue().lower()


def test_the_example_of_tools_and_schemas_works(client: openai.OpenAI) -> None:
    """A call of the tool, then JSON of the schema."""
    (example,) = [b for b in blocks("python") if "tool_choice" in b]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example, {"client": client})  # noqa: S102 - our own README
    call, content = printed.getvalue().strip().split("\n", 1)
    assert "get_weather" in call
    assert set(json.loads(content)) == {"city"}


def test_the_curl_example_streams(real: Stack) -> None:
    """Run by a shell, as a reader would."""
    (example,) = [b for b in blocks("sh") if b.startswith("curl")]
    out = subprocess.run(
        ["sh", "-c", here(example, real)], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    events = [json.loads(line[6:]) for line in out.splitlines() if line.startswith("data: {")]
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
    assert "gravity" in text.lower()
    assert out.rstrip().endswith("data: [DONE]")


def test_chat_equals_the_oracle(oracle_default: Oracle) -> None:
    """The model's own template, greedy, with usage; the answer ends by itself."""
    prompt = oracle_default.chat(QUESTION)
    with Stack(prefill=0, decode=1) as exact, openai.OpenAI(base_url=f"{exact.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(model="default", messages=QUESTION, temperature=0, max_tokens=100)  # type: ignore[arg-type]
        tokens = exact.token_log(answer.id)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(tokens)
    assert tokens == oracle_default.greedy(prompt, len(tokens)).token_ids
    assert answer.choices[0].message.content == oracle_default.decode(list(tokens))
    assert answer.choices[0].finish_reason == ("stop" if tokens[-1] == 2 else "length")


async def test_the_default_path_says_the_same_alone_and_in_company(real: Stack) -> None:
    """Quantised weights too: a seq's tokens do not depend on its neighbours, a prefix hit or a handoff."""
    prompts = {
        f"{i}": f"Chapter {i}. " + "The old clock struck and the ship set sail. " * (1 + 3 * i) for i in range(8)
    }
    async with httpx.AsyncClient(base_url=real.url, timeout=120) as client:
        said: list[dict[str, tuple[int, ...]]] = [{}, {}]

        async def ask(name: str, into: dict[str, tuple[int, ...]]) -> None:
            body = {"model": "default", "prompt": prompts[name], "temperature": 0, "max_tokens": 24, "ignore_eos": True}
            answer = (await client.post("/v1/completions", json=body)).json()
            into[name] = real.token_log(answer["id"])

        async with anyio.create_task_group() as tasks:
            for name in prompts:
                tasks.start_soon(ask, name, said[0])
        for name in prompts:
            await ask(name, said[1])
    assert all(len(tokens) == 24 for tokens in said[0].values())
    assert said[0] == said[1]


def test_models_and_completions(client: openai.OpenAI) -> None:
    """The served model has its own name and `default`."""
    (model,) = client.models.list().data
    assert model.id == "SmolLM2-135M-Instruct"
    for name in (model.id, "default"):
        answer = client.completions.create(model=name, prompt="Two plus two is", max_tokens=4, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4


def test_errors_have_openais_shape(client: openai.OpenAI) -> None:
    """The client raises its own typed errors, and the message names the field."""
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="default", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="default", prompt=[100] * 9000, max_tokens=5)
    assert too_long.value.code == "context_length_exceeded"


def test_unicode_is_never_split(client: openai.OpenAI) -> None:
    """Every chunk is whole characters, whatever bytes the tokens are."""
    stream = client.completions.create(
        model="default", prompt="🌧️☔🌈 日本語の文章です。🎉🎊", max_tokens=48, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert text
    assert "\ufffd" not in text


@pytest.mark.parametrize("service", ["gateway", "scheduler", "prefix-index", "prefill-0", "decode-0"])
def test_every_service_has_health_ready_and_metrics(real: Stack, service: str) -> None:
    """On its own port."""
    base = real._specs[service].ready.removesuffix("/ready")
    for path in ("/health", "/ready"):
        assert httpx.get(base + path).status_code == 200
    assert "# TYPE baton_" in httpx.get(base + "/metrics").text


def test_the_papers_exist() -> None:
    """What the README links to is there."""
    for target in re.findall(r"\]\(([\w./]+)\)", README):
        assert Path(ROOT / target).exists(), target
