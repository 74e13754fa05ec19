"""The oracle: `transformers` in fp32 on the same weights. A GGUF file is read and dequantised by the `gguf` package
(see gguf_oracle.py), not by this project's code.

Used by the engine's tests and by the flow tests: what a client got is compared with `greedy`.
"""

import inspect
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

TIE = 2e-3
"""A differing token is excused where the oracle's two best logits are nearer than this."""


@dataclass(frozen=True)
class Greedy:
    """What the oracle would say, and by how much each token beat the second best."""

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]


class Oracle:
    """A model of `transformers`, with its own tokenizer."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model.eval(), tokenizer
        self._said: dict[tuple[int, ...], Greedy] = {}  # by prompt, as far as anybody has asked

    def encode(self, text: str) -> list[int]:
        """Token ids of the text as it stands, without added start or end tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's own template, ready for an answer."""
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.encode(text)

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Teacher-forced logits of every position, float32 [num_tokens, vocab]."""
        return self._model(torch.tensor([token_ids])).logits[0]

    def greedy(self, token_ids: list[int], num_tokens: int) -> Greedy:
        """The next `num_tokens` best tokens; end tokens do not end it. Computed once, and kept."""
        prompt = tuple(token_ids)
        known = self._said.get(prompt)
        if known is None or len(known.token_ids) < num_tokens:
            known = self._said[prompt] = self._greedy(token_ids, num_tokens)
        return Greedy(known.token_ids[:num_tokens], known.margins[:num_tokens])

    @torch.inference_mode()
    def _greedy(self, token_ids: list[int], num_tokens: int) -> Greedy:
        chosen: list[int] = []
        margins: list[float] = []
        step, cache = torch.tensor([token_ids]), self._new_cache()
        for _ in range(num_tokens):
            answer = self._model(step, use_cache=True, logits_to_keep=1, **cache)
            best = answer.logits[0, -1].topk(2)
            chosen.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            step = torch.tensor([[chosen[-1]]])
        return Greedy(tuple(chosen), tuple(margins))

    def _new_cache(self) -> dict[str, Any]:
        """An empty KV cache, filled in place, under the name that this version of `transformers` knows it by."""
        import transformers

        known = inspect.signature(type(self._model).forward).parameters
        return {"cache" if "cache" in known else "past_key_values": transformers.DynamicCache()}


def first_difference(want: Greedy, got: tuple[int, ...]) -> int | None:
    """Index of the first token that differs without excuse; None if there is none.

    After an excused token the two texts have parted, so nothing further is compared.
    """
    assert len(got) == len(want.token_ids), f"{len(got)} tokens, not {len(want.token_ids)}"
    for i, (a, b) in enumerate(zip(want.token_ids, got, strict=True)):
        if a != b:
            return None if want.margins[i] < TIE else i
    return None


@lru_cache(maxsize=2)
def load_oracle(path: Path) -> Oracle:
    """The oracle for a GGUF file or a safetensors folder. Kept: loading takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's deprecations
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if path.is_file():
            from tests.oracle.gguf_oracle import load_gguf

            return Oracle(*load_gguf(path))
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        return Oracle(transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tokenizer)
