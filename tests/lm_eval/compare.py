"""Scores `facts.yaml` through a stack and with `transformers`, and prints both: by hand, as lm-eval is no dependency.

    pip install "lm_eval[api,hf]==0.4.13"
    python -m tests.lm_eval.compare

Both see the same weights: the shipped GGUF file, in float32 here and dequantised by `gguf` there. Where every choice's
log-likelihood agrees to 1e-2 and the same choices are greedy, the exit code is 0.
"""

import sys
from typing import Any

from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

from shared.model_path import resolve
from tests.flow.stack import Stack
from tests.oracle.gguf_oracle import load_gguf

TASK = "baton_facts"
TOLERANCE = 1e-2


def score(model: Any, **args: Any) -> dict[str, Any]:
    tasks = TaskManager(include_path="tests/lm_eval", include_defaults=False)
    return simple_evaluate(model=model, tasks=[TASK], task_manager=tasks, log_samples=True, bootstrap_iters=0, **args)


def likelihoods(result: dict[str, Any]) -> list[tuple[float, bool]]:
    """Of every choice of every question, in order, with whether it is what greedy decoding says."""
    samples = sorted(result["samples"][TASK], key=lambda sample: sample["doc_id"])
    return [(float(value), bool(greedy)) for sample in samples for value, greedy in sample["filtered_resps"]]


def main() -> int:
    model, tokenizer = load_gguf(resolve(""))
    tokenizer.bos_token, tokenizer.eos_token = "<|im_start|>", "<|im_end|>"  # lm-eval asks; neither is ever added
    with Stack(prefill=int("--handoff" in sys.argv), decode=1) as stack:
        url = f"{stack.url}/v1/completions"
        args = {"model": "default", "base_url": url, "tokenizer_backend": "huggingface", "num_concurrent": 4}
        served = score("local-completions", model_args=args | {"tokenizer": saved(tokenizer), "max_retries": 1})
    own = score(HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1))
    pairs = list(zip(likelihoods(served), likelihoods(own), strict=True))
    worst = max(abs(a - b) for (a, _), (b, _) in pairs)
    greedy = sum(a != b for (_, a), (_, b) in pairs)
    for name, result in (("baton", served), ("transformers", own)):
        print(name, {key: value for key, value in result["results"][TASK].items() if key.startswith("acc")})
    print(f"{len(pairs)} choices, worst difference of log-likelihoods {worst:.2e}, {greedy} differ in being greedy")
    return int(worst > TOLERANCE or greedy > 0)


def saved(tokenizer: Any) -> str:
    """A folder with the tokenizer, for lm-eval to load by name."""
    import tempfile

    folder = tempfile.mkdtemp(prefix="baton-tokenizer-")
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
