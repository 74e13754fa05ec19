"""The real thing: source and reader in two processes."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest

from services.transfer import Identity, Region, TransferReader, socket_reader
from shared import capability
from shared.clock import SystemClock
from shared.config import TransferConfig
from shared.errors import TransferError
from shared.ids import BlockId, RequestId, WorkerId
from shared.messages import Endpoint, SourceRef
from shared.offload import ThreadOffload
from tests.transfer.source_process import block_ids, pattern
from tests.transfer.world import ATTEMPT, KEY, READER, SOURCE, until

pytestmark = pytest.mark.anyio

NUM_BLOCKS, BLOCK_BYTES = 64, 100_003


@contextmanager
def source_process(*counts: int) -> Iterator[tuple[subprocess.Popen, Endpoint]]:
    """Starts one, waits until it listens, ends it."""
    command = [sys.executable, "-m", "tests.transfer.source_process", *map(str, (NUM_BLOCKS, BLOCK_BYTES, *counts))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process, msgspec.json.decode(process.stdout.readline(), type=Endpoint)
        finally:
            process.kill()


def make_ref(endpoint: Endpoint, request: str) -> SourceRef:
    token = capability.mint(KEY, RequestId(request), 1, ATTEMPT, SOURCE, READER)
    return SourceRef(worker_id=WorkerId("p"), incarnation=SOURCE, endpoints=(endpoint,), capability=token)


def make_reader(region: Region, transport: str) -> TransferReader:
    config = TransferConfig(transports=(transport,))  # type: ignore[arg-type]
    return socket_reader(region, Identity(READER, "pool-a"), config, SystemClock(), ThreadOffload(2))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_blocks_cross_from_process_to_process(transport):
    """Two requests at once, scattered ids at both ends, every byte in its place."""
    counts = (40, 20)
    region = Region.create(NUM_BLOCKS, BLOCK_BYTES)
    reader = make_reader(region, transport)
    want = pattern(NUM_BLOCKS, BLOCK_BYTES)
    dest = block_ids(sum(counts), NUM_BLOCKS, seed=99)
    parts = [dest[:40], dest[40:]]
    with source_process(*counts) as (process, endpoint):
        async with anyio.create_task_group() as tg:
            await tg.start(reader.serve)
            async with anyio.create_task_group() as fetches:
                for i, part in enumerate(parts):
                    request = f"r{i}"
                    fetches.start_soon(reader.fetch, make_ref(endpoint, request), RequestId(request), 1, ATTEMPT, part)
            stats = reader.stats()
            assert process.stdout is not None
            theirs = msgspec.json.decode(await anyio.to_thread.run_sync(process.stdout.readline))
            tg.cancel_scope.cancel()
    for i, part in enumerate(parts):
        for source_id, dest_id in zip(block_ids(counts[i], NUM_BLOCKS, seed=i), part, strict=True):
            assert np.array_equal(np.frombuffer(region.block(dest_id), dtype=np.uint8), want[source_id])
    assert (stats.links_shm, stats.links_tcp) == ((1, 0) if transport == "shm" else (0, 1))
    assert (stats.blocks_read, stats.bytes_read, stats.fetched) == (60, 60 * BLOCK_BYTES, 2)
    assert theirs["blocks_sent"] == (60 if transport == "tcp" else 0)
    assert theirs["released"] == 2
    region.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_killed_source_process_fails_the_fetch(transport):
    """SIGKILL of the source ends the fetch with an error, and the reader's memory can be reused."""
    region = Region.create(NUM_BLOCKS, BLOCK_BYTES)
    reader = make_reader(region, transport)
    with source_process() as (process, endpoint):
        async with anyio.create_task_group() as tg:
            await tg.start(reader.serve)

            async def kill_once_linked():
                await until(lambda: reader.stats().links_shm + reader.stats().links_tcp == 1)
                process.kill()

            tg.start_soon(kill_once_linked)
            with pytest.raises(TransferError):
                await reader.fetch(make_ref(endpoint, "r0"), RequestId("r0"), 1, ATTEMPT, [BlockId(0)])
            tg.cancel_scope.cancel()
    region.close()
