"""What a grammar costs: to compile, and a mask. `python -m tests.mask_cost [SCHEMAS]`, one core, the default model.

Random schemas are followed at random, as the sampler follows them: a mask, a token that it allows, and on.
"""

import sys
import time
from collections.abc import Iterator
from random import Random

import numpy as np

from shared.grammar import Vocabulary, json_grammar
from shared.model_path import resolve
from shared.tokenizer import load_tokenizer
from tests.schemas import random_schema

MAX_TOKENS = 200


def follow(vocabulary: Vocabulary, grammar: str, rng: Random) -> Iterator[tuple[str, float]]:
    """What was done, and the seconds that it took."""
    began = time.perf_counter()
    matcher = vocabulary.matcher(grammar)
    yield "compile", time.perf_counter() - began
    row = np.zeros(-(-vocabulary.vocab_size // 32), np.uint32)
    for _ in range(MAX_TOKENS):
        began = time.perf_counter()
        matcher.fill(row)
        yield "mask", time.perf_counter() - began
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token = int(allowed[rng.randrange(len(allowed))])
        began = time.perf_counter()
        matcher.advance([token])
        yield "advance", time.perf_counter() - began
        if matcher.is_over:
            return


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    began = time.perf_counter()
    vocabulary = Vocabulary(load_tokenizer(resolve("")))
    print(f"vocabulary of {vocabulary.vocab_size} tokens: {time.perf_counter() - began:.2f} s, once")
    took: dict[str, list[float]] = {}
    for seed in range(count):
        for name, seconds in follow(vocabulary, json_grammar(random_schema(seed)), Random(seed)):
            took.setdefault(name, []).append(seconds * 1e6)
    for name, values in took.items():
        median, p99, worst = np.percentile(values, [50, 99, 100])
        print(f"{name:8s} {len(values):6d} times, us: median {median:.0f}, p99 {p99:.0f}, worst {worst:.0f}")


if __name__ == "__main__":
    main()
