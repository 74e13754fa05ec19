"""What a world suffers: each kind of fault is a method, from its beginning to its end."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import anyio

from tests.sim.plan import Fault
from tests.sim.redis_sim import Delay

if TYPE_CHECKING:
    from tests.sim.machines import Life
    from tests.sim.world import World

WORD_S = 3.0
"""So long a `last_word` waits for its gateway to end a submission."""


class Sufferings:
    """Brings the faults of a plan over its world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._num_usurpers = 0
        self.struck: Counter[str] = Counter()  # by kind, and the role of whom it struck

    async def suffer(self, fault: Fault) -> None:
        await self._world.clock.sleep(fault.at)
        life = self._world.lives.get(fault.target)
        role = f" {life.name.split('-')[0]}" if life is not None else ""
        self.struck[fault.kind + role] += 1
        self._world.note(f"fault {fault.kind} {life.incarnation if life else ''} {fault.seconds:.2f}s {fault.amount:g}")
        await getattr(self, f"_suffer_{fault.kind}")(fault, life)
        self._world.note(f"end of {fault.kind} {life.incarnation if life else ''}")

    async def _suffer_crash(self, fault: Fault, life: Life | None) -> None:
        if life is not None:
            self._world.crash(life)

    async def _suffer_freeze(self, fault: Fault, life: Life | None) -> None:
        if life is not None and life.is_alive:
            self._world.loop.freeze(life.proc)
            await self._world.clock.sleep(fault.seconds)
            life.wake(self._world.clock.now(), fault.seconds)
            self._world.loop.thaw(life.proc)

    async def _suffer_partition(self, fault: Fault, life: Life | None) -> None:
        if life is not None and life.is_alive:
            life.client.partitioned = True
            await self._world.clock.sleep(fault.seconds)
            life.wake(self._world.clock.now(), fault.seconds)
            life.client.rejoin()

    async def _suffer_slow(self, fault: Fault, life: Life | None) -> None:
        if life is not None:
            life.slowness = fault.amount
            await self._world.clock.sleep(fault.seconds)
            life.slowness = 1.0

    async def _suffer_redis_down(self, fault: Fault, life: Life | None) -> None:
        self._world.redis.stop()
        with self._world.judge.disturbance(fault.seconds):
            await self._world.clock.sleep(fault.seconds)
        self._world.redis.start()

    async def _suffer_lost_replies(self, fault: Fault, life: Life | None) -> None:
        self._world.redis.network.lose_reply_p = fault.amount
        with self._world.judge.disturbance(fault.seconds):
            await self._world.clock.sleep(fault.seconds)
        self._world.redis.network.lose_reply_p = 0.0

    async def _suffer_cut(self, fault: Fault, life: Life | None) -> None:
        if life is not None:
            self._world.network.cut(self._world.network.services.get(life.incarnation), None)

    async def _suffer_flip(self, fault: Fault, life: Life | None) -> None:
        start = self._world.network.num_moved
        self._world.network.faults.flip_blocks = frozenset(
            start + self._world.rng.randrange(30) for _ in range(int(fault.amount))
        )

    async def _suffer_kv_loss(self, fault: Fault, life: Life | None) -> None:
        key = self._world.keys.kv().key.encode()

        def keep(stream: bytes, args: list[object]) -> bool:
            return stream != key or self._world.rng.random() > fault.amount

        self._world.redis.filters.append(keep)
        await self._world.clock.sleep(fault.seconds)
        self._world.redis.filters.remove(keep)

    async def _suffer_kv_repeat(self, fault: Fault, life: Life | None) -> None:
        key = self._world.keys.kv().key.encode()

        def repeat(stream: bytes, args: list[object]) -> bool:
            if stream == key and self._world.rng.random() < fault.amount:
                self._world.redis.store.run(b"XADD", *args[1:])
            return True

        self._world.redis.filters.append(repeat)
        await self._world.clock.sleep(fault.seconds)
        self._world.redis.filters.remove(repeat)

    async def _suffer_wipe(self, fault: Fault, life: Life | None) -> None:
        self._world.redis.stop()
        self._world.redis.wipe()
        self._world.num_wipes += 1
        self._world.judge.wiped()
        self._world.redis.start()

    async def _suffer_usurp(self, fault: Fault, old: Life | None) -> None:
        """A second scheduler starts while the first is alive, and for a while both are."""
        if old is None or not old.is_alive:
            return
        world = self._world
        self._num_usurpers += 1
        life = world.lives[old.name] = world.heirs[old.incarnation] = world.new_life(old.name, 100 + self._num_usurpers)
        world.start(life)
        await world.clock.sleep(fault.seconds)
        world.crash(old)

    async def _suffer_drain(self, fault: Fault, life: Life | None) -> None:
        if life is not None and life.is_alive:
            self._world.loop.call_in(life.proc, life.stopping.set)

    async def _suffer_jump(self, fault: Fault, life: Life | None) -> None:
        if fault.amount < 0:
            self.struck["jump back"] += 1
        self._world.redis.time_jump += fault.amount
        self._world.judge.jumped_at = self._world.clock.now()

    async def _suffer_skew(self, fault: Fault, life: Life | None) -> None:
        if life is not None and life.is_alive:
            life.clock.skip(fault.amount)
            life.wake(self._world.clock.now(), fault.amount)

    async def _suffer_last_word(self, fault: Fault, life: Life | None) -> None:
        """It stands still from the moment at which it sends an end; others take over, and then its word arrives."""
        if life is None or not life.is_alive:
            return
        sent = anyio.Event()
        self._world.redis.delays[life.client] = Delay(
            "submit_end", fault.seconds, lambda: (self._world.loop.freeze(life.proc), sent.set())
        )
        with anyio.move_on_after(WORD_S):
            await sent.wait()
        if self._world.redis.delays.pop(life.client, None) is None:
            await self._world.clock.sleep(fault.seconds + 0.01)
            life.wake(self._world.clock.now(), fault.seconds)
            self._world.loop.thaw(life.proc)

    async def _suffer_last_rites(self, fault: Fault, life: Life | None) -> None:
        """It cannot be heard until its burial is on its way. Just then Redis goes away; it is well again long before
        Redis is, and cannot say so. The scheduler stands still meanwhile, and is the first to speak afterwards."""
        world, scheduler = self._world, self._world.lives.get("scheduler-0")
        if life is None or not life.is_alive or scheduler is None or not scheduler.is_alive or world.redis.delays:
            return  # of those that overlap, one
        sent, began = anyio.Event(), world.clock.now()
        script = "bury_gateway" if life.name.startswith("gateway") else "bury"
        world.redis.delays[scheduler.client] = Delay(script, 0.0, lambda: (world.redis.stop(), sent.set()))
        life.client.partitioned = True
        with anyio.move_on_after(2 * WORD_S):
            await sent.wait()
        life.wake(world.clock.now(), world.clock.now() - began)
        life.client.rejoin()
        world.redis.delays.pop(scheduler.client, None)
        if sent.is_set():
            self.struck[f"held up {script}"] += 1
            with world.judge.disturbance(fault.seconds):
                await world.clock.sleep(0.2)
                world.loop.freeze(scheduler.proc)
                await world.clock.sleep(fault.seconds - 0.2)
            world.redis.start()
            scheduler.wake(world.clock.now(), fault.seconds - 0.2)
            world.loop.thaw(scheduler.proc)

    async def _suffer_ghost(self, fault: Fault, life: Life | None) -> None:
        self._world.judge.haunt()

    async def _suffer_hang(self, fault: Fault, life: Life | None) -> None:
        """A step that never ends, while the rest of the process goes on."""
        if life is not None and life.is_alive and life.engine is not None:
            life.hung = True
            with anyio.move_on_after(fault.seconds):
                await life.hangs.wait()
            await self._world.clock.sleep(fault.seconds)
            if life.is_alive and life.hangs.is_set():
                self._world.judge.nobody_waits_for(life)
            self._world.crash(life)

    async def _suffer_bad_steps(self, fault: Fault, life: Life | None) -> None:
        self._world.step_fails += int(fault.amount)
