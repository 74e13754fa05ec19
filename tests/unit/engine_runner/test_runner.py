"""The runner on a tiny model: batches, copies, digests, and the region it writes to."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

from services.engine.calibration import calibrate
from services.engine.load import open_model
from services.engine.model import Model
from services.engine.model_spec import LayerKV, kv_spec, pool_fingerprint
from services.engine.runner import ModelRunner
from services.engine.step_batch import StepBatch, build_batch
from services.engine.types import BayId, PlanItem, SampleSpec, SeqId, StepPlan
from shared.clock import SystemClock
from shared.config import EngineConfig, ModelConfig
from shared.cost import CostModel, StepShape
from shared.hashing import block_digest
from shared.ids import BlockId
from shared.messages import SamplingParams
from tests.models import make_tiny_llama

BLOCK = 8
PROMPT = tuple(range(40, 60))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = make_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return open_model(ModelConfig(path=str(folder)), EngineConfig()).load()


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(i) for i in ids)


def make(model: Model, num_blocks: int = 12, fill: int = 0, **kwargs) -> tuple[ModelRunner, bytearray]:
    block_bytes = kv_spec(model.spec, BLOCK, kwargs.get("kv_dtype", "float32")).block_bytes
    region = bytearray([fill]) * (num_blocks * block_bytes)
    return ModelRunner(model, memoryview(region), num_blocks, block_size=BLOCK, **kwargs), region


def item(tokens, start: int, table, *, temperature: float | None = 0.0, position: int | None = None) -> PlanItem:
    """Samples unless `temperature` is None."""
    at = start + len(tokens) if position is None else position
    spec = SampleSpec(SamplingParams(max_tokens=1, temperature=temperature or 0.0, seed=3), 0, at)
    return PlanItem(SeqId("s"), tuple(tokens), start, table, None if temperature is None else spec)


def step(*items: PlanItem, **kwargs) -> StepPlan:
    return StepPlan(1, items, **kwargs)


def test_rows_are_laid_out_seq_after_seq():
    """Positions, slots, tables, and the rows whose logits are wanted."""
    batch = build_batch(
        [
            item([7, 8, 9], 3, blocks(5, 2), temperature=None),
            item([4], 9, blocks(1, 0, 3)),
            item([6, 6], 0, blocks(4)),
        ],
        4,
    )
    assert batch.token_ids.tolist() == [7, 8, 9, 4, 6, 6]
    assert batch.positions.tolist() == [3, 4, 5, 9, 0, 1]
    assert batch.slot_mapping.tolist() == [23, 8, 9, 13, 16, 17]
    assert batch.block_tables.tolist() == [[5, 2, -1], [1, 0, 3], [4, -1, -1]]
    assert batch.query_start.tolist() == [0, 3, 4, 6]
    assert batch.context_lens.tolist() == [6, 10, 2]
    assert batch.logit_rows.tolist() == [3, 5]


def test_decode_rows_alone_are_laid_out_as_beside_a_chunk():
    """They take a shorter way, to the same arrays: tables of all lengths, tokens that are not known yet, no sample."""
    rng = np.random.default_rng(5)
    for count in (1, 2, 7, 16):
        items = []
        for i in range(count):
            table = rng.integers(0, 99, rng.integers(1, 9)).tolist()
            row = item([-1 if i % 3 == 2 else int(rng.integers(99))], int(rng.integers(len(table) * 4)), tuple(table))
            items.append(msgspec.structs.replace(row, seq_id=SeqId(f"s{i}"), sample=row.sample if i % 4 else None))
        pending = {SeqId(f"s{i}"): 1000 + i for i in range(count - 1)}
        alone = build_batch(items, 4, pending)
        beside = build_batch([item([5, 6], 0, (BlockId(0),), temperature=None), *items], 4, pending)
        width = max(len(one.block_table) for one in items)
        assert alone.token_ids.tolist() == beside.token_ids[2:].tolist()
        assert alone.positions.tolist() == beside.positions[2:].tolist()
        assert alone.slot_mapping.tolist() == beside.slot_mapping[2:].tolist()
        assert alone.block_tables.tolist() == beside.block_tables[1:, :width].tolist()
        assert alone.query_start.tolist() == (beside.query_start[1:] - 2).tolist()
        assert alone.context_lens.tolist() == beside.context_lens[1:].tolist()
        assert alone.logit_rows.tolist() == (beside.logit_rows - 2).tolist()
        ours, theirs = ([getattr(b, name).dtype for name in StepBatch.__slots__] for b in (alone, beside))
        assert ours == theirs


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1]])
def test_a_table_that_is_too_short_is_the_planners_bug(tokens: list[int]):
    """It asserts before anything is computed."""
    with pytest.raises(AssertionError, match="does not cover"):
        build_batch([item(tokens, 9 - len(tokens), blocks(0, 1))], 4)


def test_tokens_come_back_aligned_with_the_plan(model: Model):
    """Only items that asked for a token get one, and the same as alone."""
    runner, _ = make(model)
    alone = runner.run(step(item(PROMPT, 0, blocks(0, 1, 2)))).sampled[0]
    result = runner.run(step(item(PROMPT[:5], 0, blocks(3), temperature=None), item(PROMPT, 0, blocks(4, 5, 6))))
    assert result.sampled == ((), alone)
    assert len(alone) == 1


def test_a_step_of_chunks_alone_samples_nothing(model: Model):
    """No prompt is complete in it; the next step goes on from its KV."""
    runner, _ = make(model)
    want = runner.run(step(item(PROMPT, 0, blocks(0, 1, 2)))).sampled
    assert runner.run(step(item(PROMPT[:12], 0, blocks(4, 5), temperature=None))).sampled == ((),)
    assert runner.run(step(item(PROMPT[12:], 12, blocks(4, 5, 6)))).sampled == want


def test_a_plan_without_rows_copies_and_digests(model: Model):
    """Copies happen before digests; other blocks keep their bytes."""
    runner, region = make(model)
    runner.run(step(item(PROMPT, 0, blocks(0, 1, 2))))
    size = runner.block_bytes
    before = bytes(region)
    result = runner.run(StepPlan(2, (), copies=((BlockId(1), BlockId(7)),), digest_blocks=blocks(7, 1, 0)))
    assert result.sampled == ()
    assert region[7 * size : 8 * size] == before[size : 2 * size]
    assert bytes(region[: 7 * size]) + bytes(region[8 * size :]) == before[: 7 * size] + before[8 * size :]
    assert result.digests[0] == result.digests[1] == xxhash.xxh3_128_digest(before[size : 2 * size])
    assert result.digests[2] != result.digests[0]


def test_a_copied_block_is_as_good_as_the_first(model: Model):
    """After copy on write the fork decodes what the original would, and does not touch it."""
    runner, region = make(model)
    first = runner.run(step(item(PROMPT, 0, blocks(0, 1, 2)))).sampled[0]
    want = runner.run(step(item(first, 20, blocks(0, 1, 2)))).sampled[0]
    runner.run(step(item(PROMPT, 0, blocks(0, 1, 2))))
    shared = bytes(region[: 3 * runner.block_bytes])
    fork = step(item(first, 20, blocks(0, 1, 9)), copies=((BlockId(2), BlockId(9)),))
    assert runner.run(fork).sampled[0] == want
    assert bytes(region[: 3 * runner.block_bytes]) == shared


def test_stale_bytes_in_fresh_blocks_are_never_read(model: Model):
    """A pool full of NaN gives the same tokens as a zeroed one, and only the seq's slots change."""
    clean, _ = make(model)
    dirty, region = make(model, fill=0xFF)
    plan = step(item(PROMPT, 0, blocks(8, 1, 5)))
    assert dirty.run(plan).sampled == clean.run(plan).sampled
    size = dirty.block_bytes
    for block in set(range(12)) - {8, 1, 5}:
        assert region[block * size : (block + 1) * size] == b"\xff" * size


def test_blocks_moved_to_another_pool_go_on_with_the_same_tokens(model: Model):
    """The handoff, reduced to a copy of bytes: decode elsewhere, at other block ids, gives the same bits."""
    source, source_region = make(model)
    reader, reader_region = make(model, fill=0xFF)
    first = source.run(step(item(PROMPT, 0, blocks(0, 1, 2)), digest_blocks=blocks(0, 1, 2)))
    size = source.block_bytes
    for there, here in ((0, 7), (1, 3), (2, 9)):
        reader_region[here * size : (here + 1) * size] = source_region[there * size : (there + 1) * size]
    decode = first.sampled[0]
    want = source.run(step(item(decode, 20, blocks(0, 1, 2)), digest_blocks=blocks(2)))
    got = reader.run(step(item(decode, 20, blocks(7, 3, 9)), digest_blocks=blocks(9)))
    assert got == want


def test_a_region_of_the_wrong_size_is_refused(model: Model):
    """The pool must be exactly num_blocks blocks, and writable."""
    size = kv_spec(model.spec, BLOCK, "float32").block_bytes
    with pytest.raises(AssertionError, match="exactly"):
        ModelRunner(model, memoryview(bytearray(size * 3 - 1)), 3, block_size=BLOCK)
    with pytest.raises(AssertionError, match="writable"):
        ModelRunner(model, memoryview(bytes(size * 3)), 3, block_size=BLOCK)


def test_calibration_fits_any_pool(model: Model):
    """Even one of a single block; afterwards the runner works as before, and costs can be told where there was room to
    measure them."""
    for num_blocks, known in ((1, False), (24, True)):
        runner, _ = make(model, num_blocks, num_bays=4)
        costs = CostModel()
        calibrate(runner, costs, SystemClock(), model.spec.max_context - 1)
        assert runner.run(step(item([5], 0, blocks(0)))).sampled[0]
        assert (costs.step_s(StepShape(num_tokens=100, token_context=5000)) is not None) == known
        assert (costs.step_s(StepShape(num_seqs=4, kv_tokens=400)) is not None) == known
        assert costs.transfer.predict(1e6) is not None


def test_parked_blocks_come_back_bit_for_bit(model: Model):
    """Copied out, overwritten and restored elsewhere, blocks have the digests that they had; others are not touched."""
    runner, region = make(model, 12, num_bays=3)
    runner.run(step(item(list(range(3, 3 + 2 * BLOCK + 3)), 0, blocks(1, 4, 7)), digest_blocks=blocks(1, 4, 7)))
    size = runner.block_bytes
    before = [block_digest(region[b * size : (b + 1) * size]) for b in range(12)]
    bays = [BayId(2), BayId(0), BayId(1)]
    runner.move(list(zip(blocks(1, 4, 7), bays, strict=True)), ())
    for block in (1, 4, 7):
        region[block * size : (block + 1) * size] = b"\xee" * size
    runner.move((), list(zip(blocks(9, 1, 3), bays, strict=True)))
    after = [block_digest(region[b * size : (b + 1) * size]) for b in range(12)]
    assert [after[9], after[1], after[3]] == [before[1], before[4], before[7]]
    assert [after[b] for b in (0, 2, 5, 6, 8, 10, 11)] == [before[b] for b in (0, 2, 5, 6, 8, 10, 11)]


def test_close_lets_go_of_the_region(model: Model):
    """The owner of the memory can free it."""
    runner, region = make(model)
    runner.close()
    region.clear()


def test_fingerprint_tells_pools_apart(model: Model):
    """Model, weights' type, KV type and block size are in it."""
    seen = {
        pool_fingerprint(model.spec, kv_spec(model.spec, size, kv_dtype), dtype)
        for size in (8, 16)
        for kv_dtype in ("float32", "float16", "bfloat16", "int8", "fp8")
        for dtype in ("auto", "float32")
    }
    assert len(seen) == 20
    assert all(text.startswith(model.spec.digest) for text in seen)


def test_a_block_has_room_for_scales():
    """Scales are counted per token, head, and key or value."""
    assert LayerKV(3, 64, "float16").token_bytes == 2 * 3 * 128
    assert LayerKV(3, 64, "int8").token_bytes == LayerKV(3, 64, "fp8").token_bytes == 2 * 3 * (64 + 4)


@pytest.mark.parametrize(("kv_dtype", "row_bytes"), [("float16", 32), ("bfloat16", 32), ("int8", 20), ("fp8", 20)])
def test_narrow_pools_are_smaller(model: Model, kv_dtype, row_bytes: int):
    """By what a row of 16 numbers, and its scale, take; and a block can be copied."""
    runner, region = make(model, kv_dtype=kv_dtype)
    full, _ = make(model)
    assert runner.block_bytes * 64 == full.block_bytes * row_bytes
    runner.run(step(item(PROMPT, 0, blocks(0, 1, 2)), copies=((BlockId(0), BlockId(5)),)))
    runner.run(step(copies=((BlockId(0), BlockId(5)),)))
    size = runner.block_bytes
    assert region[:size] == region[5 * size : 6 * size] != region[size : 2 * size]


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_sixteen_bits_keep_a_clear_token(model: Model, kv_dtype):
    """The greedy token is that of the float32 pool."""
    runner, _ = make(model, kv_dtype=kv_dtype)
    full, _ = make(model)
    plan = step(item(PROMPT, 0, blocks(0, 1, 2)))
    assert runner.run(plan).sampled == full.run(plan).sampled


def test_sampling_does_not_depend_on_the_batch(model: Model):
    """A sampled row beside greedy ones draws what it draws alone."""
    runner, _ = make(model)
    hot = item(PROMPT, 0, blocks(0, 1, 2), temperature=1.5)
    alone = runner.run(step(hot)).sampled[0]
    mixed = runner.run(step(item(PROMPT[:9], 0, blocks(3, 4)), hot, item(PROMPT[:3], 0, blocks(5))))
    assert mixed.sampled[1] == alone
