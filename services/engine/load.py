"""From configuration to a model in memory, and to the size of its pool."""

from dataclasses import dataclass

from kernels.decoder import is_available
from services.engine.checkpoint import Checkpoint, open_checkpoint
from services.engine.memory import Budget, Pool, plan_pool
from services.engine.model import Model, PlainModel
from services.engine.model_spec import KVDtype, KVSpec, ModelSpec, WeightDtype, kv_spec, pool_fingerprint
from services.engine.pack_file import is_kept
from services.engine.packed_model import load_packed_model
from services.engine.packing_plan import plan_pack
from services.engine.weights import load_weights
from shared.config import EngineConfig, ModelConfig
from shared.errors import ConfigError
from shared.model_path import resolve


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What is known of a model before its weights are read: enough to size the pool and to register."""

    checkpoint: Checkpoint
    spec: ModelSpec
    kv: KVSpec
    max_model_len: int  # tokens of a seq, at most
    dtype: WeightDtype
    kv_dtype: KVDtype
    cache_dir: str

    @property
    def fingerprint(self) -> str:
        """Workers may exchange blocks exactly if this is equal."""
        return pool_fingerprint(self.spec, self.kv, self.dtype)

    @property
    def weight_bytes(self) -> int:
        """Of the weights in memory."""
        return plan_pack(self.checkpoint, self.dtype).num_bytes if is_available() else self.spec.weight_bytes

    @property
    def shares_weights(self) -> bool:
        """Whether the workers of a host map one file with the weights."""
        return is_available() and is_kept(self.dtype, self.weight_bytes)

    def pool(self, engine: EngineConfig, free_bytes: int) -> Pool:
        """This worker's pool: as configured, or what its part of the memory holds.

        :raises ConfigError: not even one seq fits.
        """
        block_bytes = self.kv.block_bytes
        if engine.num_blocks:
            return Pool(engine.num_blocks, engine.park_bytes // block_bytes)
        weights = self.weight_bytes
        workspace = self.spec.workspace_bytes(engine.max_num_batched_tokens, engine.max_num_seqs)
        budget = Budget(
            free_bytes=free_bytes,
            fraction=engine.memory_fraction,
            limit=engine.memory_limit,
            share=engine.memory_share,
        )
        return plan_pool(
            budget,
            shared_bytes=weights if self.shares_weights else 0,
            own_bytes=workspace if self.shares_weights else weights + workspace,
            park_bytes=engine.park_bytes,
            block_bytes=block_bytes,
            block_size=engine.block_size,
            max_model_len=self.max_model_len,
        )

    def load(self) -> Model:
        """Read the weights: packed ones where the C++ kernels were built, else float32 for torch.

        :raises ModelError: damaged, or of unknown types.
        """
        if is_available():
            return load_packed_model(self.checkpoint, self.dtype, self.cache_dir)
        return PlainModel(self.spec, load_weights(self.checkpoint))


def open_model(config: ModelConfig, engine: EngineConfig) -> ModelPlan:
    """Find the model and read its header.

    :raises ModelError: there is none, or this build cannot run it.
    :raises ConfigError: `max_model_len` is beyond what the model was made for.
    """
    checkpoint = open_checkpoint(resolve(config.path))
    spec = checkpoint.spec
    if config.max_model_len > spec.max_context:
        raise ConfigError(
            f"configuration: model.max_model_len {config.max_model_len} is beyond the model's {spec.max_context}"
        )
    dtype = config.dtype if is_available() else "float32"
    kv_dtype = config.kv_dtype
    if kv_dtype == "auto":
        kv_dtype = "float32" if dtype == "float32" else "float16"
    return ModelPlan(
        checkpoint=checkpoint,
        spec=spec,
        kv=kv_spec(spec, engine.block_size, kv_dtype),
        max_model_len=config.max_model_len or spec.max_context,
        dtype=dtype,
        kv_dtype=kv_dtype,
        cache_dir=config.cache_dir,
    )
