"""Three hundred clients that leave: `python -m tests.faults.cancels`.

Each asks for a long answer and closes its connection after a while of its own. Redis keeps what it knew of a cancelled
request for a minute, and so tells in which phase each one was.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import anyio
import redis

from shared.keys import Keys
from tests.flow.stack import Stack
from tests.models import make_tiny_llama

PROMPT = "the bell rang in the long night of the storm, and the keeper wrote it in the book of the light "
AT_ONCE = 48
SETTINGS = {"engine__num_blocks": 300, "engine__max_num_seqs": 8, "engine__max_num_batched_tokens": 64}
"""Small enough that requests wait in every phase."""


async def leave(port: int, draw: random.Random) -> None:
    """Ask, and close the connection: after a time, or after some events."""
    prompt = f"{draw.randrange(10**9)} {PROMPT * draw.randint(1, 5)}"
    stream = draw.random() < 0.7
    body = json.dumps({"prompt": prompt, "stream": stream, "max_tokens": 500, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    num_events = draw.choice((0, 0, 1, 3, 20)) if stream else 0
    async with await anyio.connect_tcp("127.0.0.1", port) as connection:
        await connection.send((head + body).encode())
        with anyio.move_on_after(draw.choice((0.03, 0.3, 2.0)) * draw.random() if not num_events else 10.0):
            seen = 0
            while seen < max(1, num_events):
                seen += (await connection.receive()).count(b"data: ")


def phases(stack: Stack) -> Counter[str]:
    """In which phase each cancelled request was, by what Redis still knows of it."""
    keys = Keys(stack.settings.redis.cell)
    found: Counter[str] = Counter()
    with redis.Redis.from_url(stack.redis.url, decode_responses=True) as client:
        for name in client.scan_iter(match=keys.request("*"), count=1000):  # pyright: ignore[reportArgumentType]
            state, prefill, decode, holder = client.hmget(name, "st", "pw", "dw", "ho")
            if state == "done":
                found["ended"] += 1
            elif not decode:
                found["queued"] += 1
            elif not holder:
                found["dispatched"] += 1
            else:
                found["prefilling or handing over" if holder == prefill else "decoding"] += 1
    return found


async def run(stack: Stack, count: int, seed: int) -> None:
    """`count` clients, some dozens at once."""
    port = stack.settings.gateway.port
    draw = random.Random(seed)
    async with anyio.create_task_group() as tasks:
        room = anyio.Semaphore(AT_ONCE)

        async def one(own: random.Random) -> None:
            await leave(port, own)
            room.release()

        for _ in range(count):
            await room.acquire()
            tasks.start_soon(one, random.Random(draw.random()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    model = make_tiny_llama(Path(tempfile.mkdtemp(prefix="baton-tiny-")) / "tiny")
    with Stack(prefill=1, decode=1, model__path=model, **SETTINGS) as stack:
        began = time.monotonic()
        anyio.run(run, stack, args.clients, args.seed)
        left = time.monotonic()
        stack.wait_idle(60.0)
        back = time.monotonic()
        print(f"{args.clients} clients left within {left - began:.1f} s: {dict(phases(stack))}")
        print(f"all blocks, credit and leases were back {back - left:.2f} s after the last one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
