"""A model in a GGUF file."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from services.engine.checkpoint import ModelDigest, check_names
from services.engine.gguf_file import GgufFile, GgufTensor
from services.engine.gguf_quants import Groups, bits_of, dequantise, split
from services.engine.gguf_spec import ROPE_FACTORS, read_spec

_TOP = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
_PARTS = {
    "attn_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    **{part: f"attn_{part}.weight" for part in "qkv"},
    **{f"{part}_bias": f"attn_{part}.bias" for part in "qkv"},
    **{part: f"ffn_{part}.weight" for part in ("gate", "up", "down")},
}
_PAIRS_SIDE_BY_SIDE = ("llama", "smollm3")


class GgufCheckpoint:
    """See `services.engine.checkpoint.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        """:raises ModelError: damaged, an unknown architecture, or tensors missing or unknown."""
        self._file = GgufFile(path)
        self.spec = read_spec(self._file, _digest(self._file))
        self._side_by_side = self._file.metadata["general.architecture"] in _PAIRS_SIDE_BY_SIDE
        check_names(self.spec, self._file.tensors, self.label, {ROPE_FACTORS})

    def label(self, name: str) -> str:
        if name in _TOP:
            return _TOP[name]
        _, layer, part = name.split(".")
        return f"blk.{layer}.{_PARTS[part]}"

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensor(name)
        weights = dequantise(self._file.read(tensor), tensor.type_id, tensor.shape)
        order = self._row_order(name, len(weights))
        return torch.from_numpy(weights if order is None else weights[order])

    def bits(self, name: str) -> int:
        return bits_of(self._tensor(name).type_id)

    def read_groups(self, name: str) -> Groups:
        tensor = self._tensor(name)
        groups = split(self._file.read(tensor), tensor.type_id, tensor.shape)
        order = self._row_order(name, len(groups.q))
        return groups if order is None else groups.reorder(order)

    def _tensor(self, name: str) -> GgufTensor:
        return self._file.tensors[self.label(name)]

    def _row_order(self, name: str, num_rows: int) -> npt.NDArray[np.int64] | None:
        """Some architectures keep the two rows that RoPE rotates together side by side; we keep them half a head
        apart, as the others do."""
        heads = {"q": self.spec.num_heads, "k": self.spec.num_kv_heads}.get(name.rpartition(".")[2])
        if heads is None or not self._side_by_side:
            return None
        return np.arange(num_rows).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)


def _digest(file: GgufFile) -> str:
    digest = ModelDigest()
    tensors = sorted((t.offset, t.num_bytes) for t in file.tensors.values())
    digest.add_file(memoryview(file.data), file.data_start, tensors)
    return digest.hex()
