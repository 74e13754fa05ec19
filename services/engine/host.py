"""An engine ready to run, from a worker's settings: model, pool, planner, runner, pinned to the worker's cores."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import structlog

from services.engine.block_pool import BlockPool
from services.engine.calibration import calibrate, worth_parking
from services.engine.engine import Engine
from services.engine.grammars import Grammars
from services.engine.load import ModelPlan, open_model
from services.engine.parking import Parking
from services.engine.planner import Planner, PlannerLimits
from services.engine.runner import ModelRunner, configure_threads
from shared.addresses import worker_name
from shared.clock import Clock
from shared.config import EngineConfig, Settings
from shared.cost import CostModel
from shared.errors import ConfigError
from shared.grammar import Vocabulary
from shared.host_memory import free_memory_bytes
from shared.ids import Incarnation, WorkerId
from shared.messages import PROTOCOL_VERSION, Endpoint, Registration, Role
from shared.model_path import model_name, resolve
from shared.offload import Lane, ThreadOffload
from shared.tokenizer import load_tokenizer

log = structlog.get_logger(__name__)
MAX_PLACES_PER_SEQ = 4
"""Places in grammars kept between steps: of the seqs in the batch, and of some that were preempted."""
ENGINE_COUNTERS = (
    "preemptions",
    "prompt_tokens_computed",
    "prompt_tokens_cached",
    "output_tokens",
    "steps",
    "run_s",
    "step_s",
    "failed_steps",
    "tokens_recomputed",
    "preemptions_parked",
    "preemptions_recomputed",
    "stalls",
    "steps_ahead",
)
"""Fields of `Engine.stats` that only grow."""


def parse_cores(text: str) -> set[int]:
    """`0-2,5` -> {0, 1, 2, 5}; empty text -> empty set.

    :raises ConfigError: anything else.
    """
    cores: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) < int(first):
            raise ConfigError(f"configuration: worker.cores {text!r} is not a list like 0-2,5")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def pin(cores: set[int]) -> None:
    """Keep this process, and the threads it starts from now on, on these cores.

    :raises ConfigError: the machine has none of them.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as exc:
        raise ConfigError(f"configuration: worker.cores {sorted(cores)}: {exc.strerror}") from None


@dataclass(frozen=True, slots=True)
class EngineHost:
    """What a worker service knows of its engine before the weights are read."""

    settings: Settings
    model: ModelPlan
    num_blocks: int
    num_bays: int  # blocks that can be parked in host memory
    max_model_len: int

    @classmethod
    def open(cls, settings: Settings, *, parks: bool = True) -> "EngineHost":
        """Pin the process, read the model's header, size the pool.

        :param parks: whether seqs can be preempted here.
        :raises ConfigError: cores, memory or lengths that cannot be.
        :raises ModelError: the model is missing or unknown.
        """
        if not parks:
            settings = msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, park_bytes=0))
        pin(parse_cores(settings.worker.cores))
        configure_threads(settings.worker.num_threads)
        plan = open_model(settings.model, settings.engine)
        pool = plan.pool(settings.engine, settings.engine.free_bytes or free_memory_bytes())
        max_model_len = min(plan.max_model_len, pool.num_blocks * settings.engine.block_size)
        return cls(settings, plan, pool.num_blocks, pool.num_bays, max_model_len)

    @property
    def block_bytes(self) -> int:
        return self.model.kv.block_bytes

    async def start(self, buffer: memoryview, lane: Lane, clock: Clock) -> Engine:
        """Read the weights and warm up; seconds.

        :param buffer: the pool's memory, writable, `num_blocks * block_bytes` long.
        :raises ModelError: the weights are damaged or of an unknown type.
        """
        started = clock.now()
        cfg = self.settings.engine
        costs = CostModel()
        grammars = Grammars(self._vocabulary, ThreadOffload(1), MAX_PLACES_PER_SEQ * cfg.max_num_seqs)
        runner = await lane.run(self._load, buffer, costs, clock, grammars)
        pool = BlockPool(self.num_blocks, cfg.block_size)
        parking = Parking(self.num_bays, partial(worth_parking, costs, self.block_bytes))
        engine = Engine(Planner(pool, self._limits(cfg), parking), runner, lane, clock, costs, grammars)
        log.info(
            "engine.ready",
            model=self.model.spec.name,
            dtype=self.model.dtype,
            kv_dtype=self.model.kv_dtype,
            **self.facts(),
            kv_bytes_per_token=self.model.kv.token_bytes,
            seconds=round(clock.now() - started, 2),
        )
        return engine

    def _limits(self, cfg: EngineConfig) -> PlannerLimits:
        return PlannerLimits(
            max_num_seqs=cfg.max_num_seqs,
            max_num_batched_tokens=cfg.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            prefill_batch_tokens=cfg.prefill_batch_tokens,
            prefix_caching=cfg.prefix_caching,
            look_ahead=cfg.look_ahead,
        )

    def facts(self) -> dict[str, object]:
        """What the worker has room for: for its log, its probe and `baton up`."""
        num_tokens = self.num_blocks * self.settings.engine.block_size
        return {
            "weights_mib": self.model.weight_bytes >> 20,
            "weights_shared": self.model.shares_weights,
            "blocks": self.num_blocks,
            "kv_mib": self.num_blocks * self.block_bytes >> 20,
            "park_mib": self.num_bays * self.block_bytes >> 20,
            "context_tokens": num_tokens,
            "seqs_at_2k": num_tokens // 2048,
            "max_model_len": self.max_model_len,
        }

    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(load_tokenizer(resolve(self.settings.model.path)), self.model.spec.vocab_size)

    def _load(self, buffer: memoryview, costs: CostModel, clock: Clock, grammars: Grammars) -> ModelRunner:
        cfg = self.settings
        runner = ModelRunner(
            self.model.load(),
            buffer,
            self.num_blocks,
            block_size=cfg.engine.block_size,
            kv_dtype=self.model.kv_dtype,
            num_threads=cfg.worker.num_threads,
            num_bays=self.num_bays,
            grammars=grammars,
        )
        calibrate(runner, costs, clock, min(cfg.engine.max_num_batched_tokens, self.max_model_len - 1))
        return runner

    def registration(
        self, incarnation: Incarnation, role: Role, endpoints: tuple[Endpoint, ...], health_url: str
    ) -> Registration:
        """What the worker says of itself to the cell."""
        cfg = self.settings
        return Registration(
            worker_id=WorkerId(worker_name(cfg.worker)),
            incarnation=incarnation,
            role=role,
            model=cfg.model.name or model_name(resolve(cfg.model.path)),
            fingerprint=self.model.fingerprint,
            protocol=PROTOCOL_VERSION,
            block_size=cfg.engine.block_size,
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            max_num_seqs=cfg.engine.max_num_seqs,
            max_num_batched_tokens=cfg.engine.max_num_batched_tokens,
            endpoints=endpoints,
            health_url=health_url,
        )


def stalled(engine: Engine, clock: Clock, limit_s: float) -> Callable[[], tuple[bool, dict[str, object]]]:
    """A health probe: False once a step has been under way for longer than `limit_s`."""
    last = {"steps": -1, "since": clock.now()}

    def probe() -> tuple[bool, dict[str, object]]:
        steps = engine.num_steps
        if steps != last["steps"] or not engine.is_stepping:
            last.update(steps=steps, since=clock.now())
        stuck_s = clock.now() - last["since"]
        return stuck_s < limit_s, {"steps": steps, "step_seconds": round(stuck_s, 1)}

    return probe
