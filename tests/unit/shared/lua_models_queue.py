"""As `lua_models.py`: the scripts of submissions through Redis. See `shared/submissions.py` for what they promise."""

from collections.abc import Sequence
from typing import Any

from tests.unit.shared.lua_models import NOW_MS, NOW_S, NOW_US, Model, State, mark, tell_holders


def _ack(s: State, entry: str) -> bool:
    """Whether the group had the entry. It is off the stream after this in any case."""
    submit = s.keys["submit"]
    submit["entries"].pop(entry, None)
    return submit["pending"].pop(entry, None) is not None


def submit_open(s: State, owner: str, group: str, entry: str, name: str, result: str, ttl_ms: int, nonce: str) -> Any:
    known = dict(s.keys.get("sub", {}))
    if known and (known["entry"] != entry or known["state"] == "done"):
        had = _ack(s, entry)
        if known["entry"] == entry:
            return [b"done"]
        if had and known["reply"] != "{t}:reply":
            s.say("reply", "id", name, "duplicate", result)
            s.expire("reply")
        return [b"repeat"]
    if not known and entry not in s.keys.get("submit", {}).get("entries", {}):
        return [b"gone"]
    if not known:
        counts = dict.fromkeys(("total", "seq", "tries"), "0")
        s.keys["sub"] = {"entry": entry, "state": "open", "reply": "{t}:reply", **counts}
    sub = s.hash("sub")
    sub["owner"] = owner
    if sub.get("nonce") != nonce:
        sub.update(nonce=nonce, tries=str(int(sub["tries"]) + 1))
    s.expire("sub")
    return [b"open", NOW_MS, {name.encode(): value.encode() for name, value in sub.items()}]


def result_add(
    s: State,
    owner: str,
    ttl_ms: int,
    name: str,
    entry: str,
    choice: int,
    offset: int,
    count: int,
    chars: int,
    tokens: str,
    text: str,
) -> Any:
    sub = s.keys.get("sub", {})
    if (sub.get("owner"), sub.get("state"), sub.get("entry")) != (owner, "open", entry):
        return 0
    have, have_chars = int(sub.get(f"n:{choice}", 0)), int(sub.get(f"c:{choice}", 0))
    if offset + count > have or chars > have_chars:
        if offset != have:
            return -1
        total, seq = int(sub["total"]) + count, 0 if count else int(sub["seq"]) + 1
        parts = ("choice", choice, "offset", offset, "tokens", tokens, "text", text)
        s.say("result", *parts, entry=f"{total}-{seq}")
        s.say("reply", "id", name, *parts)
        sub.update({f"n:{choice}": str(offset + count), f"c:{choice}": str(chars)})
        sub.update(total=str(total), seq=str(seq), tries="0")
    s.expire("sub", "result", "reply")
    return 1


def submit_end(
    s: State, owner: str, group: str, entry: str, ttl_ms: int, name: str, status: int, kind: str, answer: bytes,
    reason: str, max_dead: int, *letter: str,
) -> Any:  # fmt: skip
    sub = s.keys.get("sub", {})
    if (sub.get("owner"), sub.get("entry")) != (owner, entry):
        return 0
    if sub["state"] == "done":
        return 1
    parts = ("status", status, kind, answer)
    s.say("result", *parts, entry=f"{sub['total']}-{int(sub['seq']) + 1}")
    s.say("reply", "id", name, *parts)
    if reason:
        s.say("dead", "reason", reason, "entry", entry, *letter)
    sub["state"] = "done"
    s.expire("sub", "result", "reply")
    _ack(s, entry)
    return 1


def submit_renew(s: State, owner: str, group: str, idle_ms: int, ttl_ms: int, entry: str) -> Any:
    if (s.get("sub", "owner"), s.get("sub", "state"), s.get("sub", "entry")) != (owner, "open", entry):
        return [0]
    if entry in s.keys["submit"]["pending"]:
        s.keys["submit"]["pending"][entry] = owner
    s.expire("sub", "result")
    return [1]


def submit_retry(s: State, letter: str, *fields: str) -> Any:
    if s.get("sub", "state") == "open":
        return b"open"
    dead = s.keys.get("dead", [])
    found = next((item for item in dead if item[0] == letter), None)
    if found is None:
        return b""
    dead.remove(found)
    s.delete("sub")
    s.delete("result")
    s.keys["submit"]["entries"]["*"] = [field.encode() for field in fields]
    return "an id"


def submit_adopt(
    s: State, owner: str, request: str, epoch: str, p: str, d: str, gateway: str, body: bytes, again: bytes,
    told: bytes, nonce: str, control_ms: int, entry: str,
) -> Any:  # fmt: skip
    if (s.get("sub", "owner"), s.get("sub", "state"), s.get("sub", "entry")) != (owner, "open", entry):
        return b"lost"
    record = s.keys.get("req")
    if record is None:
        return b"unknown"
    if record.get("nonce") == nonce:
        return b"adopted"
    if record["st"] == "done":
        record.update(gw=owner, nonce=nonce)
        s.say("tokens", record["fin"])
        return b"adopted"
    if (record["ep"], record.get("pw", ""), record.get("dw", ""), record["gw"]) != (epoch, p, d, gateway):
        return b"moved"
    if s.is_live():
        s.drop("leases", request)
        tell_holders(s, request, int(epoch), p, told)
    s.drop("open_before", request)
    s.keys.setdefault("open", set()).add(request)
    record.update(st="queued", ep=str(int(epoch) + 1), gw=owner, body=body.decode(), nonce=nonce)
    record.update(at="", ho="", pw="", dw="")
    s.expiring -= {"req", "log"}
    mark(s, request, int(epoch) + 1)
    s.hash("queued")[request] = NOW_S * 1_000_000 + NOW_US
    s.say("sched", again)
    return b"adopted"


QUEUE: dict[str, tuple[Model, Sequence[str]]] = {
    "submit_open": (submit_open, ("sub", "submit", "reply")),
    "result_add": (result_add, ("sub", "result", "reply")),
    "submit_end": (submit_end, ("sub", "result", "submit", "dead", "reply")),
    "submit_renew": (submit_renew, ("submit", "sub", "result")),
    "submit_retry": (submit_retry, ("submit", "dead", "sub", "result")),
    "submit_adopt": (
        submit_adopt,
        (
            *("sub", "req", "queued", "leases", "tokens", "sched", "log", "control_p", "control_d", "held_p"),
            *("open", "open_before"),
        ),
    ),
}
"""Each script's model, and the roles of its keys."""
