"""Packed weights in a file that all workers of the host map: packed once, then read at the speed of the page cache.

`<cache>/<model digest>-<dtype>-<version>.pack`: a page with the magic, the number of bytes that follow and a
digest of the plan; then the buffer of `services.engine.packing_plan`. Written beside its name and renamed, so that a
file either is whole or is not there; two workers that pack at once write the same bytes.

A step reads all weights from front to back, so how large the pages are decides how fast it is: a decode step of one seq
takes a quarter longer on pages of 4 KiB than of 2 MiB. Where file system and kernel can (ext4 from Linux 6.16, xfs,
btrfs), a file that is not cached yet is read in large pages if its mapping asks for them before it is touched.
"""

import mmap
import os
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import structlog

from services.engine.checkpoint import Checkpoint
from services.engine.model_spec import WeightDtype
from services.engine.packing_plan import Buffer, PackPlan, fill, plan_pack
from shared.errors import ModelError

log = structlog.get_logger(__name__)

PACK_VERSION = 2
"""Raised when the packed bytes of a model change."""
_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module does not name it
_POPULATE_BYTES = 16 << 20  # at once: `madvise` keeps the interpreter's lock
_MAGIC = b"BATONPK\0"
_HEADER_BYTES = mmap.PAGESIZE
MIN_FILE_BYTES = 16 << 20
"""Smaller models are packed in memory: that takes no longer than opening a file."""


def is_kept(dtype: WeightDtype, num_bytes: int) -> bool:
    """Whether such weights are packed into a file, which the workers of a host share."""
    return dtype != "float32" and num_bytes >= MIN_FILE_BYTES


def load_packed(checkpoint: Checkpoint, dtype: WeightDtype, cache_dir: str = "") -> Buffer:
    """The packed weights, read-only, from the cache file if there is one, else packed now and kept there.

    Float32 weights are packed in memory: that is a copy, and the file would be as large as the model. So is any model
    whose file cannot be written.

    :raises ModelError: the checkpoint is damaged or of unknown types.
    """
    plan = plan_pack(checkpoint, dtype)
    if not is_kept(dtype, plan.num_bytes):
        return _in_memory(checkpoint, plan)
    path = pack_path(checkpoint, dtype, cache_dir)
    mapped = _open(path, plan)
    if mapped is not None:
        return mapped
    try:
        _write(path, checkpoint, plan)
    except OSError as exc:
        log.warning("model.pack_not_kept", path=str(path), error=exc.strerror)
        return _in_memory(checkpoint, plan)
    mapped = _open(path, plan)
    if mapped is None:
        raise ModelError(f"model {checkpoint.spec.name}: the packed weights in {path} cannot be read back")
    return mapped


def pack_path(checkpoint: Checkpoint, dtype: WeightDtype, cache_dir: str = "") -> Path:
    """Where this model's packed weights are kept."""
    folder = Path(cache_dir).expanduser() if cache_dir else Path("~/.cache/baton").expanduser()
    return folder / f"{checkpoint.spec.digest}-{dtype}-{PACK_VERSION}.pack"


def _in_memory(checkpoint: Checkpoint, plan: PackPlan) -> Buffer:
    pages = mmap.mmap(-1, plan.num_bytes)
    with suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)  # half a gigabyte of small pages takes a second to fault in
    buffer = np.frombuffer(pages, np.uint8)
    fill(checkpoint, plan, buffer)
    return buffer


def _header(plan: PackPlan) -> bytes:
    layout = blake2b(repr(plan.entries).encode(), digest_size=16).digest()
    return (_MAGIC + plan.num_bytes.to_bytes(8, "little") + layout).ljust(_HEADER_BYTES, b"\0")


def _open(path: Path, plan: PackPlan) -> Buffer | None:
    """The file's buffer, or None if there is no such file or it is not the plan's."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != _HEADER_BYTES + plan.num_bytes or file.read(_HEADER_BYTES) != _header(plan):
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError:
        return None
    with suppress(OSError, AttributeError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    try:
        for start in range(0, size, _POPULATE_BYTES):
            mapped.madvise(_MADV_POPULATE_READ, start, min(_POPULATE_BYTES, size - start))
    except (OSError, ValueError, AttributeError):  # an older kernel
        with suppress(OSError, AttributeError):
            mapped.madvise(mmap.MADV_WILLNEED)
    return np.frombuffer(mapped, np.uint8, offset=_HEADER_BYTES)


def _write(path: Path, checkpoint: Checkpoint, plan: PackPlan) -> None:
    """:raises OSError: the folder or the disk refuses."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = _in_memory(checkpoint, plan)
    with NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as file:
        try:
            file.write(_header(plan))
            file.write(buffer.data)
            file.flush()
            os.fdatasync(file.fileno())
            with suppress(OSError, AttributeError):  # written in whatever pages came: read it anew, in large ones
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            Path(file.name).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(file.name).unlink()
            raise
    log.info("model.packed", path=str(path), mib=plan.num_bytes >> 20)
