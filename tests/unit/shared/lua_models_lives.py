"""As `lua_models.py`: the scripts about workers and gateways, their coming, their signs of life and their end."""

from collections.abc import Sequence
from typing import Any

from tests.unit.shared.lua_models import NOW_MS, Model, State, raw


def register(s: State, incarnation: str, registration: bytes, blocks: int, ttl_ms: int, message: bytes) -> Any:
    s.hash("workers")[incarnation] = NOW_MS + ttl_ms
    if "worker_d" in s.keys:
        return 0
    s.keys["worker_d"] = {"reg": registration.decode(), "state": "up", "blocks": str(blocks), "taken": "0"}
    s.say("sched", message)
    return 1


def heartbeat(s: State, incarnation: str, ttl_ms: int) -> Any:
    if s.get("worker_d", "state") in (None, "dead"):
        return 0
    s.hash("workers")[incarnation] = NOW_MS + ttl_ms
    return 1


def retire(s: State, incarnation: str, state: str, message: bytes) -> Any:
    if s.get("worker_d", "state") in (None, "dead"):
        return 0
    s.hash("worker_d")["state"] = state
    if state == "dead":
        s.hash("workers")[incarnation] = 0
    s.say("sched", message)
    return 1


def bury(s: State, incarnation: str, until_ms: int) -> Any:
    deadline = s.keys.get("workers", {}).get(incarnation)
    if deadline is None or deadline > NOW_MS or (deadline > 0 and until_ms < NOW_MS):
        return None
    s.hash("worker_d")["state"] = "dead"
    s.hash("workers")[incarnation] = 0
    return [name.encode() for name in s.keys.get("held_d", {})]


def forget(s: State, incarnation: str) -> Any:
    if s.get("worker_d", "state") != "dead":
        return 0
    s.drop("workers", incarnation)
    for role in ("worker_d", "held_d", "work_d", "control_d"):
        s.delete(role)
    return 1


def greet(s: State, gateway: str, ttl_ms: int) -> Any:
    known = s.keys.get("gateways", {}).get(gateway)
    s.hash("gateways")[gateway] = NOW_MS + ttl_ms
    return int(not known)


def bury_gateway(s: State, gateway: str, until_ms: int) -> Any:
    deadline = s.keys.get("gateways", {}).get(gateway)
    if deadline is None or deadline > NOW_MS or (deadline > 0 and until_ms < NOW_MS):
        return None
    s.hash("gateways")[gateway] = 0
    return sorted(raw(request) for request in s.keys.get("open", ()))


def forget_gateway(s: State, gateway: str) -> Any:
    if s.keys.get("gateways", {}).get(gateway) != 0 or s.keys.get("open"):
        return 0
    s.drop("gateways", gateway)
    s.delete("tokens")
    return 1


def clamp(s: State, ttl_ms: int) -> Any:
    late = [name for name, deadline in s.keys.get("workers", {}).items() if deadline > NOW_MS + ttl_ms]
    for name in late:
        s.hash("workers")[name] = NOW_MS + ttl_ms
    return len(late)


LIVES: dict[str, tuple[Model, Sequence[str]]] = {
    "register": (register, ("workers", "worker_d", "sched")),
    "heartbeat": (heartbeat, ("workers", "worker_d")),
    "retire": (retire, ("workers", "worker_d", "sched")),
    "bury": (bury, ("workers", "worker_d", "held_d")),
    "forget": (forget, ("workers", "worker_d", "held_d", "work_d", "control_d")),
    "clamp": (clamp, ("workers",)),
    "greet": (greet, ("gateways",)),
    "bury_gateway": (bury_gateway, ("gateways", "open")),
    "forget_gateway": (forget_gateway, ("gateways", "open", "tokens")),
}
