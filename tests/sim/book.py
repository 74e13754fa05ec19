"""The life of a request as a model: what each script must answer and leave behind, in plain Python.

Written from the contracts in `shared/leases.py`, not from the Lua. It sees every script in the order of their effects
and compares the answer, the request's record, its token log and what was said to whom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shared.keys import Keys
from shared.leases import KEEP_S
from shared.messages import (
    Cancel,
    ControlMsg,
    EpochRaised,
    Finished,
    GatewayMsg,
    WorkerMsg,
    decode_request,
)
from tests.sim.redis_store import Store
from tests.sim.redis_streams import Stream

LIVE = ("dispatched", "prefill", "decode")
_gateway = msgspec.msgpack.Decoder(GatewayMsg).decode
_work: Callable[[bytes], Any] = msgspec.msgpack.Decoder(WorkerMsg).decode
_control: Callable[[bytes], Any] = msgspec.msgpack.Decoder(ControlMsg).decode


@dataclass
class Record:
    """One request."""

    gateway: str
    epoch: int
    num_prompt: int
    state: str = "queued"
    attempt: str = ""
    holder: str = ""
    prefill: str = ""
    decode: str = ""
    tries: int = 0
    deadline_ms: int = 0  # of its lease
    nonce: str = ""  # of the last adoption
    logs: list[list[int]] = field(default_factory=lambda: [[]])  # by choice
    finished: int = 0
    ended_ms: int = 0

    @property
    def marker(self) -> tuple[int, tuple[int, ...]]:
        """Lengths of the logs, as an `EpochRaised` tells them."""
        first, *others = map(len, self.logs)
        return first, tuple(others)


class Book:
    """Checks scripts against the model. `complain(text)` is called for each difference."""

    def __init__(self, store: Store, keys: Keys, complain: Callable[[str], None]) -> None:
        self._store, self._keys, self._complain = store, keys, complain
        self._records: dict[str, Record] = {}
        self._term = 0
        self._cell = keys.cell.encode()
        self.cancelled_in: Counter[str] = Counter()  # states of requests when they were cancelled
        self._queued, self._leases = keys.queued().encode(), keys.leases().encode()
        self._checks = {name.removeprefix("_after_"): getattr(self, name) for name in dir(self) if "_after_" in name}

    def forget_all(self) -> None:
        """Redis is empty."""
        self._records.clear()
        self._term = 0

    def script_ran(self, name: str, keys: list[Any], args: list[Any], answer: Any) -> None:
        check = self._checks.get(name)
        if check is not None:
            check(keys, args, answer)

    # --- what each script must do ---

    def _after_admit(self, keys: list[str], args: list[Any], answer: bytes) -> None:
        request_id = str(args[0])
        known = request_id in self._records and not self._is_forgotten(self._records[request_id])
        if answer == b"admitted":
            self._expect(not known, f"{request_id} admitted twice")
            before = self._records.get(request_id)
            if before is not None:  # workers may remember its epochs
                self._expect(before.epoch < int(args[5]), f"{request_id} admitted at {args[5]} after {before.epoch}")
            num_prompt = len(decode_request(args[1]).token_ids)
            logs = [_unpack(packed) for packed in args[6:]]
            self._records[request_id] = Record(str(args[2]), int(args[5]), num_prompt, logs=logs)
            self._compare(request_id)
        elif answer == b"duplicate":
            self._expect(known, f"{request_id} is no duplicate")

    def _after_lead(self, keys: list[str], args: list[Any], answer: int) -> None:
        self._expect(answer > self._term, f"term {answer} after {self._term}")
        self._term = answer

    def _after_dispatch(self, keys: list[str], args: list[Any], answer: bytes) -> None:
        request_id, epoch, attempt = str(args[0]), int(args[1]), str(args[2])
        record = self._records.get(request_id)
        if answer != b"dispatched":
            return
        self._expect(int(args[3]) == self._term, f"{request_id} dispatched by a deposed scheduler")
        if record is None:
            self._complain(f"{request_id} dispatched, but nobody knows it")
            return
        if record.attempt == attempt and record.epoch == epoch:
            return  # the same again
        self._expect(record.state == "queued" and record.epoch == epoch, f"{request_id} dispatched while {record}")
        record.state, record.attempt = "dispatched", attempt
        record.decode, record.prefill = str(args[4]), str(args[7])
        record.holder = ""
        num_tokens = _work(args[6]).num_prompt_tokens
        self._expect(
            num_tokens == record.num_prompt + len(record.logs[0]), f"{request_id} goes on from {num_tokens} tokens"
        )
        self._compare(request_id)

    def _after_accept(self, keys: list[str], args: list[Any], answer: int) -> None:
        request_id, epoch, attempt, holder, phase = str(args[0]), int(args[1]), str(args[2]), str(args[3]), str(args[4])
        record = self._records.get(request_id)
        want = 0
        if record is not None and self._is_fence(record, epoch, attempt):
            want = 2 if record.state == "decode" and phase == "prefill" else 1
            if want == 1:
                record.state, record.holder = phase, holder
                record.deadline_ms = self._store.now_ms() + int(args[5])
        self._expect(answer == want, f"accept of {request_id}/{epoch} by {holder}: {answer}, expected {want}")
        if want == 1 and args[6] and record is not None:
            self._expect_told(record.prefill, request_id, epoch)
        self._compare(request_id)

    def _after_renew(self, keys: list[str], args: list[Any], answers: list[int]) -> None:
        holder = str(args[0])
        for i, answer in enumerate(answers):
            request_id, epoch, attempt = str(args[2 + 3 * i]), int(args[3 + 3 * i]), str(args[4 + 3 * i])
            record = self._records.get(request_id)
            want = 0
            if record is not None and self._is_fence(record, epoch, attempt) and record.state != "dispatched":
                want = 1 if record.holder == holder else 2
                if want == 1:
                    record.deadline_ms = self._store.now_ms() + int(args[1])
            self._expect(answer == want, f"renew of {request_id}/{epoch} by {holder}: {answer}, expected {want}")

    def _after_emit(self, keys: list[str], args: list[Any], answers: list[int]) -> None:
        for i, answer in enumerate(answers):
            epoch, attempt, index = int(args[5 * i]), str(args[5 * i + 1]), int(args[5 * i + 2])
            request_id, choice = keys[2 + 2 * i].rsplit(":", 2)[1:]
            record = self._records.get(request_id)
            want = 0
            if record is not None and self._is_fence(record, epoch, attempt):
                log = record.logs[int(choice)]
                want = -1 if index > len(log) else 1
                if want == 1:
                    log += _unpack(args[5 * i + 3])[len(log) - index :]
            self._expect(answer == want, f"emit of {request_id}/{epoch}: {answer}, expected {want}")
        for request_id in dict.fromkeys(key.rsplit(":", 1)[1] for key in keys[1::2]):  # once all items are in
            self._compare(request_id)

    def _after_complete(self, keys: list[str], args: list[Any], answer: int) -> None:
        request_id, epoch, attempt = str(args[0]), int(args[1]), str(args[2])
        record = self._records.get(request_id)
        want = int(record is not None and self._is_fence(record, epoch, attempt))
        self._expect(answer == want, f"complete of {request_id}/{epoch}: {answer}, expected {want}")
        if record is not None and want:
            self._end(request_id, record, "done")
            self._expect(
                self._field(keys[6], request_id, epoch) is None, f"complete of {request_id}/{epoch} keeps its credit"
            )

    def _after_cancel(self, keys: list[str], args: list[Any], answer: bytes) -> None:
        request_id = str(args[0])
        record = self._records.get(request_id)
        is_live = record is not None and record.state in ("queued", *LIVE)
        if answer == b"gone":
            self._expect(not is_live, f"cancel of {request_id}: gone, but it is {record}")
        elif answer == b"cancelled":
            if record is None or not is_live:
                self._complain(f"cancelled {request_id}, which is {record}")
                return
            self.cancelled_in[record.state] += 1
            holders = [h for h in (record.prefill, record.decode) if h not in ("", "-")]
            told = holders if record.state != "queued" else []
            self._end(request_id, record, "cancelled")
            for holder in told:
                self._expect_told(holder, request_id, record.epoch)

    def _after_requeue(self, keys: list[str], args: list[Any], answer: bytes) -> None:
        request_id, epoch = str(args[0]), int(args[1])
        record = self._records.get(request_id)
        if answer == b"stale":
            return
        if record is None:
            self._complain(f"requeue of {request_id}, which nobody knows")
            return
        self._expect(record.state in LIVE and record.epoch == epoch, f"requeue of {request_id}/{epoch}: {record}")
        early_ms = record.deadline_ms - self._store.now_ms()
        self._expect(bool(args[4]) or early_ms <= 0, f"requeue of {request_id}/{epoch}, {early_ms} ms before its time")
        told = [h for h in (record.prefill, record.decode) if h not in ("", "-")]
        if answer == b"failed":
            self._end(request_id, record, "done")
        else:
            record.state, record.epoch, record.tries = "queued", epoch + 1, record.tries + 1
            record.attempt = record.holder = record.prefill = record.decode = ""
            last = self._last(self._keys.tokens(record.gateway).key, _gateway)  # type: ignore[arg-type]
            marker = EpochRaised(request_id, epoch + 1, *record.marker)  # type: ignore[arg-type]
            self._expect(last == marker, f"requeue of {request_id}/{epoch}: {last} instead of {marker}")
            self._compare(request_id)
        for holder in told:
            self._expect_told(holder, request_id, epoch)

    def _after_submit_adopt(self, keys: list[str], args: list[Any], answer: bytes) -> None:
        owner, request_id, epoch, nonce = str(args[0]), str(args[1]), int(args[2]), str(args[9])
        record = self._records.get(request_id)
        if answer != b"adopted":
            return
        if record is None:
            self._complain(f"adopted {request_id}, which nobody knows")
            return
        if record.nonce == nonce:
            return  # the same again
        record.nonce, record.gateway = nonce, owner
        if record.state == "done":
            last = self._last(keys[4], _gateway)
            self._expect(isinstance(last, Finished), f"{owner} adopts the end of {request_id}: {last} was said")
            return
        self._expect(record.epoch == epoch, f"adoption of {request_id}/{epoch}: {record}")
        told = [h for h in (record.prefill, record.decode) if h not in ("", "-")] if record.state in LIVE else []
        record.state, record.epoch, record.finished = "queued", epoch + 1, 0
        record.attempt = record.holder = record.prefill = record.decode = ""
        logs = [f"{keys[6][:-1]}{choice}" for choice in range(len(record.logs))]
        for key in (keys[1], *logs):
            self._expect(key.encode() not in self._store.deadlines, f"{request_id} is adopted and {key} expires")
        marker = EpochRaised(request_id, epoch + 1, *record.marker)  # type: ignore[arg-type]
        last = self._last(keys[4], _gateway)
        self._expect(last == marker, f"adoption of {request_id}/{epoch}: {last} instead of {marker}")
        self._compare(request_id)
        for holder in told:
            self._expect_told(holder, request_id, epoch)

    def _after_cancel_choice(self, keys: list[str], args: list[Any], answer: int) -> None:
        """A hint: who has the request at that epoch is told, and nothing else changes."""
        request_id, epoch, decode = keys[0].rsplit(":", 1)[1], int(args[0]), args[1].decode()
        record = self._records.get(request_id)
        told = record is not None and record.state in LIVE and (record.epoch, record.decode) == (epoch, decode)
        self._expect(answer == told, f"hint for {request_id}/{epoch} at {decode}: {answer}, but it is {record}")
        if answer:
            last = self._last(self._keys.control(decode).key, _control)  # type: ignore[arg-type]
            want = _control(args[2])
            self._expect(last == want, f"{decode} was told {last} instead of {want}")
        self._compare(request_id)

    def _after_clamp(self, keys: list[str], args: list[Any], answer: int) -> None:
        """Redis' clock was set back: leases end no later than a renewal now would let them."""
        if keys[0] == self._keys.leases():
            latest = self._store.now_ms() + int(args[0])
            for record in self._records.values():
                record.deadline_ms = min(record.deadline_ms, latest)

    def _after_fail(self, keys: list[str], args: list[Any], answer: int) -> None:
        record = self._records.get(str(args[0]))
        if answer:
            if record is None or record.state != "queued":
                self._complain(f"fail of {args[0]}, which is {record}")
                return
            self._end(str(args[0]), record, "done")

    # --- helpers ---

    def _is_forgotten(self, record: Record) -> bool:
        """Whether Redis has dropped it, some time after its end."""
        return record.finished > 0 and self._store.now_ms() - record.ended_ms >= KEEP_S * 1000

    @staticmethod
    def _is_fence(record: Record, epoch: int, attempt: str) -> bool:
        return record.state in LIVE and (record.epoch, record.attempt) == (epoch, attempt)

    def _end(self, request_id: str, record: Record, state: str) -> None:
        record.state, record.ended_ms = state, self._store.now_ms()
        record.finished += 1
        self._expect(record.finished == 1, f"{request_id} ended {record.finished} times")
        last = self._last(self._keys.tokens(record.gateway).key, _gateway)  # type: ignore[arg-type]
        self._expect(
            isinstance(last, Finished) and last.request_id == request_id, f"end of {request_id}: {last} was said"
        )
        fields = self._store.get(self._keys.request(request_id).encode()) or {}  # type: ignore[arg-type]
        self._expect(fields.get(b"st") == state.encode(), f"{request_id} is {fields.get(b'st')}, expected {state}")
        for name in (self._keys.queued(), self._keys.leases()):
            members = self._store.get(name.encode()) or {}
            self._expect(request_id.encode() not in members, f"{request_id} ended and is in {name}")
        self._expect(self._keys.request(request_id).encode() in self._store.deadlines, f"{request_id} never expires")  # type: ignore[arg-type]

    def _compare(self, request_id: str) -> None:
        """The record in Redis is the model's."""
        record = self._records.get(request_id)
        if record is None:
            return
        get, state, member = self._store.get, record.state, request_id.encode()
        fields = get(b"{%s}:req:%s" % (self._cell, member)) or {}
        want = (state, record.epoch, record.attempt, record.holder)
        have = (_of(fields, b"st"), int(fields.get(b"ep", 0)), _of(fields, b"at"), _of(fields, b"ho"))
        if have != want:
            self._complain(f"{request_id} is {have}, expected {want}")
        for choice, log in enumerate(record.logs):
            kept = get(b"{%s}:log:%s:%d" % (self._cell, member, choice)) or b""
            if len(kept) != 4 * len(log):
                self._complain(f"log of {request_id}/{choice}: {len(kept) // 4}, expected {log}")
        queued, leased = member in (get(self._queued) or ()), member in (get(self._leases) or ())
        if queued != (state == "queued") or leased != (state in LIVE[1:]):
            self._complain(f"{request_id} is {state}, in the queue: {queued}, leased: {leased}")

    def _expect_told(self, holder: str, request_id: str, epoch: int) -> None:
        last = self._last(self._keys.control(holder).key, _control)  # type: ignore[arg-type]
        told = isinstance(last, Cancel) and (last.request_id, last.epoch) == (request_id, epoch)
        self._expect(told, f"{holder} was not told that {request_id}/{epoch} is over")

    def _last(self, key: str, decode: Callable[[bytes], Any]) -> Any:
        stream = self._store.get(key.encode(), Stream)
        if stream is None or not stream.ids:
            return None
        return decode(stream.entries[stream.ids[-1]][-1])

    def _field(self, key: str, request_id: str, epoch: int) -> bytes | None:
        return (self._store.get(key.encode()) or {}).get(f"{request_id}/{epoch}".encode())

    def _expect(self, holds: bool, text: str) -> None:
        if not holds:
            self._complain(text)


def _of(fields: dict[bytes, bytes], name: bytes) -> str:
    return fields.get(name, b"").decode()


def _unpack(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]
