"""A source and a reader in one process, over each transport, on a clock that the test moves."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import anyio
import anyio.lowlevel
import numpy as np
from anyio.abc import TaskGroup

from services.transfer import (
    Fetched,
    Identity,
    Offer,
    Region,
    TransferReader,
    TransferSource,
    socket_reader,
    socket_source,
)
from services.transfer.fake import FakeNetwork, Faults
from services.transfer.links import Link
from shared import capability
from shared.clock import ManualClock
from shared.config import TransferConfig
from shared.hashing import block_digest
from shared.ids import AttemptId, BlockId, Incarnation, RequestId, WorkerId
from shared.messages import FirstToken, SourceRef
from shared.offload import ThreadOffload

Kind = Literal["fake", "tcp", "shm"]
KEY = b"deployment key of the tests"
ATTEMPT = AttemptId("attempt-1")
SOURCE = Incarnation("prefill-life-1")
READER = Incarnation("decode-life-1")
FIRST = FirstToken(index=0, token_id=42, num_cached_tokens=3)


@dataclass
class World:
    """What a test holds. `source_scope` ends the source as a dying process would."""

    kind: Kind
    clock: ManualClock
    config: TransferConfig
    theirs: Region  # the source's memory
    ours: Region  # the reader's memory
    source: TransferSource
    reader: TransferReader
    tg: TaskGroup
    source_scope: anyio.CancelScope
    network: FakeNetwork | None

    def ref(self, request: str = "r", epoch: int = 1, **changes: object) -> SourceRef:
        token = capability.mint(KEY, RequestId(request), epoch, ATTEMPT, SOURCE, READER)
        fields = {
            "worker_id": WorkerId("prefill-0"),
            "incarnation": SOURCE,
            "endpoints": (self.source.endpoint(),),
            "capability": token,
        }
        return SourceRef(**(fields | changes))  # type: ignore[arg-type]

    def open(self, request: str = "r", epoch: int = 1) -> Offer:
        return self.source.open(RequestId(request), epoch, ATTEMPT, READER)

    def announce(self, offer: Offer, first: int, ids: Sequence[int], last: FirstToken | None = None) -> None:
        blocks = [BlockId(i) for i in ids]
        offer.announce(first, blocks, [block_digest(self.theirs.block(b)) for b in blocks], last)

    async def fetch(
        self, dest: Sequence[int | None], request: str = "r", epoch: int = 1, ref: SourceRef | None = None
    ) -> Fetched:
        targets = [None if d is None else BlockId(d) for d in dest]
        source = ref or self.ref(request, epoch)
        return await self.reader.fetch(source, RequestId(request), epoch, ATTEMPT, targets)

    def same(self, theirs: int, ours: int) -> bool:
        return self.theirs.block(BlockId(theirs)) == self.ours.block(BlockId(ours))

    def landed(self, theirs: int, ours: int, num_bytes: int = 64) -> bool:
        """Whether the first bytes of the block have arrived."""
        return self.theirs.block(BlockId(theirs))[:num_bytes] == self.ours.block(BlockId(ours))[:num_bytes]

    def cut(self) -> None:
        """Break the connections under the reader, as the network would."""
        if self.network is not None:
            self.network.cut()
            return
        for link in self.links():
            link._wire.close()  # type: ignore[attr-defined]

    def links(self) -> list[Link]:
        """The reader's links that are not lost."""
        pool = self.reader._links
        assert pool is not None
        found = [place.link for place in pool._places.values()]
        return [link for link in found if link is not None and link.routes.lost is None]


async def until(condition: Callable[[], bool]) -> None:
    """Let the other tasks run until it holds."""
    with anyio.fail_after(20):
        while not condition():
            await anyio.lowlevel.checkpoint()


def fill(region: Region, seed: int) -> None:
    """Different bytes in every block."""
    data = np.random.default_rng(seed).integers(1, 256, len(region.buffer), dtype=np.uint8)
    np.copyto(np.frombuffer(region.buffer, dtype=np.uint8), data)


@asynccontextmanager
async def make_world(
    kind: Kind,
    *,
    num_blocks: int = 32,
    block_bytes: int = 1000,
    reader_fingerprint: str = "pool-a",
    reader_block_bytes: int | None = None,
    faults: Faults | None = None,
    max_inflight_bytes: int = 256 << 20,
) -> AsyncIterator[World]:
    transports = ("shm",) if kind == "shm" else ("tcp",)
    config = TransferConfig(
        transports=transports, hold_s=60.0, idle_timeout_s=500.0, max_inflight_bytes=max_inflight_bytes
    )
    clock = ManualClock()
    theirs = Region.create(num_blocks, block_bytes)
    ours = Region.create(num_blocks, reader_block_bytes or block_bytes)
    fill(theirs, seed=1)
    source_id, reader_id = Identity(SOURCE, "pool-a"), Identity(READER, reader_fingerprint)
    offload = ThreadOffload(2)
    network = FakeNetwork(clock, faults) if kind == "fake" else None
    if network is not None:
        source = network.source(theirs, source_id, KEY, config)
        reader = network.reader(ours, reader_id, config, offload)
    else:
        source = socket_source(theirs, source_id, KEY, config, clock)
        reader = socket_reader(ours, reader_id, config, clock, offload)
    scope = anyio.CancelScope()

    async def serve_source(*, task_status) -> None:
        with scope:
            await source.serve(task_status=task_status)

    async with anyio.create_task_group() as tg:
        await tg.start(serve_source)
        await tg.start(reader.serve)
        try:
            yield World(kind, clock, config, theirs, ours, source, reader, tg, scope, network)
            source.stats()
            assert reader.stats().open_fetches == 0
        finally:
            tg.cancel_scope.cancel()
    ours.close()
    theirs.close()
