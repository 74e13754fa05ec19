"""RoPE's frequencies and their scalings, from plain parameters. float32 throughout, as the models were trained."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from services.engine.model_spec import Rope
from shared.errors import ModelError

KINDS = ("default", "linear", "llama3", "yarn")


def make_rope(kind: str, head_dim: int, params: Mapping[str, Any], *, at: str) -> Rope:
    """
    :param kind: how the frequencies are stretched for long contexts; one of `KINDS`.
    :param params: `rope_theta` and what the kind needs, by the names that Hugging Face's `rope_parameters` has.
    :param at: the model, for messages.
    :raises ModelError: an unknown kind, or a parameter that is missing or no number.
    """
    if kind not in KINDS:
        raise ModelError(f"model {at}: RoPE scaling {kind!r} is not known to this build ({', '.join(KINDS)} are)")
    if params.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"model {at}: RoPE of a part of each head is not known to this build")
    number = _Numbers(params, at)
    base = plain_frequencies(head_dim, number("rope_theta"))
    if kind == "linear":
        return _rope(base / number("factor"))
    if kind == "llama3":
        return _rope(_llama3(base, number))
    if kind == "yarn":
        return _yarn(base, head_dim, number)
    return _rope(base)


def plain_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """[head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / theta**exponents


def divided(rope: Rope, factors: torch.Tensor) -> Rope:
    """With each frequency divided by its factor: how GGUF files keep llama3's scaling."""
    return _rope(torch.tensor(rope.inverse_frequencies) / factors, rope.scale)


class _Numbers:
    """Parameters that must be numbers above 0."""

    def __init__(self, params: Mapping[str, Any], at: str) -> None:
        self._params, self._at = params, at

    def __call__(self, key: str, default: float | None = None) -> float:
        value = self._params.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or not value > 0 or not math.isfinite(value):
            raise ModelError(f"model {self._at}: RoPE parameter {key} must be a number above 0, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._params.get(key, default))

    def has(self, key: str) -> bool:
        return self._params.get(key) is not None


def _rope(frequencies: torch.Tensor, scale: float = 1.0) -> Rope:
    return Rope(tuple(frequencies.float().tolist()), scale)


def _llama3(base: torch.Tensor, number: _Numbers) -> torch.Tensor:
    """Llama 3.1's: long waves are stretched by the factor, short ones stay, those between are blended."""
    factor, context = number("factor"), number("original_max_position_embeddings")
    low, high = number("low_freq_factor", 1.0), number("high_freq_factor", 4.0)
    wavelengths = 2 * math.pi / base
    blend = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    mixed = (1 - blend) * base / factor + blend * base
    stretched = torch.where(wavelengths > context / low, base / factor, mixed)
    return torch.where(wavelengths < context / high, base, stretched)


def _yarn(base: torch.Tensor, head_dim: int, number: _Numbers) -> Rope:
    """YaRN (Peng et al. 2023): a ramp over the dims between stretched and unchanged frequencies, and a temperature."""
    factor, context, theta = number("factor"), number("original_max_position_embeddings"), number("rope_theta")

    def dim_of(num_rotations: float) -> float:
        return head_dim * math.log(context / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(number("beta_fast", 32.0)), dim_of(number("beta_slow", 1.0))
    if number.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return _rope(base / factor * ramp + base * (1 - ramp), _yarn_scale(factor, number))


def _yarn_scale(factor: float, number: _Numbers) -> float:
    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if number.has("attention_factor"):
        return number("attention_factor")
    if number.has("mscale") and number.has("mscale_all_dim"):
        return temperature(number("mscale")) / temperature(number("mscale_all_dim"))
    return temperature(1.0)
