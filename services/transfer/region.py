"""One worker's KV memory: a single run of equal blocks, in a memory file that other processes can map.

The file is sealed against a change of size (a reader that maps it can never fault) and against new
writable mappings (nobody writes into another process's pool; the kernel sees to it).
"""

import contextlib
import fcntl
import mmap
import os

import numpy as np

from shared.ids import BlockId
from shared.offload import Offload

MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
POPULATE_BYTES = 1 << 20  # at once: `madvise` keeps the interpreter's lock
F_SEAL_FUTURE_WRITE = 0x0010  # Linux 5.1; the fcntl module does not name it


class Region:
    """`num_blocks` blocks of `block_bytes` bytes, back to back, zeroed.

    Owner of the memory and of the file descriptor. `buffer` and all views of it die with `close`.
    """

    def __init__(self, memory: mmap.mmap, fd: int, num_blocks: int, block_bytes: int) -> None:
        self._memory = memory
        self.fd = fd  # -1 where there is no memory file: then only tcp is offered
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.buffer = memoryview(memory)[: num_blocks * block_bytes]

    @classmethod
    def create(cls, num_blocks: int, block_bytes: int) -> "Region":
        """New memory. Pages are taken when first touched.

        :raises OSError: the system has no memory file or address space left.
        """
        assert num_blocks > 0
        assert block_bytes > 0
        num_bytes = num_blocks * block_bytes
        if not hasattr(os, "memfd_create"):
            return cls(mmap.mmap(-1, num_bytes), -1, num_blocks, block_bytes)
        fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with contextlib.suppress(OSError, AttributeError):  # where the system allows it: `shmem_enabled`
                memory.madvise(mmap.MADV_HUGEPAGE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            with contextlib.suppress(OSError):  # an old kernel: the other seals still hold
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
        except BaseException:
            os.close(fd)
            raise
        return cls(memory, fd, num_blocks, block_bytes)

    def block(self, block_id: BlockId) -> memoryview:
        """The bytes of one block, writable, [block_bytes]."""
        assert 0 <= block_id < self.num_blocks, f"block {block_id} of {self.num_blocks}"
        return self.buffer[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    async def populate(self, num_bytes: int, offload: Offload) -> None:
        """Take the first so many bytes from the system now, so that nobody waits for them later. Cancelled between two
        pieces. Where the kernel cannot (before Linux 5.14), pages are taken when first touched."""
        end = min(num_bytes, self.num_blocks * self.block_bytes)
        with contextlib.suppress(OSError, ValueError):  # refused, or closed meanwhile
            for start in range(0, end, POPULATE_BYTES):
                await offload.run(self._memory.madvise, MADV_POPULATE_WRITE, start, min(POPULATE_BYTES, end - start))

    def close(self) -> None:
        """Give the memory back. Idempotent. Memory that a tensor still views lives until that is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(BufferError):
            self.buffer.release()
            self._memory.close()


def map_blocks(fd: int, num_blocks: int, block_bytes: int) -> np.ndarray:
    """Another process's region, read-only: uint8 [num_blocks, block_bytes]. Unmapped with the last view of it.

    Does not keep `fd`.

    :raises OSError: not a memory file, or smaller than that, or not sealed against shrinking (a reader of
        such a file could be killed by its owner).
    """
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK:
        raise OSError("memory file is not sealed against shrinking")
    if os.fstat(fd).st_size < num_blocks * block_bytes:
        raise OSError("memory file is smaller than the blocks that it should hold")
    memory = mmap.mmap(fd, num_blocks * block_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    return np.frombuffer(memory, dtype=np.uint8).reshape(num_blocks, block_bytes)
