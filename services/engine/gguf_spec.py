"""GGUF metadata as a model's spec, by the names and defaults of llama.cpp. Values that this build cannot honour are
refused by name."""

import math
from typing import Any

import torch

from services.engine.gguf_file import GgufFile
from services.engine.gguf_quants import dequantise
from services.engine.model_spec import LayerSpec, ModelSpec, Rope
from services.engine.rope import divided, make_rope
from shared.errors import ModelError
from shared.model_path import model_name

GEMMAS = ("gemma2", "gemma3")
ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3", *GEMMAS)
ROPE_FACTORS = "rope_freqs.weight"
_NO_ROPE_EVERY = 4  # SmolLM3's layers that do not rotate, not in the metadata
_LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}  # layers of those that scale queries by hidden / heads


def read_spec(file: GgufFile, digest: str) -> ModelSpec:
    """:raises ModelError: an unknown architecture, or a field that this build cannot honour."""
    return _Metadata(file).spec(digest)


class _Metadata:
    def __init__(self, file: GgufFile) -> None:
        self._file, self._values = file, file.metadata
        self._kind = str(self._get("general.architecture"))
        if self._kind not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise self._error(f"architecture {self._kind!r} is not known to this build ({known} are)")
        self._refuse("expert_count", 0)

    def spec(self, digest: str) -> ModelSpec:
        hidden, heads = self._number("embedding_length"), self._number("attention.head_count")
        head_dim = self._number("attention.key_length", hidden // heads)
        self._refuse("attention.value_length", head_dim)
        self._refuse("rope.dimension_count", head_dim)
        if "token_embd.weight" not in self._file.tensors:
            raise self._error("tensor token_embd.weight is missing")
        gemma, layers = self._kind in GEMMAS, self._layers()
        caps = (50.0, 30.0) if self._kind == "gemma2" else (0.0, 0.0)
        scaled_by = hidden // heads if _LARGEST_GEMMAS.get(self._kind) == len(layers) else head_dim
        return ModelSpec(
            name=model_name(self._file.path),
            layers=layers,
            hidden_size=hidden,
            intermediate_size=self._number("feed_forward_length"),
            num_heads=heads,
            num_kv_heads=self._number("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=self._file.tensors["token_embd.weight"].shape[0],
            ropes=self._ropes(head_dim),
            rms_eps=self._real("attention.layer_norm_rms_epsilon"),
            max_context=self._number("context_length"),
            tied_embeddings="output.weight" not in self._file.tensors,
            digest=digest,
            attention_scale=scaled_by**-0.5,
            activation="gelu" if gemma else "silu",
            qkv_bias=self._kind == "qwen2",
            qk_norm=self._kind in ("qwen3", "gemma3"),
            post_norms=gemma,
            embed_scale=hidden**0.5 if gemma else 1.0,
            attention_softcap=self._real("attn_logit_softcapping", caps[0]) if gemma else 0.0,
            logit_softcap=self._real("final_logit_softcapping", caps[1]) if gemma else 0.0,
        )

    def _layers(self) -> tuple[LayerSpec, ...]:
        count = self._number("block_count")
        if self._kind == "smollm3":
            return tuple(LayerSpec(rope=0 if (i + 1) % _NO_ROPE_EVERY else -1) for i in range(count))
        window = self._values.get(self._key("attention.sliding_window"), 4096 if self._kind == "gemma2" else 0)
        if not window:
            return (LayerSpec(),) * count
        local = 1 if self._kind == "gemma3" else 0
        window = self._number("attention.sliding_window", 4096)
        return tuple(LayerSpec(window, local) if slides else LayerSpec() for slides in self._sliding(count))

    def _sliding(self, count: int) -> list[bool]:
        """Which layers have a window: as the file lists them, or all but every n-th."""
        key = "attention.sliding_window_pattern"
        pattern = self._values.get(self._key(key))
        if isinstance(pattern, list):
            if len(pattern) < count:
                raise self._error(f"{self._key(key)} has {len(pattern)} entries for {count} layers")
            return [bool(entry) for entry in pattern[:count]]
        every = self._number(key, {"gemma2": 2, "gemma3": 6}.get(self._kind, count + 1))
        return [bool((i + 1) % every) for i in range(count)]

    def _ropes(self, head_dim: int) -> tuple[Rope, ...]:
        theta = self._real("rope.freq_base", 10_000.0)
        factor = self._real("rope.scaling.factor", self._real("rope.scale_linear", 0.0))
        kind = self._values.get(self._key("rope.scaling.type"), "linear")
        if kind == "linear" and factor in (0.0, 1.0):
            kind = "none"
        params = {"rope_theta": theta, "factor": factor} | (self._yarn(factor) if kind == "yarn" else {})
        if kind not in ("none", "linear", "yarn"):
            raise self._error(f"{self._key('rope.scaling.type')} = {kind!r} is not known to this build")
        at = str(self._file.path)
        rope = make_rope("default" if kind == "none" else kind, head_dim, params, at=at)
        if ROPE_FACTORS in self._file.tensors:
            rope = divided(rope, self._rope_factors(head_dim))
        if self._kind != "gemma3":
            return (rope,)
        local = self._real("rope.freq_base_swa", 10_000.0)
        return rope, make_rope("default", head_dim, {"rope_theta": local}, at=at)

    def _yarn(self, factor: float) -> dict[str, Any]:
        """llama.cpp's temperature is the paper's, times a factor of its own."""
        self._refuse("rope.scaling.yarn_ext_factor", 1.0)
        self._refuse("rope.scaling.yarn_log_multiplier", 0.0)
        usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        given = self._real("rope.scaling.yarn_attn_factor", usual)
        if given != 1.0 and not math.isclose(given, usual, rel_tol=1e-5):
            raise self._error(f"{self._key('rope.scaling.yarn_attn_factor')} = {given!r} is not known to this build")
        return {
            "original_max_position_embeddings": self._number(
                "rope.scaling.original_context_length", self._number("context_length")
            ),
            "attention_factor": usual * self._real("rope.scaling.attn_factor", 1.0),
            "beta_fast": self._real("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self._real("rope.scaling.yarn_beta_slow", 1.0),
        }

    def _rope_factors(self, head_dim: int) -> torch.Tensor:
        tensor = self._file.tensors[ROPE_FACTORS]
        if tensor.shape != (head_dim // 2,):
            raise self._error(f"tensor {ROPE_FACTORS} is {tensor.shape}, expected {(head_dim // 2,)}")
        return torch.from_numpy(dequantise(self._file.read(tensor), tensor.type_id, tensor.shape).copy())

    def _key(self, field: str) -> str:
        return f"{self._kind}.{field}"

    def _get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise self._error(f"field {key} is missing")
        return value

    def _number(self, field: str, default: int | None = None) -> int:
        value = self._get(self._key(field), default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._error(f"field {self._key(field)} must be a number above 0, not {value!r}")
        return value

    def _real(self, field: str, default: float | None = None) -> float:
        value = self._get(self._key(field), default)
        if not isinstance(value, float):
            raise self._error(f"field {self._key(field)} must be a real number, not {value!r}")
        return value

    def _refuse(self, field: str, allowed: Any) -> None:
        """The field, if it is there, has the one value that this build can honour."""
        value = self._values.get(self._key(field), allowed)
        if value != allowed:
            raise self._error(f"{self._key(field)} = {value!r} is not known to this build")

    def _error(self, reason: str) -> ModelError:
        return ModelError(f"model {self._file.path}: {reason}")
