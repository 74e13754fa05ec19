"""What the benchmark says that a whole step has to do, against numbers told by hand for the default model."""

import pytest

from services.engine.bench_steps import digest, step_cost, step_plan
from services.engine.load import ModelPlan, open_model
from shared.config import EngineConfig, ModelConfig

LAYERS, HIDDEN, WIDTH, VOCAB = 30, 576, 1536, 49152
LAYER_WEIGHTS = HIDDEN * (HIDDEN + 2 * 192 + HIDDEN + 3 * WIDTH)
NORMS = 4 * HIDDEN * (2 * LAYERS + 1)


@pytest.fixture(scope="module")
def plan() -> ModelPlan:
    return open_model(ModelConfig(dtype="int8"), EngineConfig())


def test_a_decode_step_reads_all_weights_once_and_each_context(plan: ModelPlan):
    """8-bit weights, a half-precision scale for 32 of them; 192 numbers a layer of key and of value, 2 bytes each."""
    num_bytes, work = step_cost(plan, ((1, 100), (1, 50)))
    weights = LAYERS * LAYER_WEIGHTS + VOCAB * HIDDEN
    assert num_bytes == pytest.approx(
        weights * 34 / 32 + NORMS + 150 * LAYERS * 2 * 192 * 2, rel=1e-4
    )  # but for padding
    assert work == {"int16": 2 * 2 * weights, "float32": (101 + 51) * LAYERS * 9 * 64 * 4}


def test_a_chunk_computes_one_row_of_the_head(plan: ModelPlan):
    """Its rows see the context and each other, causally: 5, 6 and 7 tokens."""
    _, work = step_cost(plan, ((3, 4),))
    assert work == {
        "int16": 2 * (3 * LAYERS * LAYER_WEIGHTS + VOCAB * HIDDEN),
        "float32": (5 + 6 + 7) * LAYERS * 9 * 64 * 4,
    }


def test_seqs_of_a_step_share_no_block():
    """As many as cover their rows and what is before them."""
    first, second = step_plan(((1, 32), (1, 31)), block_size=16).items
    assert (first.block_table, second.block_table) == ((0, 1, 2), (3, 4))
    assert (first.start, len(first.token_ids)) == (32, 1)


def test_a_digest_reads_its_block():
    """And nothing else; each call takes the next ones."""
    case = digest(1000, cold_bytes=2500)
    assert (case.num_bytes, dict(case.work), case.call()) == (1000, {}, 3)
