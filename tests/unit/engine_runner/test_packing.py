"""Packed weights: what goes where, and the file that workers share."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.packing import Format
from services.engine import pack_file
from services.engine.checkpoint import open_checkpoint
from services.engine.model import PlainModel
from services.engine.model_spec import WeightDtype
from services.engine.pack_file import load_packed, pack_path
from services.engine.packed_model import PackedModel
from services.engine.packing_plan import ALIGNMENT, fill, plan_pack
from services.engine.step_batch import build_batch
from services.engine.types import PlanItem, SampleSpec, SeqId
from services.engine.weights import load_weights
from shared.ids import BlockId
from shared.messages import SamplingParams
from tests.models import make_tiny_llama
from tests.unit.engine_runner.gguf_maker import Q, write_gguf

BLOCK = 8


@pytest.fixture(autouse=True)
def keep_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_file, "MIN_FILE_BYTES", 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "tiny")


def logits_of(model, spec, tokens: tuple[int, ...]) -> torch.Tensor:
    """Of the last row, over a fresh pool."""
    num_blocks = len(tokens) // BLOCK + 1
    pool = torch.full((num_blocks, spec.num_kv_heads, spec.num_layers, 2, BLOCK, spec.head_dim), torch.nan)
    sample = SampleSpec(SamplingParams(max_tokens=1), 0, len(tokens))
    item = PlanItem(SeqId("s"), tokens, 0, tuple(BlockId(i) for i in range(num_blocks)), sample)
    with torch.inference_mode():
        return model.forward(build_batch([item], BLOCK), pool)[0].clone()


MIXED = {
    "token_embd": Q.Q8_0,
    "blk.0.attn_q": Q.Q4_1,
    "blk.0.attn_k": Q.Q4_0,
    "blk.0.attn_v": Q.Q8_0,
    "blk.0.ffn_gate": Q.Q4_0,
    "blk.0.ffn_up": Q.Q8_0,
    "blk.0.ffn_down": Q.F16,
}
ALL_Q4_0 = {f"blk.0.{part}": Q.Q4_0 for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up")}


@pytest.mark.parametrize("simd", [True, False], ids=["simd", "scalar"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("types", [MIXED, ALL_Q4_0, {}], ids=["mixed", "4 bits", "floats"])
def test_the_packed_model_computes_what_the_plain_one_does(tmp_path: Path, types, dtype: WeightDtype, simd: bool):
    """Whatever the tensors' types: float32 exactly, 8-bit activations nearly."""
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", types=types))
    plain = PlainModel(checkpoint.spec, load_weights(checkpoint))
    plan = plan_pack(checkpoint, dtype)
    packed = PackedModel(checkpoint.spec, plan, load_packed(checkpoint, dtype, str(tmp_path)), simd=simd)
    tokens = tuple(range(3, 37))
    want, got = (logits_of(model, checkpoint.spec, tokens) for model in (plain, packed))
    if dtype == "float32":
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    else:
        assert 0 < (got - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize("simd", [True, False], ids=["simd", "scalar"])
def test_int8_weights_have_one_scale_per_output(tmp_path: Path, simd: bool):
    """Whatever the file's types: near the plain model, not as near as groups of 32, and all in 8 bits."""
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", types=MIXED))
    plain = PlainModel(checkpoint.spec, load_weights(checkpoint))
    plan = plan_pack(checkpoint, "int8")
    assert {entry.fmt for entry in plan.entries} == {None, Format.Q8}
    packed = PackedModel(checkpoint.spec, plan, load_packed(checkpoint, "int8", str(tmp_path)), simd=simd)
    tokens = tuple(range(3, 37))
    want, got = (logits_of(model, checkpoint.spec, tokens) for model in (plain, packed))
    assert 0 < (got - want).norm() < 0.05 * want.norm()


def test_k_quants_are_packed_in_four_or_eight_bits(tmp_path: Path):
    """Rows of 256: Q4_K stays in 4 bits, Q5_K and Q6_K become 8; the model computes what their floats say."""
    kinds = {"blk.0.attn_q": 12, "blk.0.attn_output": 13, "blk.0.ffn_gate": 12, "blk.0.ffn_up": 14, "token_embd": 14}
    path = write_gguf(tmp_path / "model.gguf", hidden=256, k_quants=kinds)
    checkpoint = open_checkpoint(path)
    plan = plan_pack(checkpoint, "auto")
    formats = {entry.name.removeprefix("layers.0."): entry.fmt for entry in plan.entries}
    assert (formats["qkv.0"], formats["o"], formats["gate_up"], formats["embed"]) == (Format.Q4, *[Format.Q8] * 3)
    plain = PlainModel(checkpoint.spec, load_weights(checkpoint))
    exact = PackedModel(checkpoint.spec, plan_pack(checkpoint, "float32"), load_packed(checkpoint, "float32"))
    packed = PackedModel(checkpoint.spec, plan, load_packed(checkpoint, "auto", str(tmp_path)))
    tokens = tuple(range(3, 37))
    want, same, got = (logits_of(model, checkpoint.spec, tokens) for model in (plain, exact, packed))
    torch.testing.assert_close(same, want, rtol=1e-4, atol=1e-3)
    assert 0 < (got - want).norm() < 0.05 * want.norm()


def test_entries_are_aligned_and_do_not_overlap(path: Path):
    """Every byte of the buffer belongs to one entry, or is padding."""
    plan = plan_pack(open_checkpoint(path), "auto")
    end = 0
    for entry in plan.entries:
        assert entry.offset % ALIGNMENT == 0
        assert end <= entry.offset < end + ALIGNMENT
        end = entry.offset + entry.num_bytes
    assert end <= plan.num_bytes < end + ALIGNMENT


def test_the_file_is_written_once_and_read_ever_after(path: Path, tmp_path: Path):
    """The second load maps the file, which nobody touched since, and sees the same bytes; it cannot write."""
    checkpoint, folder = open_checkpoint(path), tmp_path / "cache"
    first = load_packed(checkpoint, "auto", str(folder))
    file = pack_path(checkpoint, "auto", str(folder))
    assert [file] == list(folder.iterdir())
    written = file.stat()
    second = load_packed(checkpoint, "auto", str(folder))
    assert file.stat().st_mtime_ns == written.st_mtime_ns
    assert file.stat().st_ino == written.st_ino
    np.testing.assert_array_equal(first, second)
    fresh = np.zeros(len(first), np.uint8)
    fill(checkpoint, plan_pack(checkpoint, "auto"), fresh)
    np.testing.assert_array_equal(first, fresh)
    assert not second.flags.writeable


@pytest.mark.parametrize("damage", ["cut", "header", "empty"])
def test_a_damaged_file_is_replaced(path: Path, tmp_path: Path, damage: str):
    """Cut short, of another plan or version, or empty: it is packed anew."""
    checkpoint, folder = open_checkpoint(path), str(tmp_path / "cache")
    want = load_packed(checkpoint, "auto", folder).copy()
    file = pack_path(checkpoint, "auto", folder)
    whole = file.read_bytes()
    file.write_bytes({"cut": whole[:-1], "header": b"X" + whole[1:], "empty": b""}[damage])
    np.testing.assert_array_equal(load_packed(checkpoint, "auto", folder), want)
    assert file.read_bytes() == whole


def test_without_a_writable_folder_it_is_packed_in_memory(path: Path, tmp_path: Path):
    """A file where the folder should be stands for a disk that refuses."""
    (tmp_path / "cache").write_text("in the way")
    got = load_packed(open_checkpoint(path), "auto", str(tmp_path / "cache" / "below"))
    np.testing.assert_array_equal(got, load_packed(open_checkpoint(path), "auto", str(tmp_path / "good")))


def test_a_failed_write_leaves_nothing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The disk is full at the last moment: the weights are there all the same, and no file."""

    def full(*_):
        raise OSError(28, "No space left on device")

    checkpoint = open_checkpoint(path)
    want = load_packed(checkpoint, "auto", str(tmp_path / "good"))
    monkeypatch.setattr(Path, "replace", full)
    np.testing.assert_array_equal(load_packed(checkpoint, "auto", str(tmp_path / "cache")), want)
    assert list((tmp_path / "cache").iterdir()) == []


def test_float32_and_small_models_are_not_kept(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Their packing is no slower than a file's."""
    load_packed(open_checkpoint(path), "float32", str(tmp_path / "cache"))
    monkeypatch.setattr(pack_file, "MIN_FILE_BYTES", 16 << 20)
    load_packed(open_checkpoint(path), "auto", str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_a_token_outside_the_vocabulary_is_refused(path: Path):
    """By name, before anything is computed."""
    checkpoint = open_checkpoint(path)
    model = PackedModel(
        checkpoint.spec, plan_pack(checkpoint, "auto"), load_packed(checkpoint, "auto", str(path / "cache"))
    )
    spec = checkpoint.spec
    with pytest.raises(IndexError, match="not in the vocabulary"):
        logits_of(model, spec, (1, spec.vocab_size))
