"""From options to settings to processes."""

from pathlib import Path

import pytest

from services.cli.errors import CommandError
from services.cli.options import UpOptions, external_redis, settings_for
from services.cli.plan import StackPlan, child_environ, http_url, num_ports, redis_spec, service_specs
from services.cli.ports import free_ports
from services.cli.supervisor import ServiceSpec
from shared.config import load
from shared.errors import ConfigError, ModelError

NO_ENV: dict[str, str] = {}


def plan(num_prefill: int = 1, num_decode: int = 1, cores: tuple[int, ...] = (0, 1)) -> StackPlan:
    return StackPlan(
        settings=settings_for(UpOptions(port=9000), NO_ENV),
        num_prefill=num_prefill,
        num_decode=num_decode,
        cores=cores,
        ports=tuple(range(20001, 20001 + num_ports(num_prefill, num_decode))),
    )


def by_name(specs: list[ServiceSpec]) -> dict[str, ServiceSpec]:
    return {s.name: s for s in specs}


def test_flags_win_over_variables_and_those_over_the_file(tmp_path: Path):
    """Each layer overrides the one below, field by field."""
    file = tmp_path / "baton.toml"
    file.write_text("[engine]\nmax_num_seqs = 1\nnum_blocks = 100\nmax_num_batched_tokens = 64\n[gateway]\nport = 1\n")
    env = {"BATON_ENGINE_MAX_NUM_SEQS": "2", "BATON_ENGINE_NUM_BLOCKS": "200", "PATH": "/bin"}
    settings = settings_for(UpOptions(config=file, num_blocks=300, transport="tcp,shm"), env)
    engine = settings.engine
    assert (engine.max_num_batched_tokens, engine.max_num_seqs, engine.num_blocks) == (64, 2, 300)
    assert settings.transfer.transports == ("tcp", "shm")
    assert settings.gateway.port == 1
    assert settings_for(UpOptions(config=file, port=9), env).gateway.port == 9


def test_the_model_is_resolved_once_for_all_services():
    """Services get a path that exists, and the name that clients use."""
    model = settings_for(UpOptions(), NO_ENV).model
    assert Path(model.path).is_file()
    assert model.name == "SmolLM2-135M-Instruct"
    with pytest.raises(ModelError, match="no such file or folder"):
        settings_for(UpOptions(model="./nowhere.gguf"), NO_ENV)


@pytest.mark.parametrize("typo", [{"BATON_ENGINE_NUM_BLOKS": "1"}, {"BATON_ENGIN_NUM_BLOCKS": "1"}])
def test_a_typo_in_the_environment_names_itself(typo: dict[str, str]):
    """It stops the command, not the services."""
    with pytest.raises(ConfigError, match=next(iter(typo))):
        settings_for(UpOptions(), typo)


def test_a_redis_of_the_users_is_one_that_they_name(tmp_path: Path):
    """By flag, variable or file; otherwise the stack runs its own."""
    file = tmp_path / "baton.toml"
    file.write_text('[redis]\nurl = "redis://example:6379/0"\n')
    assert not external_redis(UpOptions(), NO_ENV)
    assert external_redis(UpOptions(redis_url="redis://x"), NO_ENV)
    assert external_redis(UpOptions(), {"BATON_REDIS_URL": "redis://x"})
    assert external_redis(UpOptions(config=file), NO_ENV)
    assert external_redis(UpOptions(), {"BATON_CONFIG": str(file)})


def test_each_service_reads_back_what_was_planned_for_it():
    """Every child's environment gives, through the real loader, its own port, name, cores and share."""
    specs = by_name(service_specs(plan(2, 1, cores=(0, 1, 2, 3, 4))))
    assert set(specs) == {"gateway", "scheduler", "prefix-index", "prefill-0", "prefill-1", "decode-0"}
    read = {name: load(environ={k: v for k, v in s.env.items() if k.startswith("BATON_")}) for name, s in specs.items()}
    assert specs["scheduler"].ready == f"http://127.0.0.1:{read['scheduler'].scheduler.port}/ready"
    assert specs["prefix-index"].ready == f"http://127.0.0.1:{read['prefix-index'].index.port}/ready"
    assert specs["gateway"].ready == f"http://127.0.0.1:{read['gateway'].gateway.internal_port}/ready"
    workers = {name: read[name].worker for name in ("prefill-0", "prefill-1", "decode-0")}
    assert [w.name for w in workers.values()] == list(workers)
    assert [w.cores for w in workers.values()] == ["0-1", "2-3", "4"]
    assert [w.num_threads for w in workers.values()] == [2, 2, 1]
    assert [specs[name].ready for name in workers] == [
        f"http://127.0.0.1:{w.health_port}/ready" for w in workers.values()
    ]
    assert [read[name].engine.memory_share for name in workers] == pytest.approx([1 / 3] * 3)
    assert [specs[name].env["OMP_NUM_THREADS"] for name in workers] == ["2", "2", "1"]
    assert [specs[name].cores for name in workers] == [(0, 1), (2, 3), (4,)]
    assert specs["gateway"].cores == ()
    assert len({s.ready for s in specs.values()}) == len(specs)


def test_aggregated_mode_has_no_prefill_worker():
    """`--prefill 0`: the decode worker gets all cores and all of the memory budget."""
    specs = by_name(service_specs(plan(0, 1)))
    assert "prefill-0" not in specs
    assert specs["decode-0"].cores == (0, 1)
    assert float(specs["decode-0"].env["BATON_ENGINE_MEMORY_SHARE"]) == 1.0


def test_what_a_drain_needs_stops_last():
    """Gateway, scheduler, workers, index, Redis."""
    specs = by_name([*service_specs(plan()), redis_spec(["redis-server"], Path("/s"))])
    order = ["gateway", "scheduler", "decode-0", "prefix-index", "redis"]
    numbers = [specs[name].stop_order for name in order]
    assert numbers == sorted(set(numbers))
    assert specs["prefill-0"].stop_order == specs["decode-0"].stop_order
    assert specs["redis"].stage < min(s.stage for name, s in specs.items() if name != "redis")


def test_children_inherit_everything_but_batons_variables():
    """A variable of the user's must not fight with the plan's."""
    child = child_environ({"PATH": "/bin", "BATON_CONFIG": "x", "BATON_MODEL_PATH": "y"})
    assert child["PATH"] == "/bin"
    assert not any(name.startswith("BATON_") for name in child)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8"),
        ("0.0.0.0", "http://127.0.0.1:8"),
        ("::", "http://[::1]:8"),
        ("::1", "http://[::1]:8"),
        ("box.lan", "http://box.lan:8"),
    ],
)
def test_a_listening_address_becomes_one_to_call(host: str, url: str):
    """Wildcards cannot be called."""
    assert http_url(host, 8) == url


def test_free_ports_differ():
    """All are held while they are chosen."""
    assert len(set(free_ports(50))) == 50


@pytest.mark.parametrize(("prefill", "decode"), [(-1, 1), (1, 0), (257, 1), (0, 257)])
def test_impossible_numbers_of_workers(prefill: int, decode: int):
    """At least one decode worker, and no typing errors in the thousands."""
    with pytest.raises(CommandError, match=r"--prefill|--decode"):
        UpOptions(prefill=prefill, decode=decode).check()
