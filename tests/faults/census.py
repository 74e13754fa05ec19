"""What a cell at rest may have in Redis. Anything else is a leak."""

from typing import Any

from shared.ids import Incarnation
from shared.keys import Keys
from shared.messages import decode_registration


def leftovers(client: Any, keys: Keys) -> list[str]:
    """Keys that should not be there, and streams and sets that should be empty; client is a `redis.Redis`.

    Keys with a time to live go by themselves. Of the others a cell at rest has only what the living need.
    """
    workers = [Incarnation(raw.decode()) for raw in client.zrange(keys.workers(), 0, -1)]
    gateways = [Incarnation(raw.decode()) for raw in client.zrange(keys.gateways(), 0, -1)]
    empty = {keys.sched().key, keys.kv().key, keys.index().key, keys.submit(), keys.queued(), keys.leases()}
    empty |= {keys.work(w).key for w in workers} | {keys.control(w).key for w in workers}
    empty |= {keys.held(w) for w in workers} | {keys.open(g) for g in gateways} | {keys.tokens(g).key for g in gateways}
    kept = {keys.workers(), keys.gateways(), keys.leader(), keys.deployment_key()} | {keys.worker(w) for w in workers}
    wrong = []
    for raw in client.scan_iter(match=f"{{{keys.cell}}}:*", count=1000):
        name = raw.decode()
        if name in empty:
            if size := _size(client, name):
                wrong.append(f"{name} has {size} entries")
        elif name not in kept and client.ttl(name) == -1:
            wrong.append(f"{name} stays for ever")
    return wrong + [f"{w} has credit taken" for w in workers if int(client.hget(keys.worker(w), "taken") or 0)]


def num_workers(client: Any, keys: Keys) -> int:
    """Workers on the list of the living that are registered."""
    rows = [client.hget(keys.worker(Incarnation(raw.decode())), "reg") for raw in client.zrange(keys.workers(), 0, -1)]
    return len({decode_registration(row).worker_id for row in rows if row})


def _size(client: Any, name: str) -> int:
    kind = client.type(name).decode()
    sizes = {"stream": client.xlen, "zset": client.zcard, "hash": client.hlen, "set": client.scard}
    return sizes[kind](name) if kind in sizes else 0
