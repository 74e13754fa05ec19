"""Clients' grammars, compiled once before they are let in: in a process of its own, which can be stopped."""

import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

import anyio
import msgspec
import structlog
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from services.gateway.errors import ApiError, bad_field
from services.gateway.structured import GrammarAsk

log = structlog.get_logger("gateway.grammars")
MAX_WAITING = 32
MAX_KNOWN = 512
_START_S = 60.0
_MAX_LINE_BYTES = 16 << 20


class GrammarChecker(Protocol):
    async def check(self, ask: GrammarAsk) -> str:
        """The grammar's text as workers want it.

        :raises ApiError: 400 with the reason why it cannot be; 503, too many wait.
        """
        ...

    async def aclose(self) -> None: ...


class ProcessGrammarChecker:
    """Owns the process, which is started by the first grammar. Answers are remembered."""

    def __init__(self, model: Path, *, timeout_s: float, max_bytes: int) -> None:
        self._model, self._timeout_s, self._max_bytes = model, timeout_s, max_bytes
        self._process: Process | None = None
        self._lines: BufferedByteReceiveStream | None = None
        self._lock = anyio.Lock()
        self._known: OrderedDict[tuple[str, str], str] = OrderedDict()
        self.num_started = 0

    async def check(self, ask: GrammarAsk) -> str:
        if len(ask.text.encode()) > self._max_bytes:
            raise bad_field(ask.field, f"{ask.field} is larger than {self._max_bytes} bytes.", "grammar_too_large")
        key = (ask.kind, ask.text)
        if key not in self._known:
            if self._lock.statistics().tasks_waiting >= MAX_WAITING:
                raise ApiError(503, "Too many grammars wait to be compiled.", code="grammars_busy", retry_after_s=1)
            async with self._lock:
                # A client that goes away must not leave its answer in the pipe for the next one.
                with anyio.CancelScope(shield=True):
                    self._known[key] = await self._ask(ask)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return self._known[key]

    async def aclose(self) -> None:
        """Stop the process. A later check would start another."""
        process, self._process = self._process, None
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.aclose()

    async def _ask(self, ask: GrammarAsk) -> str:
        try:
            await self._start()
            with anyio.fail_after(self._timeout_s):
                answer = await self._exchange({"kind": ask.kind, "text": ask.text})
        except TimeoutError:
            await self.aclose()
            message = f"{ask.field} takes longer than {self._timeout_s:g} s to compile."
            raise bad_field(ask.field, message, "grammar_too_complex") from None
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self.aclose()
            log.warning("grammar.crashed", field=ask.field, num_bytes=len(ask.text))
            raise bad_field(ask.field, f"{ask.field} is too complex to compile.", "grammar_too_complex") from None
        except BaseException:
            await self.aclose()
            raise
        if (error := answer.get("error")) is not None:
            raise bad_field(ask.field, f"{ask.field} cannot be compiled: {error}", "invalid_grammar")
        return answer["grammar"]

    async def _start(self) -> None:
        """:raises ApiError: 400, this model cannot have grammars."""
        if self._process is not None:
            return
        self.num_started += 1
        command = [sys.executable, "-m", "services.gateway.grammar_child", str(self._model)]
        self._process = await anyio.open_process(command, stderr=None, start_new_session=True)
        assert self._process.stdout is not None
        self._lines = BufferedByteReceiveStream(self._process.stdout)
        with anyio.fail_after(_START_S):
            first = await self._line()
        if (error := first.get("error")) is not None:
            await self.aclose()
            raise ApiError(400, f"This model cannot follow grammars: {error}", code="unsupported")

    async def _exchange(self, value: dict[str, str]) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        await self._process.stdin.send(msgspec.json.encode(value) + b"\n")
        return await self._line()

    async def _line(self) -> dict[str, Any]:
        assert self._lines is not None
        return msgspec.json.decode(await self._lines.receive_until(b"\n", _MAX_LINE_BYTES))
