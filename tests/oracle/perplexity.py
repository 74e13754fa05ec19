"""Perplexity of the quick paths beside the exact one, on English that every Python ships (`pydoc_data`).

    python -m tests.oracle.perplexity [--tokens N] [--model PATH] [WEIGHTS[/KV] ...]

Each case is a type of weights and one of the KV cache, as in the configuration: `auto/int8`. Windows of 512 tokens;
each token but the window's first is predicted from those before it in the window. All cases see the same windows, so
ratios are far less noisy than the numbers.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import msgspec
import numpy as np
import torch

from services.engine.load import ModelPlan, open_model
from services.engine.runner import view_pool
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
    model, spec, num_blocks = plan.load(), plan.spec, WINDOW // BLOCK
    pool = view_pool(bytearray(num_blocks * plan.kv.block_bytes), num_blocks, spec, BLOCK, plan.kv_dtype)
    table = tuple(BlockId(i) for i in range(num_blocks))
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


def compare(num_tokens: int, cases: Sequence[str] = ("float32", "auto"), model: str = "") -> list[float]:
    """The model's perplexity in each case."""
    token_ids = text_tokens(resolve(model), num_tokens)
    plans = [open_model(config, EngineConfig(block_size=BLOCK)) for config in (_config(case, model) for case in cases)]
    return [math.exp(negative_log_likelihood(plan, token_ids)) for plan in plans]


def _config(case: str, model: str) -> ModelConfig:
    weights, _, kv = case.partition("/")
    return msgspec.convert({"path": model, "dtype": weights, "kv_dtype": kv or "auto"}, ModelConfig)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--model", default="")
    parser.add_argument("cases", nargs="*", default=["float32", "auto"])
    wanted = parser.parse_args()
    figures = compare(wanted.tokens, wanted.cases, wanted.model)
    print(f"{wanted.tokens} tokens:")
    for case, figure in zip(wanted.cases, figures, strict=True):
        print(f"  {case:18} {figure:8.4f}  {100 * (figure / figures[0] - 1):+.2f} %")


if __name__ == "__main__":
    main()
