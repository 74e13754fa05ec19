"""A source in a process of its own: `python -m tests.transfer.source_process NUM_BLOCKS BLOCK_BYTES COUNT...`

Offers request `r<i>` with COUNT[i] scattered blocks, prints its endpoint as JSON, then, once all are settled
or stdin ends, its counters. Used by the two-process test and by the benchmark.
"""

import random
import sys

import anyio
import anyio.to_thread
import msgspec
import numpy as np

from services.transfer import Identity, Region, TransferSource, socket_source
from shared.clock import SystemClock
from shared.config import TransferConfig
from shared.hashing import block_digest
from shared.ids import BlockId, RequestId
from tests.transfer.world import ATTEMPT, FIRST, KEY, READER, SOURCE


def block_ids(count: int, num_blocks: int, seed: int) -> list[BlockId]:
    """Scattered ids, the same in both processes."""
    return [BlockId(b) for b in random.Random(seed).sample(range(num_blocks), count)]


def pattern(num_blocks: int, block_bytes: int) -> np.ndarray:
    """The bytes of every block, uint8 [num_blocks, block_bytes]: cheap to make, different in each."""
    rows = np.arange(num_blocks, dtype=np.uint64)[:, None] * np.uint64(2654435761)
    return ((rows + np.arange(block_bytes, dtype=np.uint64)[None, :]) % np.uint64(251)).astype(np.uint8)


async def offer_all(source: TransferSource, region: Region, counts: list[int]) -> None:
    async with anyio.create_task_group() as tg:
        for i, count in enumerate(counts):
            ids = block_ids(count, region.num_blocks, seed=i)
            offer = source.open(RequestId(f"r{i}"), 1, ATTEMPT, READER)
            offer.announce(0, ids, [block_digest(region.block(b)) for b in ids], FIRST)
            tg.start_soon(offer.settled)


async def main(num_blocks: int, block_bytes: int, counts: list[int]) -> None:
    region = Region.create(num_blocks, block_bytes)
    np.copyto(np.frombuffer(region.buffer, dtype=np.uint8).reshape(num_blocks, -1), pattern(num_blocks, block_bytes))
    config = TransferConfig()
    source = socket_source(region, Identity(SOURCE, "pool-a"), KEY, config, SystemClock())
    async with anyio.create_task_group() as tg:
        await tg.start(source.serve)
        print(msgspec.json.encode(source.endpoint()).decode(), flush=True)
        tg.start_soon(end_with_stdin, tg.cancel_scope)
        await offer_all(source, region, counts)
        print(msgspec.json.encode(source.stats()).decode(), flush=True)
        tg.cancel_scope.cancel()


async def end_with_stdin(scope: anyio.CancelScope) -> None:
    await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
    scope.cancel()


if __name__ == "__main__":
    numbers = [int(a) for a in sys.argv[1:]]
    anyio.run(main, numbers[0], numbers[1], numbers[2:])
