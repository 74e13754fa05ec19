"""The API against its own description: requests made from `/openapi.json`, right and wrong ones, over real connections.

A few of each by default; 400 with `--full`, or so many as BATON_API_EXAMPLES says.
"""

import os
import threading
from collections.abc import Iterator

import anyio
import anyio.lowlevel
import pytest
import schemathesis
import uvicorn
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi import checks

from services.gateway.app import build_app
from services.gateway.grammar_check import ProcessGrammarChecker
from shared.clock import SystemClock
from shared.config import GatewayConfig
from shared.http_protocol import HttpProtocol
from shared.ids import Incarnation
from shared.model_path import resolve
from shared.randomness import SeededRandomness
from shared.tokenizer.tokenizer import Tokenizer
from tests.unit.gateway.fakes import CountingOffload, FakePort, answer

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
TIMEOUT_S = 30.0
MANY = int(os.environ.get("BATON_API_EXAMPLES", "400"))


@pytest.fixture(scope="module")
def api(tokenizer: Tokenizer) -> Iterator[schemathesis.BaseSchema]:
    """The description of a gateway whose model says three words to everything."""
    load_all_checks()
    server: list[uvicorn.Server] = []
    started = threading.Event()

    async def serve() -> None:
        app = build_app(
            port=FakePort(script=answer([28, 905, 19556])),
            tokenizer=tokenizer,
            model_name="smol",
            incarnation=Incarnation("gw"),
            config=GatewayConfig(),
            clock=SystemClock(),
            randomness=SeededRandomness(7),
            offload=CountingOffload(),
            grammars=ProcessGrammarChecker(resolve(""), timeout_s=5, max_bytes=1 << 16),
        )
        server.append(uvicorn.Server(uvicorn.Config(app, http=HttpProtocol, port=0, log_level="critical")))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server[0]._serve)
            while not server[0].started:
                await anyio.lowlevel.checkpoint()
            started.set()

    with start_blocking_portal() as portal:
        running = portal.start_task_soon(serve)
        assert started.wait(30), running
        port = server[0].servers[0].sockets[0].getsockname()[1]
        yield schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json")
        server[0].should_exit = True
        running.result(30)


OPERATIONS = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
]


@pytest.mark.parametrize("num_examples", [6, pytest.param(MANY, marks=[pytest.mark.full, pytest.mark.timeout(7200)])])
@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_are_as_described(
    api: schemathesis.BaseSchema, method: str, path: str, mode: schemathesis.GenerationMode, num_examples: int
):
    """No 5xx, no hang; statuses, types and bodies as the document says; what it forbids is refused."""
    operation = api[path][method]
    if mode == schemathesis.GenerationMode.NEGATIVE and not operation.body:
        pytest.skip("there is nothing to get wrong")

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS, timeout=TIMEOUT_S)

    check()


def test_every_operation_is_tried(api: schemathesis.BaseSchema):
    """A new route needs its line here."""
    found = {(op.ok().method.upper(), op.ok().path) for op in api.get_all_operations()}
    assert found == set(OPERATIONS)
