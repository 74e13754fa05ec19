"""`baton down`: ask the supervisor to drain, wait, and leave nothing behind."""

import signal

from services.cli.errors import CommandError
from services.cli.plan import OTHER_DRAIN_S, WORK_DRAIN_S
from services.cli.procinfo import ProcessId
from services.cli.rundir import RunDir, RunState
from shared.clock import Clock

WAIT_S = 2 * WORK_DRAIN_S + 3 * OTHER_DRAIN_S + 10
POLL_S = 0.05


async def stop(run_dir: RunDir, clock: Clock, *, wait_s: float = WAIT_S) -> str:
    """Stop the stack in `run_dir`; what happened, in words.

    :raises CommandError: something survives even SIGKILL, or belongs to another user.
    """
    state = run_dir.load()
    if state is None:
        return f"Nothing runs on port {run_dir.port}."
    clean = True
    try:
        if state.supervisor.send(signal.SIGTERM) and not await _gone([state.supervisor], clock, wait_s):
            clean = False
            state.supervisor.send(signal.SIGKILL)
        if not await _kill_rest(run_dir.load() or state, clock):
            raise CommandError(f"some processes on port {run_dir.port} would not end; see './baton status'")
    except PermissionError:
        raise CommandError(f"the stack on port {run_dir.port} belongs to another user") from None
    run_dir.clear()
    return f"Stopped port {run_dir.port}" + ("." if clean else " (it did not drain in time and was killed).")


async def _kill_rest(state: RunState, clock: Clock) -> bool:
    """Children that outlived their supervisor (there should be none). True if none is left."""
    rest = [ProcessId(s.pid, s.start) for s in state.services if s.pid]
    for process in [state.supervisor, *rest]:
        process.send(signal.SIGKILL)
    return await _gone([state.supervisor, *rest], clock, 5.0)


async def _gone(processes: list[ProcessId], clock: Clock, bound_s: float) -> bool:
    deadline = clock.now() + bound_s
    while any(p.alive() for p in processes):
        if clock.now() > deadline:
            return False
        await clock.sleep(POLL_S)
    return True
