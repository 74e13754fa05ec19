"""`python -m tests.unit.shared.bench_emit`: what one step of 64 seqs costs in `emit.lua`, on a real Redis.

Each call carries one token of each of 64 requests of one gateway. Prints the server's own time for a call (from
`INFO commandstats`, so without the client and the socket), with and without the append-only file.
"""

import argparse

import redis

from shared.ids import AttemptId, RequestId
from shared.leases import pack_tokens
from shared.messages import Tokens, encode
from shared.scripts import sources
from tests.redis_server import RedisServer

NUM_SEQS = 64


def usec_per_call(client: redis.Redis, num_steps: int) -> float:
    """Of `num_steps` steps."""
    client.flushall()
    attempt = AttemptId("a" * 32)
    requests = [RequestId(f"cmpl-{i:032x}") for i in range(NUM_SEQS)]
    for request in requests:
        client.hset(f"{{b}}:req:{request}", mapping={"st": "decode", "ep": 1, "at": attempt, "gw": "g"})
    digest = client.script_load(sources()["emit"])
    keys = ["{b}:tokens:g"]
    for request in requests:
        keys += [f"{{b}}:req:{request}", f"{{b}}:log:{request}:0"]
    client.execute_command("CONFIG RESETSTAT")
    for step in range(num_steps):
        args: list[str | bytes | int] = []
        for request in requests:
            args += [1, attempt, step, pack_tokens([step]), encode(Tokens(request, 1, 0, step, (step,)))]
        assert client.evalsha(digest, len(keys), *keys, *args) == [1] * NUM_SEQS
        client.xtrim("{b}:tokens:g", maxlen=0)
    return client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.unit.shared.bench_emit", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    server = RedisServer()
    server.start()
    with redis.Redis.from_url(server.url) as client:
        with_log = usec_per_call(client, steps)
        client.config_set("appendonly", "no")
        without = usec_per_call(client, steps)
    server.close()
    for name, usec in (("appendfsync always", with_log), ("no append-only file", without)):
        print(f"emit of {NUM_SEQS} seqs, {name}: {usec:.0f} us in Redis, {usec / NUM_SEQS:.1f} us a seq")


if __name__ == "__main__":
    main()
