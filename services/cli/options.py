"""What `baton up` was asked, and the settings that follow: TOML file, then environment, then flags."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.cli.errors import CommandError
from shared.config import FILE_VARIABLE, PREFIX, Settings, load
from shared.errors import ConfigError
from shared.model_path import model_name, resolve

MAX_WORKERS = 256
_FLAGS = {
    "MODEL_PATH": "model",
    "GATEWAY_PORT": "port",
    "GATEWAY_HOST": "host",
    "REDIS_URL": "redis_url",
    "ENGINE_NUM_BLOCKS": "num_blocks",
    "ENGINE_MAX_NUM_SEQS": "max_num_seqs",
    "ENGINE_MAX_NUM_BATCHED_TOKENS": "max_num_batched_tokens",
    "TRANSFER_TRANSPORTS": "transport",
    "ENGINE_MEMORY_FRACTION": "memory_fraction",
    "ENGINE_MEMORY_LIMIT": "memory_limit",
    "MODEL_DTYPE": "quantize",
    "MODEL_KV_DTYPE": "kv_dtype",
}
"""Options that are settings: variable (without its prefix) -> field of `UpOptions`."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """None = as the configuration says."""

    prefill: int = 1
    decode: int = 1
    model: str | None = None
    port: int | None = None
    host: str | None = None
    detach: bool = False
    config: Path | None = None
    redis_url: str | None = None
    num_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    transport: str | None = None
    memory_fraction: float | None = None
    memory_limit: str | None = None
    quantize: str | None = None
    kv_dtype: str | None = None

    def check(self) -> None:
        """:raises CommandError: numbers of workers that make no stack."""
        if not 0 <= self.prefill <= MAX_WORKERS:
            raise CommandError(f"--prefill must be from 0 (aggregated mode) to {MAX_WORKERS}, got {self.prefill}")
        if not 1 <= self.decode <= MAX_WORKERS:
            raise CommandError(f"--decode must be from 1 to {MAX_WORKERS}, got {self.decode}")


def settings_for(options: UpOptions, environ: Mapping[str, str] | None = None) -> Settings:
    """All services' common settings, the model resolved to a path.

    :raises ConfigError: a wrong file, variable or flag.
    :raises ModelError: there is no such model.
    """
    options.check()
    env = {k: v for k, v in (os.environ if environ is None else environ).items() if k.startswith(PREFIX)}
    flags = {PREFIX + name: getattr(options, field) for name, field in _FLAGS.items()}
    flags = {variable: str(value) for variable, value in flags.items() if value is not None}
    try:
        settings = load(options.config, env | flags)
    except ConfigError as exc:
        raise ConfigError(_as_flag(str(exc), flags)) from None
    if not 0 <= settings.gateway.port <= 65535:
        raise CommandError(f"the port must be from 1 to 65535, got {settings.gateway.port}")
    path = resolve(settings.model.path)
    model = msgspec.structs.replace(settings.model, path=str(path), name=settings.model.name or model_name(path))
    return msgspec.structs.replace(settings, model=model)


def _as_flag(message: str, flags: Collection[str]) -> str:
    """An error of the configuration; where it names a variable that stands for an option, it names the option."""
    for variable in flags:
        option = "--" + _FLAGS[variable.removeprefix(PREFIX)].replace("_", "-")
        message = message.replace(f"environment variable {variable}: ", f"{option}: ")
    return message


def external_redis(options: UpOptions, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the user names a Redis of their own: by flag, variable or file. Without one, `up` runs its own."""
    env = os.environ if environ is None else environ
    if options.redis_url or env.get(f"{PREFIX}REDIS_URL"):
        return True
    chosen = options.config or env.get(FILE_VARIABLE)
    return bool(chosen) and load(chosen, {}).redis.url != Settings().redis.url
