"""compose.yaml and what it mounts: valid, true to the configuration, and complete."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml
from compose_spec.models import ComposeSpecification, Service

from shared.config import load
from tests.redis_server import find_binary

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "compose.yaml").read_text()
OURS = ("gateway", "scheduler", "prefix-index", "prefill", "decode", "prefill-gpu", "decode-gpu")
VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?::([-?])([^}]*))?\}")


def settings_file() -> dict[str, str]:
    """deploy/.env.example, with the passwords set."""
    lines = (ROOT / "deploy/.env.example").read_text().splitlines()
    pairs = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return dict(pairs) | {"REDIS_PASSWORD": "secret", "GRAFANA_PASSWORD": "secret"}


def interpolate(text: str, env: dict[str, str]) -> str:
    """As compose does it: `${NAME}`, `${NAME:-default}`, `${NAME:?error}`, `$$`."""

    def value(match: re.Match[str]) -> str:
        name, kind, word = match.groups()
        if name is None:
            return "$"
        found = env.get(name, "")
        if not found and kind == "?":
            raise KeyError(f"{name}: {word}")
        return found or (word if kind == "-" else "")

    return VARIABLE.sub(value, text)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load(interpolate(TEXT, settings_file()))["services"]


def test_the_file_is_valid_by_the_compose_specification(services: dict[str, Any]):
    """Its schema, as `compose-spec` has it, with variables put in; and no service has a key that the schema lacks."""
    whole = yaml.safe_load(interpolate(TEXT, settings_file()))
    parsed = compose_spec.PyCompose.from_yaml(json.dumps(whole))  # it knows no merge keys
    assert set(parsed.service_names()) == {*OURS, "redis", "prometheus", "grafana"}
    ComposeSpecification.model_validate(whole)
    known = {field.alias or name for name, field in Service.model_fields.items()}
    for name, service in services.items():
        assert set(service) <= known, name


def test_the_check_can_fail():
    """A wrong condition, a wrong type."""
    with pytest.raises(ValueError, match="service_fine"):
        compose_spec.PyCompose.from_yaml(TEXT_WITH_A_FAULT)
    with pytest.raises(ValueError, match="command"):
        ComposeSpecification.model_validate({"services": {"x": {"image": "a", "command": 3}}})


TEXT_WITH_A_FAULT = "services: {a: {image: a, depends_on: {b: {condition: service_fine}}}, b: {image: b}}"


@pytest.mark.parametrize("name", OURS)
def test_every_service_reads_its_environment(services: dict[str, Any], name: str):
    """Each BATON_ variable is a field of the configuration, with a value that it takes."""
    env = services[name]["environment"]
    settings = load(environ=env)
    assert settings.redis.url == "redis://:secret@redis:6379/0"
    if "worker" in str(env).lower() and name.startswith(("prefill", "decode")):
        assert (settings.worker.host, settings.worker.health_port) == ("0.0.0.0", 9100)
        assert settings.engine.num_blocks == 0
        assert settings.worker.name == ""


@pytest.mark.parametrize("name", OURS)
def test_every_service_is_bounded_and_ends_gently(services: dict[str, Any], name: str):
    """Limits, a health check, time to drain, no rights that it does not need, and a command that is there."""
    service = services[name]
    limits = service["deploy"]["resources"]["limits"]
    assert limits["cpus"]
    assert limits["memory"]
    assert ":9100/ready" in service["healthcheck"]["test"][-1]
    assert service["stop_grace_period"]
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    *_, module = service["command"]
    assert (ROOT / module.replace(".", "/") / "__main__.py").exists()


def test_only_what_is_meant_is_published(services: dict[str, Any]):
    """The API, and metrics on loopback: no worker, no Redis, no internal port."""
    published = {name: service["ports"] for name, service in services.items() if service.get("ports")}
    assert published == {
        "gateway": ["127.0.0.1:8000:8000"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }


def test_what_is_mounted_is_there(services: dict[str, Any]):
    """Every file or folder of this tree; and `.env` has every variable that has no default."""
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), source
    with pytest.raises(KeyError, match="REDIS_PASSWORD"):
        interpolate(TEXT, {})


def test_every_variable_of_the_example_is_used():
    """A setting that nothing reads is a trap."""
    assert set(settings_file()) - {"COMPOSE_PROFILES"} <= {m[1] for m in VARIABLE.finditer(TEXT)}


def test_the_small_image_needs_nothing_that_it_lacks():
    """Its services start without the packages that the Dockerfile leaves out."""
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    without = dockerfile.partition("AS small")[2].partition("--without ")[2].split()[0].split(",")
    assert "torch" in without
    blocked = f"import sys; sys.modules.update(dict.fromkeys({without}))"
    modules = ("services.gateway.__main__", "services.scheduler.__main__", "services.prefix_index.__main__")
    program = "\n".join([blocked, *(f"import {name}" for name in (*modules, "services.cli.keys", "services.cli.main"))])
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_redis_starts_with_the_users_that_have_a_password(tmp_path: Path):
    """The very script of the container: closed to whoever has no password, users off that have none."""
    port = 20000 + hash(str(tmp_path)) % 20000
    conf = tmp_path / "redis.conf"
    conf.write_text((ROOT / "deploy/redis.conf").read_text())
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "redis-server").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/args\n')
    (bin_dir / "redis-server").chmod(0o755)
    for tool in ("su-exec", "chown"):
        (bin_dir / tool).write_text('#!/bin/sh\nshift\nexec "$@"\n' if tool == "su-exec" else "#!/bin/sh\n")
        (bin_dir / tool).chmod(0o755)
    env = {
        "PATH": f"{bin_dir}:/usr/bin:/bin:/usr/sbin:/sbin",
        "REDIS_DIR": str(tmp_path),
        "REDIS_CONF": str(conf),
        "REDIS_PORT": str(port),
        "REDIS_PASSWORD": "open sesame",
        "REDIS_SUBMIT_PASSWORD": "in",
    }
    subprocess.run(["sh", ROOT / "deploy/redis-start.sh"], env=env, check=True, timeout=20)
    users = (tmp_path / "users.acl").read_text()
    assert "open sesame" not in users
    assert re.search(r"^user default on #[0-9a-f]{64} ~\* &\* \+@all$", users, re.M)
    assert re.search(r"^user baton-submit on #[0-9a-f]{64} resetkeys .*\+xadd$", users, re.M)
    assert re.search(r"^user baton-result off resetkeys .*\+xread$", users, re.M)
    args = (tmp_path / "args").read_text().split("\n")
    assert args[args.index("--aclfile") + 1] == f"{tmp_path}/users.acl"
    # Redis itself reads such users.
    check = subprocess.run(
        [find_binary(), "--port", "0", "--aclfile", str(tmp_path / "users.acl"), "--unixsocket", "/nowhere/x"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert "Aborting Redis startup because of ACL errors" not in check.stdout + check.stderr


def test_an_empty_password_stops_redis(tmp_path: Path):
    """Rather than a Redis that is open."""
    env = {"PATH": "/usr/bin:/bin", "REDIS_DIR": str(tmp_path), "REDIS_PASSWORD": ""}
    done = subprocess.run(["sh", ROOT / "deploy/redis-start.sh"], env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert "REDIS_PASSWORD is empty" in done.stderr


def test_the_dashboard_and_the_scrape_configuration_can_be_read():
    """Panels with queries of our metrics; targets that are services."""
    board = json.loads((ROOT / "deploy/grafana/dashboards/baton.json").read_text())
    assert board["panels"]
    assert all(target["expr"] for panel in board["panels"] for target in panel["targets"])
    scrape = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    (job,) = scrape["scrape_configs"]
    assert set(job["dns_sd_configs"][0]["names"]) == set(OURS)
