"""What must hold of choices that end at the gateway, with a stop string, while others of their request go on: their
worker is told soon, and does no more for them; whoever missed it, or was told of another attempt, goes on unharmed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from services.decode.worker import DecodeWorker
from services.engine.types import PlanItem
from services.gateway.generation import RETELL_S
from shared.ids import RequestId
from shared.leases import CONTROL_MS
from shared.messages import Cancel, encode
from tests.sim.calls import Call

if TYPE_CHECKING:
    from tests.sim.machines import Life
    from tests.sim.world import World

TELL_S = 0.3
"""A healthy worker, which said something in vain, has been told by a healthy gateway so much later."""


class HintBook:
    """Knows who was told of which choice, and who should have been."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._told: dict[tuple[str, str], int] = {}  # (worker, seq) -> step at which it had heard
        self._parted: dict[tuple[str, str], int] = {}  # (worker, seq) -> step that gave the choices' first tokens
        self._cuts: dict[tuple[str, int], float] = {}  # (request, choice) -> when its gateway knew
        self._said: dict[str, float] = {}  # seq -> when it first said something in vain
        self._calls: dict[str, Call] = {}  # of these
        self._of_interest: set[str] = set()  # requests of any of these
        self.num_told = 0

    # --- what is heard ---

    def heard(self, call: Call) -> None:
        """A client has read: which choices are over for it, though their worker cannot know."""
        if call.broken or len(call.reasons) in (0, call.ask.num_choices):
            return
        for choice in call.reasons:
            key = call.ask.name, choice
            if key not in self._cuts and call.ask.is_cut(choice):
                self._cuts[key] = self._world.clock.now()
                self._calls[call.ask.name] = call
                self._of_interest.add(call.ask.name)

    def told(self, life: Life, request_id: RequestId, epoch: int, choice: int, step: int) -> None:
        """A hint has arrived."""
        self._told.setdefault((life.incarnation, f"{request_id}/{epoch}/{choice}"), step)
        self._of_interest.add(request_id)
        self.num_told += 1

    def script_ran(self, name: str, keys: list[Any], args: list[Any], answers: Any) -> None:
        if name != "emit" or not self._cuts:
            return
        for i, answer in enumerate(answers):
            request_id, choice = keys[2 + 2 * i].rsplit(":", 2)[1:]
            if answer == 1 and (request_id, int(choice)) in self._cuts:
                self._said.setdefault(f"{request_id}/{args[5 * i]}/{choice}", self._world.clock.now())

    # --- what is done ---

    def work_seen(self, life: Life, item: PlanItem, step: int) -> None:
        """A seq is in a step: nobody may have told this worker, or should have long ago, that it is in vain."""
        if item.seq_id.partition("/")[0] not in self._of_interest:
            return
        leader = item.seq_id.rpartition("/")[0] + "/0"
        num_choices = item.sample.num_choices if item.sample is not None else 1
        if num_choices > 1:
            self._parted[life.incarnation, leader] = step
        if num_choices > 1 or (item.seq_id == leader and self._is_prompt(life, item)):
            return  # the one prompt of all choices
        last = max(
            self._told.get((life.incarnation, item.seq_id), step), self._parted.get((life.incarnation, leader), -1) + 1
        )
        if step > last:
            self._world.violate(f"{life.incarnation} works on {item.seq_id}, which it was told is in vain")
        elif self._is_late(life, item.seq_id):
            self._world.violate(f"{life.incarnation} works on {item.seq_id} in vain, and nobody told it")

    def _is_prompt(self, life: Life, item: PlanItem) -> bool:
        """Whether it computes the prompt of choices that have not parted."""
        worker = life.worker
        assert worker is not None
        if not isinstance(worker, DecodeWorker):
            return True
        job = worker._jobs.get(item.seq_id)
        return job is not None and not any(job.state.outputs) and item.start < len(job.state.request.token_ids)

    def _is_late(self, life: Life, seq_id: str) -> bool:
        """Whether all has been well for long enough since it said something in vain."""
        world = self._world
        request_id, _, choice = seq_id.split("/")
        said_at = self._said.get(seq_id)
        if said_at is None or (request_id, int(choice)) not in self._cuts:
            return False
        judge, call = world.judge, self._calls[request_id]
        gateway = judge.gateway_of(call)
        if not call.is_open or life.is_blind or gateway.is_blind:
            return False
        troubled_at = max(life.disturbed_at, gateway.disturbed_at, judge.disturbed_at)
        # Whoever had trouble may have missed a hint, and so may a worker whose attempt had only just begun.
        patience_s = 0.0 if troubled_at < said_at - RETELL_S and "/1/" in seq_id else RETELL_S
        waits_s = patience_s + TELL_S + call.ask.reads_every + life.step_s()
        return world.clock.now() - max(said_at, troubled_at) > waits_s

    def forget(self) -> None:
        """Redis has lost everything: what it passed on before counts no more."""
        self._said.clear()

    # --- what nobody says ---

    def haunt(self, request_id: RequestId, value: dict[bytes, bytes]) -> None:
        """A hint of the epoch before is sent again, as after a lost answer: the script must refuse it. And it reaches
        the worker of this epoch, for each choice, which no script does: it must not believe it all the same."""
        world, incarnation = self._world, value.get(b"dw", b"").decode()
        life = next((one for one in world.lives.values() if one.incarnation == incarnation and one.is_alive), None)
        if life is None or value[b"st"] not in (b"dispatched", b"prefill", b"decode"):
            return
        store, key, epoch = world.redis.store, world.keys.control(life.incarnation).key, int(value[b"ep"]) - 1
        for choice in range(int(value.get(b"nc", 1))):
            ghost = encode(Cancel(request_id=request_id, epoch=epoch, reason="ghost", choice=choice))
            args = [epoch, value[b"dw"], ghost, CONTROL_MS]
            world.redis.script("cancel_choice", [world.keys.request(request_id), key], args)
            store.run(b"XADD", key.encode(), b"*", b"m", ghost)
        store.run(b"PEXPIRE", key.encode(), b"%d" % CONTROL_MS)
