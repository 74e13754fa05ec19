"""What each script of `shared/lua` does, in plain Python, written from its contract: the oracle of `test_lua.py`.

A state maps a role (the part that a key plays in a script) to its value: dicts for hashes and sorted sets, sets, bytes
for strings, and lists of entries for streams. A model changes the state and gives the answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

LIVE = ("dispatched", "prefill", "decode")
NOW_S, NOW_US = 1_700_000_000, 250_000
NOW_MS = NOW_S * 1000 + NOW_US // 1000
Hash = dict[str, str]


@dataclass
class State:
    """All keys of one run. A role that is missing is a key that does not exist."""

    keys: dict[str, Any]
    expiring: set[str] = field(default_factory=set)

    def hash(self, role: str) -> Hash:
        return self.keys.setdefault(role, {})

    def get(self, role: str, name: str) -> str | None:
        return self.keys.get(role, {}).get(name)

    def say(self, role: str, *parts: Any, entry: str = "*", name: str = "m") -> None:
        """One message on a stream; with several parts, these are names and values."""
        fields = [name, parts[0]] if len(parts) == 1 else list(parts)
        self.keys.setdefault(role, []).append((entry, [raw(part) for part in fields]))

    def drop(self, role: str, member: str) -> bool:
        """Out of a hash, sorted set or set, which goes with its last member."""
        value = self.keys.get(role)
        if value is None or member not in value:
            return False
        value.discard(member) if isinstance(value, set) else value.pop(member)
        if not value:
            self.delete(role)
        return True

    def delete(self, role: str) -> None:
        self.keys.pop(role, None)
        self.expiring.discard(role)

    def expire(self, *roles: str) -> None:
        self.expiring.update(role for role in roles if role in self.keys)

    def is_live(self) -> bool:
        return self.get("req", "st") in LIVE

    def is_fence(self, epoch: Any, attempt: Any) -> bool:
        """Whether epoch and attempt are the request's, and it is in work."""
        return self.is_live() and (self.get("req", "ep"), self.get("req", "at")) == (str(epoch), str(attempt))

    def end(self, request: str, state: str, lists: Sequence[str] = ("queued", "leases", "open")) -> None:
        """The record of what has ended: no body, no place in any list that it may be in, and it expires."""
        self.hash("req")["st"] = state
        self.hash("req").pop("body", None)
        for role in lists:
            self.drop(role, request)
        self.expire("req", "log")


def raw(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def admit(s: State, request: str, body: bytes, gateway: str, limit: int, message: bytes, epoch: int, log: bytes) -> Any:
    if "req" in s.keys:
        return b"duplicate"
    if not s.keys.get("gateways", {}).get(gateway):
        return b"unknown"
    if len(s.keys.get("queued", {})) >= limit:
        return b"full"
    s.keys["req"] = {"st": "queued", "ep": str(epoch), "gw": gateway, "tries": "0", "body": body.decode()}
    s.keys.setdefault("open", set()).add(request)
    if log:
        s.delete("log")
        s.keys["log"] = log
    if epoch > 1:
        mark(s, request, epoch)
    s.hash("queued")[request] = NOW_S * 1_000_000 + NOW_US
    s.say("sched", message)
    return b"admitted"


def lead(s: State, incarnation: str) -> Any:
    term = int(s.get("leader", "term") or 0) + 1
    s.hash("leader").update(incarnation=incarnation, term=str(term))
    return term


def dispatch(
    s: State,
    request: str,
    epoch: int,
    attempt: str,
    term: str,
    decode: str,
    credit: int,
    task: bytes,
    p: str,
    p_task: bytes,
) -> Any:
    if s.get("leader", "term") != term:
        return b"deposed"
    record = s.keys.get("req", {})
    if (record.get("ep"), record.get("at")) == (str(epoch), attempt):
        return b"dispatched"
    if record.get("st") != "queued" or record.get("ep") != str(epoch):
        return b"stale"
    if s.get("worker_d", "state") != "up" or (p != "-" and s.get("worker_p", "state") != "up"):
        return b"worker_gone"
    taken = int(s.hash("worker_d")["taken"]) + credit
    if taken > int(s.hash("worker_d")["blocks"]):
        return b"no_credit"
    s.hash("worker_d")["taken"] = str(taken)
    s.hash("held_d")[f"{request}/{epoch}"] = str(credit)
    record.update(st="dispatched", at=attempt, term=term, dw=decode, pw=p, ho="")
    s.drop("queued", request)
    if p != "-":
        s.hash("held_p")[f"{request}/{epoch}"] = "0"
        s.say("work_p", p_task)
    s.say("work_d", task)
    return b"dispatched"


def accept(s: State, request: str, epoch: int, attempt: str, ho: str, phase: str, ms: int, vain: bytes, _: int) -> Any:
    if not s.is_fence(epoch, attempt):
        return 0
    if s.get("req", "st") == "decode" and phase == "prefill":
        return 2
    s.hash("req").update(st=phase, ho=ho)
    s.hash("leases")[request] = NOW_MS + ms
    if phase == "decode":
        s.drop("held_p", f"{request}/{epoch}")
    if vain:
        s.say("control_p", vain)
        s.expire("control_p")
    return 1


def renew(s: State, holder: str, lease_ms: int, request: str, epoch: int, attempt: str) -> Any:
    if not s.is_fence(epoch, attempt) or s.get("req", "st") == "dispatched":
        return [0]
    if s.get("req", "ho") != holder:
        return [2]
    s.hash("leases")[request] = NOW_MS + lease_ms
    return [1]


def emit(s: State, epoch: int, attempt: str, index: int, packed: bytes, item: bytes) -> Any:
    if not s.is_fence(epoch, attempt):
        return [0]
    have = len(s.keys.get("log", b"")) // 4
    if index > have:
        return [-1]
    if fresh := packed[4 * (have - index) :]:
        s.keys["log"] = s.keys.get("log", b"") + fresh
        s.say("tokens", item)
    return [1]


def complete(s: State, request: str, epoch: int, attempt: str, finished: bytes, ended: bytes, keep_ms: int) -> Any:
    if not s.is_fence(epoch, attempt):
        return 0
    s.say("tokens", finished)
    s.say("sched", ended)
    credit = s.get("held_d", f"{request}/{epoch}")
    if credit is not None:
        s.hash("worker_d")["taken"] = str(int(s.get("worker_d", "taken") or 0) - int(credit))
    s.drop("held_d", f"{request}/{epoch}")
    s.drop("held_p", f"{request}/{epoch}")
    s.hash("req")["fin"] = finished.decode()
    s.end(request, "done")
    return 1


def tell_holders(s: State, request: str, epoch: int, prefill: str, cancel: bytes) -> None:
    """Every holder's control stream, and prefill's list."""
    s.drop("held_p", f"{request}/{epoch}")
    if prefill != "-":
        s.say("control_p", cancel)
    s.say("control_d", cancel)
    s.expire("control_p", "control_d")


def cancel(
    s: State,
    request: str,
    epoch: int,
    p: str,
    d: str,
    told: bytes,
    finished: bytes,
    ended: bytes,
    keep: int,
    control: int,
) -> Any:
    record = s.keys.get("req", {})
    if record.get("st") in (None, "done", "cancelled"):
        return b"gone"
    if (record["ep"], record.get("pw", ""), record.get("dw", "")) != (str(epoch), p, d):
        return b"moved"
    s.say("tokens", finished)
    s.say("sched", ended)
    if record["st"] != "queued":
        tell_holders(s, request, epoch, p, told)
    s.end(request, "cancelled")
    return b"cancelled"


def cancel_choice(s: State, epoch: int, d: str, told: bytes, control: int) -> Any:
    if not s.is_live() or (s.get("req", "ep"), s.get("req", "dw")) != (str(epoch), d):
        return 0
    s.say("control_d", told)
    s.expire("control_d")
    return 1


def _is_lost(s: State, request: str, p: str, d: str, lost: str, until_ms: int) -> bool:
    """Whether the request has lost its holder."""
    if lost == "":
        deadline = s.keys.get("leases", {}).get(request)
        return deadline is not None and deadline <= NOW_MS <= until_ms
    return lost == d or (lost == p and s.get("req", "st") != "decode")


def requeue(
    s: State, request: str, epoch: int, p: str, d: str, lost: str, limit: int, again: bytes, told: bytes,
    finished: bytes, ended: bytes, keep_ms: int, control_ms: int, until_ms: int,
) -> Any:  # fmt: skip
    record = s.keys.get("req", {})
    if not s.is_live() or (record["ep"], record["pw"], record["dw"]) != (str(epoch), p, d):
        return b"stale"
    if not _is_lost(s, request, p, d, lost, until_ms):
        return b"stale"
    tell_holders(s, request, epoch, p, told)
    s.drop("leases", request)
    if int(record["tries"]) + 1 >= limit:
        s.say("tokens", finished)
        s.say("sched", ended)
        record["fin"] = finished.decode()
        s.end(request, "done", ("leases", "open"))
        return b"failed"
    record.update(st="queued", ep=str(epoch + 1), at="", ho="", pw="", dw="", tries=str(int(record["tries"]) + 1))
    mark(s, request, epoch + 1)
    s.hash("queued")[request] = NOW_S * 1_000_000 + NOW_US
    s.say("sched", again)
    return b"requeued"


def mark(s: State, request: str, epoch: int) -> None:
    """Tell the gateway which epoch holds from now on, and how many tokens were sent."""
    s.say("tokens", msgspec.msgpack.encode(["e", request, epoch, len(s.keys.get("log", b"")) // 4]))


def fail(s: State, request: str, epoch: int, finished: bytes, ended: bytes, keep_ms: int) -> Any:
    if (s.get("req", "st"), s.get("req", "ep")) != ("queued", str(epoch)):
        return 0
    s.say("tokens", finished)
    s.say("sched", ended)
    s.hash("req")["fin"] = finished.decode()
    s.end(request, "done")
    return 1


def refund(s: State, held: str, keep: str, message: bytes) -> Any:
    credit = s.get("held_d", held)
    if credit is None:
        return 0
    back = int(credit) - int(keep or 0)
    if keep and back <= 0:
        return 0
    if keep:
        s.hash("held_d")[held] = keep
    else:
        s.drop("held_d", held)
    s.hash("worker_d")["taken"] = str(int(s.get("worker_d", "taken") or 0) - back)
    s.say("sched", message)
    return back


# --- who lives -------------------------------------------------------------------------------------


Model = Callable[..., Any]
WORK: dict[str, tuple[Model, Sequence[str]]] = {
    "admit": (admit, ("req", "queued", "sched", "gateways", "open", "log", "tokens")),
    "lead": (lead, ("leader",)),
    "dispatch": (
        dispatch,
        ("req", "queued", "leader", "worker_d", "held_d", "work_d", "worker_p", "held_p", "work_p"),
    ),
    "accept": (accept, ("req", "leases", "held_p", "control_p")),
    "renew": (renew, ("leases", "req")),
    "emit": (emit, ("tokens", "req", "log")),
    "complete": (
        complete,
        ("req", "leases", "tokens", "sched", "log", "worker_d", "held_d", "held_p", "open"),
    ),
    "cancel": (
        cancel,
        ("req", "queued", "leases", "tokens", "sched", "log", "control_p", "control_d", "open", "held_p"),
    ),
    "cancel_choice": (cancel_choice, ("req", "control_d")),
    "requeue": (
        requeue,
        ("req", "queued", "leases", "tokens", "sched", "log", "control_p", "control_d", "held_p", "open"),
    ),
    "fail": (fail, ("req", "queued", "tokens", "sched", "log", "open")),
    "refund": (refund, ("worker_d", "held_d", "sched")),
}
"""Each script's model, and the roles of its keys."""
