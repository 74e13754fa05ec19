"""GGUF files: every tensor type against the `gguf` package, and every way a file may be wrong."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from services.engine.checkpoint import open_checkpoint
from services.engine.gguf_quants import TYPES, bits_of, dequantise, split
from services.engine.weights import load_weights
from shared.errors import ModelError
from tests.unit.engine_runner.gguf_maker import HIDDEN, KV_HEADS, VOCAB, WIDTH, random_groups, write_gguf

Q = gguf.GGMLQuantizationType


K_QUANTS = {12, 13, 14}
FLOATS = {0, 1, 30}


@pytest.mark.parametrize("type_id", sorted(TYPES.keys() - K_QUANTS))
def test_dequantised_weights_are_those_of_the_gguf_package(type_id: int):
    """Bit for bit, for every type this build reads, over arbitrary finite scales."""
    rng = np.random.default_rng(type_id)
    values = rng.standard_normal((7, 96)).astype(np.float32) * rng.choice([1e-6, 1, 300], (7, 1)).astype(np.float32)
    stored = gguf.quants.quantize(values, Q(type_id))
    want = gguf.quants.dequantize(stored, Q(type_id))
    got = dequantise(stored.tobytes(), type_id, (7, 96))
    np.testing.assert_array_equal(got, want)
    assert got.dtype == np.float32


@pytest.mark.parametrize("type_id", sorted(TYPES.keys() - FLOATS))
def test_every_bit_pattern_of_a_group(type_id: int):
    """Random bytes with sane scales: each weight lands at its place."""
    raw = random_groups(type_id, 50)
    got = dequantise(raw.tobytes(), type_id, (50, TYPES[type_id].group))
    np.testing.assert_array_equal(got, gguf.quants.dequantize(raw, Q(type_id)))


@pytest.mark.parametrize("type_id", [t for t in sorted(TYPES) if bits_of(t)])
def test_groups_are_the_stored_weights(type_id: int):
    """scale * q + minimum of the parts is the weight: exactly, but for Q4_K, whose scales are rounded to float16."""
    raw, columns = random_groups(type_id, 24), 6 * TYPES[type_id].group
    groups = split(raw.tobytes(), type_id, (4, columns))
    back = groups.q * np.repeat(groups.scale.astype(np.float64), 32, axis=1)
    assert groups.scale.shape == (4, columns // 32)
    if groups.minimum is not None:
        assert groups.q.max() <= 15
        back += np.repeat(groups.minimum.astype(np.float64), 32, axis=1)
    want = gguf.quants.dequantize(raw, Q(type_id)).reshape(4, columns)
    size = np.abs(groups.q) * np.repeat(np.abs(groups.scale.astype(np.float64)), 32, axis=1) + np.abs(want - back)
    tolerance = 2**-10 if type_id == Q.Q4_K else 2**-22
    assert (np.abs(back - want) <= tolerance * (size + np.abs(want))).all()


def test_a_model_of_mixed_types_is_read(tmp_path: Path):
    """Shapes, joined projections and tied embeddings, each tensor of its own type."""
    types = {"token_embd": Q.Q8_0, "blk.0.attn_q": Q.Q4_1, "blk.0.ffn_up": Q.Q4_0, "blk.0.ffn_down": Q.F16}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.Q4_1.gguf", types=types))
    spec = checkpoint.spec
    assert (spec.name, spec.num_layers, spec.head_dim, spec.vocab_size) == ("tiny", 1, 16, VOCAB)
    assert (spec.num_kv_heads, spec.tied_embeddings, spec.max_context) == (KV_HEADS, True, 128)
    weights = load_weights(checkpoint)
    assert weights.lm_head is weights.embed
    layer = weights.layers[0]
    assert layer.qkv.shape == (2 * HIDDEN, HIDDEN)
    assert layer.gate_up.shape == (2 * WIDTH, HIDDEN)
    reader = gguf.GGUFReader(tmp_path / "tiny.Q4_1.gguf")
    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    np.testing.assert_array_equal(layer.gate_up[WIDTH:], stored["blk.0.ffn_up.weight"])
    np.testing.assert_array_equal(layer.down, stored["blk.0.ffn_down.weight"])
    np.testing.assert_array_equal(layer.qkv[HIDDEN + HIDDEN // 2 :], stored["blk.0.attn_v.weight"])
    # Rows that rotate together lie side by side in the file (2i, 2i + 1), half a head apart in memory.
    np.testing.assert_array_equal(layer.qkv[[0, 8, 1, 9]], stored["blk.0.attn_q.weight"][:4])
    held = sum(w.numel() for w in (layer.attn_norm, layer.qkv, layer.o, layer.mlp_norm, layer.gate_up, layer.down))
    assert spec.weight_bytes == 4 * (held + weights.embed.numel() + weights.norm.numel())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba'"),
        ({"drop": "blk.0.ffn_up"}, "tensor blk.0.ffn_up.weight is missing"),
        ({"drop": "token_embd"}, "tensor token_embd.weight is missing"),
        ({"extra": "blk.0.attn_q_norm"}, "tensor blk.0.attn_q_norm.weight is not part"),
        ({"fields": {"rope.scaling.type": "longrope"}}, "llama.rope.scaling.type = 'longrope'"),
        ({"fields": {"rope.scaling.type": "yarn"}}, "RoPE parameter factor must be a number above 0"),
        (
            {"fields": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 0.5}},
            "llama.rope.scaling.yarn_ext_factor = 0.5",
        ),
        ({"extra": "rope_freqs"}, r"tensor rope_freqs.weight is \(64,\), expected \(8,\)"),
        ({"fields": {"expert_count": 8}}, "expert_count = 8"),
        ({"fields": {"rope.dimension_count": 8}}, "rope.dimension_count = 8"),
        ({"fields": {"block_count": 0}}, "block_count must be a number above 0"),
        ({"types": {"blk.0.attn_v": Q.IQ4_NL}}, "tensor blk.0.attn_v.weight has type IQ4_NL"),
    ],
)
def test_an_unknown_model_is_refused_by_name(tmp_path: Path, how, message: str):
    """The error names the field, the tensor or the type."""
    path = write_gguf(tmp_path / "model.gguf", **how)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path):
    """A download that stopped early never becomes a model, wherever it stopped."""
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    for length in [0, 3, 4, 20, 60, 200, 400, 700, 1000, len(whole) // 2, len(whole) - 33]:
        cut = tmp_path / f"cut-{length}.gguf"
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="cut-"):
            open_checkpoint(cut)


def test_other_files_are_refused(tmp_path: Path):
    """Not GGUF, or of an unknown version."""
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    for name, content in (("text", b"hello, this is no model"), ("version", whole[:4] + b"\x09" + whole[5:])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=r"not a GGUF file|version 9"):
            open_checkpoint(tmp_path / name)


def test_digest_follows_the_content(tmp_path: Path):
    """Same bytes, same digest; other weights or other metadata, another."""
    paths = [
        write_gguf(tmp_path / "a.gguf"),
        write_gguf(tmp_path / "b.gguf"),
        write_gguf(tmp_path / "c.gguf", seed=1),
        write_gguf(tmp_path / "d.gguf", fields={"rope.freq_base": 500000.0}),
    ]
    digests = [open_checkpoint(path).spec.digest for path in paths]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    assert torch.equal(*(load_weights(open_checkpoint(path)).embed for path in paths[:2]))
