"""Configuration: one TOML file, then `BATON_<SECTION>_<FIELD>` from the environment, then frozen.

Read once per process, in `load`. A typo stops the boot and names itself. Rooms get their own section,
never the whole.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.errors import ConfigError
from shared.host_memory import parse_bytes

PREFIX = "BATON_"
FILE_VARIABLE = "BATON_CONFIG"
DRAIN_S = 30.0
"""After SIGTERM, what was begun may take so long to end. Whoever sends it must wait longer before a SIGKILL."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen part of the configuration, at most ~15 fields."""


class RedisConfig(Section, frozen=True):
    url: str = "redis://127.0.0.1:6379/0"
    cell: str = "baton"  # hash tag of all keys
    retry_s: float = 10.0  # how long a lost Redis is retried before a call fails
    max_memory_mb: int = 512  # of the private Redis that `baton up` runs; beyond, new work is refused


class ModelConfig(Section, frozen=True):
    path: str = ""  # GGUF file or safetensors folder; "" = the embedded default
    name: str = ""  # what clients call it; "" = from the file
    # auto: 4- and 8-bit weights as stored, others in 8 bits in groups of 32; int8: all in 8 bits, one scale per output;
    # float32: exact
    dtype: Literal["auto", "int8", "float32"] = "auto"
    # auto: float16, or float32 as dtype is
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] = "auto"
    cache_dir: str = ""  # where packed weights are kept; "" = ~/.cache/baton
    max_model_len: int = 0  # 0 = the model's own limit


class GatewayConfig(Section, frozen=True):
    host: str = "127.0.0.1"
    port: int = 8000
    max_queued: int = 512  # requests waiting for dispatch; beyond: 429
    queue_timeout_s: float = 300.0  # an HTTP request that waits longer for dispatch gets 503
    max_body_bytes: int = 8 << 20
    max_open_body_bytes: int = 64 << 20  # of all requests' bodies beyond 64 KiB each; what would exceed it gets 503
    chat_template: str = ""  # a jinja file in place of the model's own
    tool_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = "auto"  # auto: as the chat template shows
    reasoning_parser: Literal["auto", "think", "off"] = "auto"  # auto: if the chat template knows <think>
    max_grammar_bytes: int = 64 << 10  # of a JSON schema or grammar
    grammar_timeout_s: float = 2.0  # a grammar that takes longer to compile is refused
    default_max_tokens: int = 256  # chat completions that name none
    prefix_salt: str = ""  # scopes prefix sharing to deployments of the same salt
    client_stall_s: float = 30.0  # an HTTP client that reads nothing for so long is cancelled
    max_submissions: int = 256  # of the Redis queue, in work here at once; others stay in the stream
    submission_lease_s: float = 10.0  # a gateway silent for so long loses its submissions to another
    result_ttl_s: float = 3600.0  # results of submissions stay so long after their last entry
    max_prompt_tokens: int = 0  # of one prompt; 0 = what the model takes
    # the edge: SECURITY.md
    internal_host: str = "127.0.0.1"  # /metrics and /debug, which the public port does not have
    internal_port: int = 0  # 0 = any free port
    require_key: Literal["auto", "on", "off"] = "auto"  # auto: from the first `baton keys add` on
    cache_salt: Literal["deployment", "tenant"] = "deployment"  # who may hit whose cached prefixes
    tls_cert: str = ""  # PEM files; both or none
    tls_key: str = ""
    cors_origins: tuple[str, ...] = ()  # of browsers' pages that may ask; "*" = any
    header_timeout_s: float = 10.0  # a request's line and headers arrive within it, or the connection ends
    body_timeout_s: float = 60.0  # the same for its body
    max_connections: int = 4096


class SchedulerConfig(Section, frozen=True):
    host: str = "127.0.0.1"  # health and metrics
    port: int = 0  # 0 = any free port
    min_handoff_tokens: int = 17  # fewer uncached prompt tokens than this stay on the decode worker
    growth_tokens: int = 128  # decode credit taken beyond the prompt, at most
    priority_level_s: float = 10.0  # a request of priority 1 is served like one of priority 0 that came so much later
    max_attempts: int = 3
    index_timeout_s: float = 0.05
    reap_every_s: float = 0.25


class PrefixIndexConfig(Section, frozen=True):
    host: str = "127.0.0.1"  # health and metrics
    port: int = 0  # 0 = any free port
    max_blocks: int = 4_000_000  # entries over all workers; the oldest worker's go first


class LeaseConfig(Section, frozen=True):
    lease_s: float = 15.0  # longer than any step: it finds a stuck engine; a dead worker is found by its heartbeat
    heartbeat_s: float = 1.0  # a worker is dead after three missed ones


class EngineConfig(Section, frozen=True):
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 128
    prefill_batch_tokens: int = 64  # prompts join a step until it has so many of their tokens
    memory_fraction: float = 0.5  # of the memory that is free at start, over all workers of the host
    memory_limit: str = ""  # e.g. 4GiB, over all workers of the host, in place of the fraction
    free_bytes: int = 0  # what was free before any worker of the host started; 0 = look; `baton up` looks once for all
    memory_share: float = 1.0  # this worker's part of that budget
    num_blocks: int = 0  # 0 = from the memory budget
    prefix_caching: bool = True
    look_ahead: bool = True  # plan the next step while one runs
    park_bytes: int = 256 << 20  # host memory for the KV of preempted seqs, at most; 0 = they are computed again
    prefault_bytes: int = 512 << 20  # of the pool, taken from the system at start rather than when first used


class WorkerConfig(Section, frozen=True):
    name: str = ""  # "" = the machine's, or container's, own name
    host: str = "127.0.0.1"  # address to listen on
    advertise_host: str = ""  # what others connect to; "" = host, or this machine's own address if host is a wildcard
    port: int = 0  # block transfer
    health_port: int = 0
    cores: str = ""  # e.g. "0" or "0-3,8"; "" = not pinned
    num_threads: int = 1
    run_dir: str = ""  # for unix sockets; "" = a private temporary folder


class TransferConfig(Section, frozen=True):
    transports: tuple[Literal["shm", "tcp"], ...] = ("shm", "tcp")  # in order of preference
    connect_timeout_s: float = 5.0
    idle_timeout_s: float = 30.0  # no byte and no announcement for so long: the fetch fails
    hold_s: float = 60.0  # a source keeps announced blocks so long after the last sign of the reader
    max_inflight_bytes: int = 256 << 20


class Settings(Section, frozen=True):
    redis: RedisConfig = RedisConfig()
    model: ModelConfig = ModelConfig()
    gateway: GatewayConfig = GatewayConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    index: PrefixIndexConfig = PrefixIndexConfig()
    lease: LeaseConfig = LeaseConfig()
    engine: EngineConfig = EngineConfig()
    worker: WorkerConfig = WorkerConfig()
    transfer: TransferConfig = TransferConfig()
    log_format: Literal["console", "json"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


_SECTIONS = {f.name for f in msgspec.structs.fields(Settings) if isinstance(f.default, Section)}


def load(path: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """The process's settings.

    :param path: TOML file; `BATON_CONFIG` names one if this is None.
    :param environ: in place of the process's environment (tests).
    :raises ConfigError: unreadable file, unknown section or field, wrong type, value out of range.
    """
    raw, variables = _read(path, environ)
    try:
        settings = msgspec.convert(raw, Settings, strict=False)
    except msgspec.ValidationError as exc:
        _, _, path_of_fault = str(exc).rpartition("`$.")
        variable = variables.get(path_of_fault.rstrip("`").partition("[")[0])
        where = f"environment variable {variable}" if variable else "configuration"
        raise ConfigError(f"{where}: {exc}") from None
    _check(settings)
    return settings


def names_redis(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the configuration names a Redis, so that it is not merely the default's.

    :raises ConfigError: as `load`.
    """
    section = _read(None, environ)[0].get("redis")
    return isinstance(section, dict) and "url" in section


def to_environ(settings: Settings) -> dict[str, str]:
    """The environment under which `load` gives back these settings: what a launcher hands to a child."""
    out: dict[str, str] = {}
    for section, value in msgspec.to_builtins(settings).items():
        if not isinstance(value, dict):
            out[f"{PREFIX}{section.upper()}"] = _text(value)
            continue
        for field, inner in value.items():
            out[f"{PREFIX}{section.upper()}_{field.upper()}"] = _text(inner)
    return out


def _read(path: str | Path | None, environ: Mapping[str, str] | None) -> tuple[dict[str, Any], dict[str, str]]:
    """What was given, unchecked; and the variable of each value from the environment, by the path as an error of
    msgspec names it."""
    env = dict(os.environ if environ is None else environ)
    chosen = path or env.get(FILE_VARIABLE)
    raw = _read_toml(Path(chosen)) if chosen else {}
    variables: dict[str, str] = {}
    for name, value in sorted(env.items()):
        if name.startswith(PREFIX) and name != FILE_VARIABLE:
            variables[_overlay(raw, name, value)] = name
    return raw, variables


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as exc:
        raise ConfigError(f"configuration file {path}: {exc.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"configuration file {path}: {exc}") from None


def _overlay(raw: dict[str, Any], name: str, value: str) -> str:
    """Put one environment variable into the raw tree. Mutates `raw`. The path of what it sets: `section.field`."""
    key = name.removeprefix(PREFIX).lower()
    if key in ("log_format", "log_level"):
        raw[key] = value
        return key
    section, _, field = key.partition("_")
    if section not in _SECTIONS:
        raise ConfigError(f"environment variable {name}: there is no section {section!r}")
    kind = type(getattr(Settings(), section))
    if field not in kind.__struct_fields__:
        raise ConfigError(f"environment variable {name}: section {section!r} has no field {field!r}")
    tree = raw.setdefault(section, {})
    if not isinstance(tree, dict):
        raise ConfigError(f"configuration: {section!r} must be a table")
    is_list = isinstance(getattr(kind(), field), tuple)
    tree[field] = [v for v in value.split(",") if v] if is_list else value
    return f"{section}.{field}"


def _check(s: Settings) -> None:
    """Ranges that types cannot say."""
    positive = {
        "engine.block_size": s.engine.block_size,
        "engine.max_num_seqs": s.engine.max_num_seqs,
        "engine.max_num_batched_tokens": s.engine.max_num_batched_tokens,
        "worker.num_threads": s.worker.num_threads,
        "redis.max_memory_mb": s.redis.max_memory_mb,
        "lease.lease_s": s.lease.lease_s,
        "lease.heartbeat_s": s.lease.heartbeat_s,
        "gateway.max_queued": s.gateway.max_queued,
        "gateway.default_max_tokens": s.gateway.default_max_tokens,
        "gateway.max_open_body_bytes": s.gateway.max_open_body_bytes,
        "gateway.max_grammar_bytes": s.gateway.max_grammar_bytes,
        "gateway.grammar_timeout_s": s.gateway.grammar_timeout_s,
        "gateway.client_stall_s": s.gateway.client_stall_s,
        "gateway.queue_timeout_s": s.gateway.queue_timeout_s,
        "gateway.max_submissions": s.gateway.max_submissions,
        "gateway.submission_lease_s": s.gateway.submission_lease_s,
        "gateway.result_ttl_s": s.gateway.result_ttl_s,
        "gateway.header_timeout_s": s.gateway.header_timeout_s,
        "gateway.body_timeout_s": s.gateway.body_timeout_s,
        "gateway.max_connections": s.gateway.max_connections,
        "scheduler.max_attempts": s.scheduler.max_attempts,
        "scheduler.priority_level_s": s.scheduler.priority_level_s,
        "transfer.hold_s": s.transfer.hold_s,
    }
    for field, value in positive.items():
        if value <= 0:
            raise ConfigError(f"configuration: {field} must be above 0, got {value}")
    for field, share in (("memory_fraction", s.engine.memory_fraction), ("memory_share", s.engine.memory_share)):
        if not 0 < share <= 1:
            raise ConfigError(f"configuration: engine.{field} must be in (0, 1], got {share}")
    if bool(s.gateway.tls_cert) != bool(s.gateway.tls_key):
        raise ConfigError("configuration: gateway.tls_cert and gateway.tls_key go together")
    if s.gateway.max_open_body_bytes < s.gateway.max_body_bytes:
        raise ConfigError("configuration: gateway.max_open_body_bytes must be at least gateway.max_body_bytes")
    if s.engine.memory_limit:
        parse_bytes(s.engine.memory_limit)
    if not s.transfer.transports:
        raise ConfigError("configuration: transfer.transports must name at least one transport")
