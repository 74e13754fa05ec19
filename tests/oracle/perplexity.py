"""Perplexity of the default path beside the exact one, on English that every Python ships (`pydoc_data`).

    python -m tests.oracle.perplexity [num_tokens]

Windows of 512 tokens; each token but the window's first is predicted from those before it in the window. Both paths
see the same windows, so the ratio is far less noisy than the numbers.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch

from services.engine.load import ModelPlan, open_model
from services.engine.model_spec import WeightDtype
from services.engine.step_batch import build_batch
from services.engine.types import PlanItem, SeqId
from shared.config import EngineConfig, ModelConfig
from shared.ids import BlockId
from shared.model_path import resolve
from shared.tokenizer import load_tokenizer

WINDOW, CHUNK, BLOCK = 512, 128, 16


def text_tokens(path: Path, count: int) -> list[int]:
    """The first tokens of the language reference's topics, in order of their names."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    token_ids = load_tokenizer(path).encode(text, add_special_tokens=False)
    assert len(token_ids) >= count, f"the text has {len(token_ids)} tokens only"
    return token_ids[:count]


def negative_log_likelihood(plan: ModelPlan, token_ids: list[int]) -> float:
    """Mean over all predicted tokens, in nats."""
    model, spec = plan.load(), plan.spec
    dtype = getattr(torch, plan.kv_dtype)
    shape = (WINDOW // BLOCK, spec.num_kv_heads, spec.num_layers, 2, BLOCK, spec.head_dim)
    pool, table = torch.zeros(shape, dtype=dtype), tuple(BlockId(i) for i in range(WINDOW // BLOCK))
    total = count = 0
    for first in range(0, len(token_ids), WINDOW):
        window = token_ids[first : first + WINDOW]
        for start in range(0, len(window), CHUNK):
            rows = window[start : start + CHUNK]
            batch = build_batch([PlanItem(SeqId("s"), tuple(rows), start, table, None)], BLOCK)
            logits = model.forward(replace(batch, logit_rows=np.arange(len(rows), dtype=np.int32)), pool, 2)
            targets = torch.tensor(window[start + 1 : start + len(rows) + 1])
            total += float(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="sum"))
            count += len(targets)
    return total / count


def compare(num_tokens: int) -> tuple[float, float]:
    """Perplexity of the default model: exact, and on the default path."""
    token_ids = text_tokens(resolve(""), num_tokens)
    dtypes: tuple[WeightDtype, WeightDtype] = ("float32", "auto")
    plans = [open_model(ModelConfig(dtype=dtype), EngineConfig()) for dtype in dtypes]
    exact, quick = (math.exp(negative_log_likelihood(plan, token_ids)) for plan in plans)
    return exact, quick


if __name__ == "__main__":
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 20_480
    exact, quick = compare(wanted)
    print(f"{wanted} tokens: float32 {exact:.4f}, default {quick:.4f} ({100 * (quick / exact - 1):+.2f} %)")
