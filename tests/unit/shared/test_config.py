"""Configuration: layers, and that a mistake stops the boot and names itself."""

from pathlib import Path

import msgspec
import pytest

from shared.config import Settings, load, to_environ
from shared.errors import ConfigError


def test_environment_overrides_the_file(tmp_path: Path) -> None:
    """File, then environment, then frozen."""
    path = tmp_path / "baton.toml"
    path.write_text("[gateway]\nport = 1\nmax_queued = 7\n[transfer]\ntransports = ['tcp']\n")
    settings = load(path, {"BATON_GATEWAY_PORT": "2", "HOME": "/nowhere"})
    assert (settings.gateway.port, settings.gateway.max_queued) == (2, 7)
    assert settings.transfer.transports == ("tcp",)
    with pytest.raises(AttributeError):
        settings.gateway.port = 3  # type: ignore[misc]


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    """BATON_CONFIG."""
    path = tmp_path / "baton.toml"
    path.write_text("log_level = 'debug'\n")
    assert load(environ={"BATON_CONFIG": str(path)}).log_level == "debug"


def test_settings_survive_the_way_through_an_environment() -> None:
    """What a launcher hands down is what a child loads."""
    settings = msgspec.convert(
        {"engine": {"num_blocks": 9, "prefix_caching": False}, "transfer": {"transports": ["tcp", "shm"]}}, Settings
    )
    assert load(environ=to_environ(settings)) == settings


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"BATON_GATEWAY_PROT": "1"}, "prot"),
        ({"BATON_GATWAY_PORT": "1"}, "gatway"),
        ({"BATON_GATEWAY_PORT": "eighty"}, "gateway.port"),
        ({"BATON_ENGINE_BLOCK_SIZE": "0"}, "engine.block_size"),
        ({"BATON_ENGINE_MEMORY_FRACTION": "1.5"}, "engine.memory_fraction"),
        ({"BATON_TRANSFER_TRANSPORTS": "shm,rdma"}, "transfer.transports"),
        ({"BATON_TRANSFER_TRANSPORTS": ""}, "transfer.transports"),
        ({"BATON_LOG_LEVEL": "loud"}, "log_level"),
    ],
)
def test_a_bad_variable_is_named(env: dict[str, str], named: str) -> None:
    """The message says where to look."""
    with pytest.raises(ConfigError, match=named):
        load(environ=env)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("BATON_GATEWAY_PORT", "eighty"), ("BATON_TRANSFER_TRANSPORTS", "shm,rdma"), ("BATON_LOG_LEVEL", "loud")],
)
def test_a_variable_of_a_wrong_type_is_named_as_it_was_set(tmp_path: Path, variable: str, value: str) -> None:
    """By the variable's own name, not only by the field's; the same fault in a file is the file's."""
    with pytest.raises(ConfigError, match=f"environment variable {variable}: "):
        load(environ={"BATON_GATEWAY_HOST": "::1", variable: value})
    path = tmp_path / "baton.toml"
    path.write_text("[gateway]\nport = 'eighty'\n")
    with pytest.raises(ConfigError, match=r"^configuration: .*gateway.port"):
        load(path, {"BATON_GATEWAY_HOST": "::1"})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[gateway]\nprot = 1\n", "prot"),
        ("[nope]\n", "nope"),
        ("gateway = 3\n", "gateway"),
        ("[gateway\n", "line 1"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    """So does a file's."""
    path = tmp_path / "baton.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load(path, {})


def test_a_missing_file_is_an_error() -> None:
    """A file that was named and is not there is no default."""
    with pytest.raises(ConfigError, match="No such file"):
        load("/nowhere/baton.toml", {})
