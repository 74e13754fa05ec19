"""Counters of both ends of a transfer. Each is moved by exactly one place; snapshots are copies."""

import copy
from dataclasses import dataclass


@dataclass(slots=True)
class SourceStats:
    """What a worker served. Over shm the reader copies: bytes are counted at its end alone."""

    block_bytes: int
    bytes_sent: int = 0  # of blocks that went out whole while their offer lived
    blocks_sent: int = 0
    bytes_filler: int = 0  # zeros in place of a dead offer's bytes
    reads: int = 0
    refused: int = 0  # bad hello, capability or read
    malformed: int = 0  # connections ended for bytes that are no message
    stale: int = 0  # answers `stale`
    released: int = 0
    expired: int = 0
    withdrawn: int = 0
    open_offers: int = 0
    waiting_wants: int = 0
    connections: int = 0

    def snapshot(self) -> "SourceStats":
        self.check()
        return copy.copy(self)

    def check(self) -> None:
        assert self.bytes_sent == self.blocks_sent * self.block_bytes


@dataclass(slots=True)
class ReaderStats:
    """What a worker fetched. A block that was read again after a bad digest counts twice."""

    block_bytes: int
    bytes_read: int = 0  # moved into destination blocks, whole reads only
    blocks_read: int = 0
    bytes_discarded: int = 0  # of reads that were given up or cut off
    reads: int = 0
    refused: int = 0
    stale: int = 0
    digest_failures: int = 0
    retries: int = 0  # reconnects and blocks read again
    timeouts: int = 0
    failed: int = 0  # fetches that raised, cancelled ones not included
    fetched: int = 0  # fetches that ended in `held`
    open_fetches: int = 0
    links_shm: int = 0  # connections made, by transport
    links_tcp: int = 0

    def snapshot(self) -> "ReaderStats":
        self.check()
        return copy.copy(self)

    def check(self) -> None:
        assert self.bytes_read == self.blocks_read * self.block_bytes
