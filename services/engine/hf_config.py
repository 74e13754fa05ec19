"""Hugging Face's `config.json` as a model's spec. Values that this build cannot honour are refused by name."""

import json
from pathlib import Path
from typing import Any

from services.engine.model_spec import LayerSpec, ModelSpec, Rope
from services.engine.rope import make_rope
from shared.errors import ModelError
from shared.model_path import model_name

GEMMAS = ("gemma2", "gemma3_text")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", *GEMMAS)
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
_HEAD_DIMS = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}  # where the file has none
FULL, SLIDING = "full_attention", "sliding_attention"


def read_json(path: Path) -> dict[str, Any]:
    """:raises ModelError: unreadable, or no JSON object."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ModelError(f"model file {path}: {exc}") from None
    if not isinstance(value, dict):
        raise ModelError(f"model file {path}: not a JSON object")
    return value


def read_spec(folder: Path, digest: str) -> ModelSpec:
    """:raises ModelError: an unknown architecture, or a field that this build cannot honour."""
    return _Config(folder, read_json(folder / "config.json")).spec(digest)


class _Config:
    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        self._folder, self._values = folder, values
        self._kind = str(values.get("model_type"))
        if self._kind not in FAMILIES:
            raise self._error(f"architecture {self._kind!r} is not known to this build ({', '.join(FAMILIES)} are)")
        for key in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
            if values.get(key):
                raise self._error(f"{key} = {values[key]!r} is not known to this build")

    def spec(self, digest: str) -> ModelSpec:
        hidden, heads = self._number("hidden_size"), self._number("num_attention_heads")
        head_dim = self._number("head_dim", _HEAD_DIMS.get(self._kind, hidden // heads))
        gemma = self._kind in GEMMAS
        return ModelSpec(
            name=model_name(self._folder),
            layers=self._layers(),
            hidden_size=hidden,
            intermediate_size=self._number("intermediate_size"),
            num_heads=heads,
            num_kv_heads=self._number("num_key_value_heads", heads),
            head_dim=head_dim,
            vocab_size=self._number("vocab_size"),
            ropes=self._ropes(head_dim),
            rms_eps=self._real("rms_norm_eps", 1e-6),
            max_context=self._max_context(),
            tied_embeddings=bool(self._values.get("tie_word_embeddings", gemma)),
            digest=digest,
            attention_scale=self._real("query_pre_attn_scalar", 256.0) ** -0.5 if gemma else head_dim**-0.5,
            activation=self._activation(),
            qkv_bias=self._kind == "qwen2",
            qk_norm=self._kind in ("qwen3", "gemma3_text"),
            post_norms=gemma,
            embed_scale=hidden**0.5 if gemma else 1.0,
            attention_softcap=self._real("attn_logit_softcapping", 0.0) if gemma else 0.0,
            logit_softcap=self._real("final_logit_softcapping", 0.0) if gemma else 0.0,
        )

    def _activation(self) -> Any:
        key = "hidden_activation" if self._kind in GEMMAS and self._values.get("hidden_activation") else "hidden_act"
        name = self._values.get(key) or ("gelu_pytorch_tanh" if self._kind in GEMMAS else "silu")
        if name not in _ACTIVATIONS:
            raise self._error(f"{key} = {name!r} is not known to this build ({', '.join(_ACTIVATIONS)} are)")
        return _ACTIVATIONS[name]

    def _layers(self) -> tuple[LayerSpec, ...]:
        count = self._number("num_hidden_layers")
        windows = self._windows(count)
        if self._kind == "smollm3":
            every = self._number("no_rope_layer_interval", 4)
            rotates = self._list("no_rope_layers", count) or [int((i + 1) % every != 0) for i in range(count)]
            return tuple(LayerSpec(window, 0 if on else -1) for window, on in zip(windows, rotates, strict=True))
        local = 1 if self._kind == "gemma3_text" else 0
        return tuple(LayerSpec(window, local if window else 0) for window in windows)

    def _windows(self, count: int) -> list[int]:
        """Each layer's window, 0 where it sees everything."""
        if self._kind == "llama":
            return [0] * count
        if self._kind in ("qwen2", "qwen3", "smollm3") and not self._values.get("use_sliding_window", False):
            return [0] * count
        default = 4096 if self._kind in GEMMAS else None
        size = self._values.get("sliding_window", default)
        if size is None:
            return [0] * count
        window = self._number("sliding_window", default)
        return [window if kind == SLIDING else 0 for kind in self._layer_types(count)]

    def _layer_types(self, count: int) -> list[str]:
        if self._kind == "mistral":  # every layer alike
            return [SLIDING] * count
        kinds = self._list("layer_types", count) or self._default_types(count)
        for kind in kinds:
            if kind not in (FULL, SLIDING):
                raise self._error(f"layer type {kind!r} is not known to this build ({FULL}, {SLIDING} are)")
        return kinds

    def _default_types(self, count: int) -> list[str]:
        if self._kind in ("qwen2", "qwen3"):
            first = int(self._values.get("max_window_layers", 28))
            return [SLIDING if i >= first else FULL for i in range(count)]
        if self._kind == "smollm3":
            every = self._number("no_rope_layer_interval", 4)
            rotates = self._list("no_rope_layers", count) or [(i + 1) % every for i in range(count)]
            return [FULL if on else SLIDING for on in rotates]
        every = 2 if self._kind == "gemma2" else self._number("sliding_window_pattern", 6)
        return [SLIDING if (i + 1) % every else FULL for i in range(count)]

    def _ropes(self, head_dim: int) -> tuple[Rope, ...]:
        """From the newer `rope_parameters`, one for all or one per type of layer, or the older fields."""
        newer = self._values.get("rope_parameters")
        params = newer or self._values.get("rope_scaling") or {}
        if not isinstance(params, dict):
            raise self._error(f"rope_parameters must be a table, not {params!r}")
        theta = self._values.get("rope_theta") or (1e6 if self._kind == "gemma3_text" else 1e4)
        local_theta = self._values.get("rope_local_base_freq") or 1e4
        if newer and isinstance(newer.get(FULL), dict):
            params, local = newer[FULL], newer.get(SLIDING) or {}
        else:
            local = {}
        ropes = [self._rope(head_dim, {"rope_theta": theta} | params)]
        if self._kind == "gemma3_text":
            ropes.append(self._rope(head_dim, {"rope_theta": local_theta} | local))
        elif isinstance(params, dict) and local and local != params:
            raise self._error("rope_parameters that differ between the types of layers are not known to this build")
        return tuple(ropes)

    def _rope(self, head_dim: int, params: dict[str, Any]) -> Rope:
        kind = params.get("rope_type") or params.get("type") or "default"
        context = {"original_max_position_embeddings": self._number("max_position_embeddings", 2048)}
        return make_rope(str(kind), head_dim, context | params, at=str(self._folder))

    def _max_context(self) -> int:
        """YaRN stretches what the field says, which stays that of the first training."""
        context = self._number("max_position_embeddings", 2048)
        params = self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}
        if params.get("rope_type", params.get("type")) != "yarn":
            return context
        original = params.get("original_max_position_embeddings") or context
        return max(context, int(params.get("factor", 1) * original))

    def _list(self, key: str, count: int) -> list[Any] | None:
        value = self._values.get(key)
        if value is not None and (not isinstance(value, list) or len(value) != count):
            raise self._error(f"config.json field {key} must be a list of {count}, one per layer")
        return value

    def _real(self, key: str, default: float) -> float:
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise self._error(f"config.json field {key} must be a number, not {value!r}")
        return float(value)

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._error(f"config.json field {key} must be a number above 0, not {value!r}")
        return value

    def _error(self, reason: str) -> ModelError:
        return ModelError(f"model {self._folder}: {reason}")
