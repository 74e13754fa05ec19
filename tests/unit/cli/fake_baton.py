"""The real `baton` command over fake services: `python fake_baton.py up ...`. The run directory is $FAKE_DIR/run."""

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

from services.cli import down, rundir, stack
from services.cli.main import main
from services.cli.plan import StackPlan
from services.cli.supervisor import ServiceSpec

HERE = Path(__file__).parent


def faked(real: Callable[[StackPlan], list[ServiceSpec]]) -> Callable[[StackPlan], list[ServiceSpec]]:
    def service_specs(plan: StackPlan) -> list[ServiceSpec]:
        return [dataclasses.replace(s, argv=fake_argv(s.argv), drain_s=1.0) for s in real(plan)]

    return service_specs


def fake_argv(argv: tuple[str, ...]) -> tuple[str, ...]:
    room = argv[-1].removeprefix("services.")
    return (sys.executable, str(HERE / "fake_service.py"), room)


if __name__ == "__main__":
    base = Path(os.environ["FAKE_DIR"]) / "run"
    stack.service_specs = faked(stack.service_specs)
    rundir.base_folder = lambda: base
    assert down.RunDir is rundir.RunDir
    main()
