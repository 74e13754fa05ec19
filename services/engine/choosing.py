"""From a step's logits to the tokens and log-probabilities that its items asked for."""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from services.engine.grammars import Grammars
from services.engine.sampler import AllowedTokens, Choice, sample, token_logprobs
from services.engine.types import PlanItem, SampleSpec, StepResult
from shared.ids import BlockDigest
from shared.messages import TokenLogprobs


def choose(
    items: Sequence[PlanItem],
    logits: torch.Tensor,
    digests: tuple[BlockDigest, ...],
    num_threads: int,
    grammars: Grammars | None = None,
) -> StepResult:
    """The step's result.

    :param grammars: None only where no item has a grammar.
    :param logits: of `StepBatch.logit_rows`; may be changed.
    :raises ModelError: the logits are not finite.
    """
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    if any(item.targets for item in items):
        prompt_logprobs, logits = _tell_targets(items, logits, num_threads)
    specs = [item.sample for item in items if item.sample is not None]
    allowed, broken = _masks(items, grammars)
    if any(spec.num_choices > 1 for spec in specs):
        rows = [row for row, spec in enumerate(specs) for _ in range(spec.num_choices)]
        logits = logits[rows]
        allowed = None if allowed is None else allowed[rows]  # choices part only after this token
        specs = [one for spec in specs for one in _choices(spec)]
    choice = sample(logits, specs, num_threads, allowed) if specs else Choice([])
    sampled, logprobs = _share(items, choice.tokens), _share(items, choice.logprobs, told=True)
    if broken:
        sampled = tuple(() if i in broken else tokens for i, tokens in enumerate(sampled))
    return StepResult(sampled, digests, logprobs, prompt_logprobs, tuple(broken.items()))


def _masks(items: Sequence[PlanItem], grammars: Grammars | None) -> tuple[AllowedTokens | None, dict[int, str]]:
    """Allowed tokens, a row for each item that samples; and the items whose grammar fails, with the reason."""
    wanted = [(i, item.seq_id, item.sample) for i, item in enumerate(items) if item.sample is not None]
    if not any(spec.sampling.grammar for _, _, spec in wanted):
        return None, {}
    assert grammars is not None, "this runner was made without grammars"
    allowed, broken = grammars.masks([(seq_id, spec) for _, seq_id, spec in wanted])
    return allowed, {wanted[row][0]: reason for row, reason in broken.items()}


def _choices(spec: SampleSpec) -> list[SampleSpec]:
    if spec.num_choices == 1:
        return [spec]
    return [msgspec.structs.replace(spec, choice=spec.choice + i, num_choices=1) for i in range(spec.num_choices)]


def _share(items: Sequence[PlanItem], values: Sequence[object], *, told: bool = False) -> tuple[tuple, ...]:
    """The items' parts of what was chosen, in order. `told`: of logprobs, which may be nobody's, or None."""
    if told and not values:
        return ()
    parts: list[tuple] = []
    at = 0
    for item in items:
        count = item.sample.num_choices if item.sample is not None else 0
        part = tuple(values[at : at + count])
        parts.append(() if None in part else part)
        at += count
    return tuple(parts)


def _tell_targets(
    items: Sequence[PlanItem], logits: torch.Tensor, num_threads: int
) -> tuple[tuple[tuple[TokenLogprobs, ...], ...], torch.Tensor]:
    """Log-probabilities of the items' targets, and the rows of `logits` that remain: those to sample from."""
    told_rows: list[int] = []
    sample_rows: list[int] = []
    at = 0
    for item in items:
        told_rows += range(at, at + len(item.targets))
        at += len(item.targets)
        if item.sample is not None:
            sample_rows.append(at)
            at += 1
    targets = np.array([token for item in items for token in item.targets], np.int64)
    num_top = [item.num_top for item in items for _ in item.targets]
    told = iter(token_logprobs(logits.numpy(), np.array(told_rows, np.int64), targets, num_top, num_threads))
    return tuple(tuple(next(told) for _ in item.targets) for item in items), logits[sample_rows]
