"""The planner's state machine at volume: a seeded random driver in place of Hypothesis, many more steps, no shrinking.

`BATON_TEST_PLANNER_STEPS=1000000 pytest -s tests/unit/engine/test_planner_volume.py` is the long run.
"""

import os
import random
from collections import Counter

from tests.unit.engine.test_planner_machine import PlannerMachine

STEPS = int(os.environ.get("BATON_TEST_PLANNER_STEPS", "100000"))
STEPS_PER_LIFE = 400
CHECK_BYTES_EVERY = 16
WEIGHTS = {
    "add": 14,
    "reserve": 8,
    "land": 7,
    "drop": 1,
    "late_write": 1,
    "release": 5,
    "abort": 1,
    "plan_step": 30,
    "commit": 30,
    "fail": 1,
}


class Driver:
    """One life of a planner in one pool, by one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.machine = PlannerMachine()
        draw = self.rng.randint
        self.machine.begin(
            num_blocks=draw(5, 24),
            seqs=draw(1, 8),
            budget=draw(1, 32),
            caching=self.rng.random() < 0.7,
            bays=draw(0, 24),
            prompts_until=draw(1, 32),
        )

    def prompt(self) -> list[int]:
        length = self.rng.randint(1, min(18, 4 * self.machine.rig.pool.total))
        return [0] * length if self.rng.random() < 0.4 else self.rng.choices((0, 1), k=length)

    def step(self, name: str) -> None:
        machine, rng = self.machine, self.rng
        if name in ("add", "reserve"):
            args = {
                "prompt": self.prompt(),
                "max_tokens": rng.randint(2, 12),
                "sent": rng.choice((0, 0, 0, 1, 3)),
                "priority": rng.choice((-1, 0, 0, 1)),
                "credit": rng.choice((None, -2, 0, 1, 3)),
            }
            if len(machine.in_phase("active", "landing")) > 12:
                return
            if name == "add":
                args |= {"prefill_only": rng.random() < 0.25, "stops": rng.random() < 0.3}
            getattr(machine, name)(**args)
            return
        phases = {
            "land": ("landing",),
            "drop": ("landing", "quarantined"),
            "late_write": ("quarantined",),
            "release": ("handed_off",),
            "abort": ("active", "landing", "handed_off"),
        }.get(name)
        if phases is not None:
            if machine.in_phase(*phases):
                getattr(machine, name)(which=rng.randrange(64))
        elif name == "plan_step":
            if len(machine.plans) < 2:
                machine.plan_step()
        elif machine.plans:
            machine.commit() if name == "commit" else machine.fail(luck=rng.randint(0, 5))


def test_a_hundred_thousand_random_steps_keep_the_books() -> None:
    """After each of them the books balance; at the end of each life every seq has ended with its whole answer."""
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    done: Counter[str] = Counter()
    for seed in range(-(-STEPS // STEPS_PER_LIFE)):
        driver = Driver(seed)
        machine = driver.machine
        try:
            for number, name in enumerate(driver.rng.choices(names, weights, k=STEPS_PER_LIFE)):
                driver.step(name)
                machine.planner.check()
                if number % CHECK_BYTES_EVERY == 0:
                    machine.books_balance()
                    machine.announced_blocks_keep_their_bytes()
                done["steps"] += 1
            machine.teardown()
        except Exception as exc:
            raise AssertionError(f"seed {seed}") from exc
        stats = machine.planner.stats()
        done["plans"] += stats.steps
        done["preempted"] += stats.preemptions
        done["parked"] += int(stats.extra["preemptions_parked"])
        done["seqs"] += len(machine.known)
        machine.known.clear()  # an end has been made already: Hypothesis would call it again
    print(dict(done))
    assert done["steps"] >= STEPS
    assert done["plans"] > STEPS // 10
    assert done["preempted"] > STEPS // 1000
    assert done["parked"] > STEPS // 2000
