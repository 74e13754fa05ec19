"""A seq's logits and KV have the same bits whatever happens around it. One test per thing that may happen."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.load import open_model
from services.engine.model import Model
from services.engine.model_spec import KVDtype, kv_spec
from services.engine.runner import view_pool
from services.engine.step_batch import build_batch
from services.engine.types import PlanItem, SampleSpec, SeqId
from shared.config import EngineConfig, ModelConfig
from shared.hashing import block_digest
from shared.ids import BlockDigest, BlockId
from shared.messages import SamplingParams
from tests.models import make_tiny_llama
from tests.oracle.families import FAMILIES, make_model, save
from tests.unit.engine_runner.gguf_maker import Q, write_gguf

BLOCK, NUM_BLOCKS = 8, 96
NUM_TOKENS = 45
GREEDY = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), 0, 0)
Tokens = tuple[int, ...]


CASES = [
    ("8 bits", "float16"),
    ("4 bits", "float16"),
    ("float32", "float32"),
    ("8 bits", "bfloat16"),
    ("8 bits", "int8"),
    ("4 bits", "fp8"),
    ("gemma3", "int8"),
    ("qwen2 sliding", "float16"),
]
"""Weights, or a family with windows, norms and biases, and the pool's type."""


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def case(request: pytest.FixtureRequest) -> tuple[str, KVDtype]:
    return request.param


@pytest.fixture(scope="module")
def model(case: tuple[str, KVDtype], tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("model")
    if case[0] in FAMILIES:
        path = save(make_model(case[0]), folder)
    elif case[0] == "4 bits":
        parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        path = write_gguf(folder / "model.gguf", types={f"blk.0.{part}": Q.Q4_1 for part in parts})
    else:
        path = make_tiny_llama(folder / "tiny")
    dtype = "float32" if case[0] == "float32" else "auto"
    return open_model(ModelConfig(path=str(path), dtype=dtype), EngineConfig()).load()


class World:
    """A pool and a model over it."""

    def __init__(self, model: Model, kv_dtype: KVDtype) -> None:
        self.model, self.spec = model, kv_spec(model.spec, BLOCK, kv_dtype)
        self.region = bytearray(b"\xff" * NUM_BLOCKS * self.spec.block_bytes)  # NaN, in every type or its scale
        self.pool = view_pool(self.region, NUM_BLOCKS, model.spec, BLOCK, kv_dtype)

    def run(self, *rows: tuple[Tokens, int, tuple[int, ...]], threads: int = 1) -> list[torch.Tensor]:
        """One step of (tokens, start, blocks) per seq: the logits of each seq's rows."""
        items = [
            PlanItem(SeqId("s"), tokens, start, tuple(BlockId(b) for b in table), GREEDY)
            for tokens, start, table in rows
        ]
        batch = build_batch(items, BLOCK)
        everything = np.arange(len(batch.token_ids), dtype=np.int32)
        logits = self.model.forward(replace(batch, logit_rows=everything), self.pool, threads).clone()
        return list(logits.split([len(tokens) for tokens, _, _ in rows]))

    def digests(self, table: tuple[int, ...], num_full: int) -> list[BlockDigest]:
        size = self.spec.block_bytes
        return [block_digest(memoryview(self.region)[b * size : (b + 1) * size]) for b in table[:num_full]]


@dataclass(frozen=True)
class Truth:
    """The seq run alone in one step."""

    tokens: Tokens
    logits: torch.Tensor
    digests: list[BlockDigest]


def tokens_of(seed: int, count: int, vocab: int) -> Tokens:
    return tuple(np.random.default_rng(seed).integers(0, vocab, count).tolist())


@pytest.fixture(scope="module")
def truth(model: Model, case: tuple[str, KVDtype]) -> Truth:
    world, table = World(model, case[1]), tuple(range(6))
    tokens = tokens_of(0, NUM_TOKENS, min(40, model.spec.vocab_size))
    (logits,) = world.run((tokens, 0, table))
    return Truth(tokens, logits, world.digests(table, NUM_TOKENS // BLOCK))


def scattered(seed: int, count: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).permutation(NUM_BLOCKS)[:count].tolist())


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_chunks_of_any_size_beside_any_neighbours(model: Model, case: tuple[str, KVDtype], truth: Truth, data):
    """Up to 16 seqs a step, prompts and decode rows, 1 to 3 threads, other block ids: not a bit differs."""
    world = World(model, case[1])
    blocks = list(scattered(data.draw(st.integers(0, 9)), NUM_BLOCKS))
    mine = tuple(blocks.pop() for _ in range(6))
    got, done = [], 0
    while done < NUM_TOKENS:
        size = data.draw(st.integers(1, NUM_TOKENS - done))
        others = []
        for i in range(data.draw(st.sampled_from([0, 1, 3, 15]))):
            length = data.draw(st.integers(1, 20))
            others.append((tokens_of(i, length, 40), 0, tuple(blocks[3 * i : 3 * i + 3])))
        at = data.draw(st.integers(0, len(others)))
        rows = [*others[:at], (truth.tokens[done : done + size], done, mine), *others[at:]]
        got.append(world.run(*rows, threads=data.draw(st.integers(1, 3)))[at])
        done += size
    assert torch.equal(torch.cat(got), truth.logits)
    assert world.digests(mine, NUM_TOKENS // BLOCK) == truth.digests


def test_one_token_at_a_time_in_a_batch_of_sixteen(model: Model, case: tuple[str, KVDtype], truth: Truth):
    """Decode rows have the bits of the prompt's rows."""
    world, blocks = World(model, case[1]), scattered(1, NUM_BLOCKS)
    others = [(tokens_of(100 + i, NUM_TOKENS, 40), blocks[6 + 6 * i : 12 + 6 * i]) for i in range(15)]
    got = []
    for t in range(NUM_TOKENS):
        rows = [(tokens[t : t + 1], t, table) for tokens, table in others]
        got.append(world.run(*rows[:7], (truth.tokens[t : t + 1], t, blocks[:6]), *rows[7:])[7])
    assert torch.equal(torch.cat(got), truth.logits)
    assert world.digests(blocks[:6], NUM_TOKENS // BLOCK) == truth.digests


def test_after_preemption(model: Model, case: tuple[str, KVDtype], truth: Truth):
    """Its blocks were taken by another seq; recomputed in one go, from other blocks, beside a neighbour."""
    world, first, second = World(model, case[1]), (0, 1, 2, 3), (9, 3, 2, 8, 1, 7)
    world.run((truth.tokens[:20], 0, first))
    for t in range(20, 26):
        world.run((truth.tokens[t : t + 1], t, first))
    world.run((tokens_of(5, 30, 40), 0, first))
    got = world.run((truth.tokens[:26], 0, second), (tokens_of(6, 9, 40), 0, (20, 21)))[0]
    rest = [world.run((truth.tokens[t : t + 1], t, second))[0] for t in range(26, NUM_TOKENS)]
    assert torch.equal(torch.cat([got, *rest]), truth.logits)
    assert world.digests(second, NUM_TOKENS // BLOCK) == truth.digests


@pytest.mark.parametrize("num_cached", [1, 2, 5])
def test_after_a_prefix_hit(model: Model, case: tuple[str, KVDtype], truth: Truth, num_cached: int):
    """The first blocks were filled by another seq with the same start."""
    world, owner = World(model, case[1]), (3, 1, 4, 15, 9, 2)
    cached = num_cached * BLOCK
    world.run((truth.tokens[:cached] + tokens_of(7, 3, 40), 0, owner))
    table = (*owner[:num_cached], *range(40, 46 - num_cached))
    (got,) = world.run((truth.tokens[cached:], cached, table))
    assert torch.equal(got, truth.logits[cached:])
    assert world.digests(table, NUM_TOKENS // BLOCK) == truth.digests


def test_after_a_handoff(model: Model, case: tuple[str, KVDtype], truth: Truth):
    """Blocks copied into another worker's pool, at other ids, go on with the same bits."""
    source, reader = World(model, case[1]), World(model, case[1])
    here, there = (5, 0, 7, 2), (11, 30, 1, 6, 90, 14)
    source.run((truth.tokens[:30], 0, here))
    size = source.spec.block_bytes
    for a, b in zip(here, there, strict=False):
        reader.region[b * size : (b + 1) * size] = source.region[a * size : (a + 1) * size]
    got = [reader.run((truth.tokens[t : t + 1], t, there), threads=2)[0] for t in range(30, NUM_TOKENS)]
    assert torch.equal(torch.cat(got), truth.logits[30:])
    assert reader.digests(there, NUM_TOKENS // BLOCK) == truth.digests
