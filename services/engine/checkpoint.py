"""One view of a model on disk, whatever its format. Tensors go by the names of `model_spec.tensor_shapes`; each format
knows what its files call them.

A model's digest says whether two workers serve the same weights. It covers, for every file: its size, its
header (names, shapes, types, and in GGUF the tokenizer), and samples of each tensor (the first and the middle
`SAMPLE_BYTES`), so that gigabytes need not be read; a fine-tune changes them all. Names of files do not count.
"""

from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import torch

from services.engine.gguf_quants import Groups
from services.engine.model_spec import ModelSpec, tensor_shapes
from shared.errors import ModelError

SAMPLE_BYTES = 4096
_DIGEST_BYTES = 16


class Checkpoint(Protocol):
    """A model's files, open. `read` is called once per tensor."""

    @property
    def spec(self) -> ModelSpec: ...

    def label(self, name: str) -> str:
        """What the file calls the tensor, for messages."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """float32, in the shape of `tensor_shapes`, rows that RoPE turns together half a head apart; norms as they
        multiply. :raises ModelError: an unknown type, or another shape."""
        ...

    def bits(self, name: str) -> int:
        """4 or 8 where `read_groups` can give the stored weights, 0 otherwise."""
        ...

    def read_groups(self, name: str) -> Groups:
        """The stored weights, in the same row order. Only where `bits` is not 0."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """The model in a `.gguf` file, or in a folder with `config.json` and safetensors.

    :raises ModelError: damaged, or of an architecture or tensor type that this build does not know.
    """
    if path.is_dir():
        from services.engine.hf_checkpoint import HFCheckpoint

        return HFCheckpoint(path)
    from services.engine.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(path)


class ModelDigest:
    """Collects what a model's digest covers; see the module."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=_DIGEST_BYTES, person=b"baton-model-1")

    def add_file(self, data: memoryview, header_bytes: int, tensors: Iterable[tuple[int, int]]) -> None:
        """:param tensors: (first byte, number of bytes) of each tensor, in a fixed order."""
        self.add(len(data).to_bytes(8, "little"))
        self.add(data[:header_bytes])
        for start, size in tensors:
            middle = start + size // 2
            self._hash.update(data[start : start + min(size, SAMPLE_BYTES)])
            self._hash.update(data[middle : middle + min(size - size // 2, SAMPLE_BYTES)])

    def add(self, field: bytes | memoryview) -> None:
        self._hash.update(len(field).to_bytes(8, "little"))
        self._hash.update(field)

    def hex(self) -> str:
        return self._hash.hexdigest()


def check_names(
    spec: ModelSpec, stored: Iterable[str], label: Callable[[str], str], harmless: Iterable[str] = ()
) -> None:
    """:param stored: the file's own names. :param harmless: of these, those that may be left unread.

    :raises ModelError: a tensor is missing, or is none of this model's, or the spec's sizes contradict each other.
    """
    check_sizes(spec)
    expected, found = {label(name) for name in tensor_shapes(spec)}, set(stored)
    for name in sorted(expected - found):
        raise ModelError(f"model {spec.name}: tensor {name} is missing")
    for name in sorted(found - expected - set(harmless)):
        raise ModelError(f"model {spec.name}: tensor {name} is not part of a model of this kind that this build knows")


def check_sizes(spec: ModelSpec) -> None:
    """:raises ModelError: sizes that no model of these kinds can have."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"model {spec.name}: {spec.num_heads} heads are no multiple of {spec.num_kv_heads} KV heads")
    if spec.head_dim % 2:
        raise ModelError(f"model {spec.name}: heads of {spec.head_dim} numbers cannot be rotated in pairs")


def check_shape(spec: ModelSpec, label: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """:raises ModelError: with both shapes."""
    if tuple(got) != expected:
        raise ModelError(f"model {spec.name}: tensor {label} is {tuple(got)}, expected {expected}")
