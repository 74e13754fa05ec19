"""What a planted bug is: a script or a method replaced, and the faults under which it should show."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from shared.scripts import sources
from tests.sim.plan import Plan, draw


@dataclass(frozen=True)
class Mutant:
    """A bug, and the faults under which it should show."""

    name: str
    kinds: tuple[str, ...] | None = None  # faults to draw from; None = all
    script: str = ""
    old: str = ""
    new: str = ""
    patches: tuple[tuple[Any, str, Any], ...] = ()
    leavers: float = 0.1
    queued: float = 0.15
    several: float = 0.05
    every_s: float = 0.4  # mean time between two faults
    sizes: tuple[tuple[str, int], ...] = ()  # of the plan
    also: tuple[tuple[str, str], ...] = ()  # further changes of the script

    def plan(self, seed: int, num_requests: int) -> Plan:
        plan = draw(
            seed,
            num_requests,
            kinds=self.kinds,
            every_s=self.every_s,
            pace=10,
            leavers=self.leavers,
            queued=self.queued,
            several=self.several,
        )
        return replace(plan, thorough=True, **dict(self.sizes))

    def overrides(self) -> dict[str, str]:
        if not self.script:
            return {}
        text = sources()[self.script]
        for old, new in ((self.old, self.new), *self.also):
            assert old in text, f"mutant {self.name}: the script has changed"
            text = text.replace(old, new)
        return {self.script: text}

    @contextmanager
    def planted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, replacement in self.patches:
                assert hasattr(owner, name), f"mutant {self.name}: {name} is gone"
                stack.enter_context(patch.object(owner, name, replacement))
            yield


def lua(
    name: str,
    script: str,
    old: str,
    new: str = "",
    kinds: Sequence[str] | None = None,
    **how: Any,
) -> Mutant:
    return Mutant(name, None if kinds is None else tuple(kinds), script, old, new, **how)


def python(
    name: str, owner: Any, attribute: str, replacement: Any, kinds: Sequence[str] | None = None, **how: Any
) -> Mutant:
    return Mutant(name, None if kinds is None else tuple(kinds), patches=((owner, attribute, replacement),), **how)


def few_attempts(name: str, old: str, new: str) -> Mutant:
    return Mutant(name, ("crash", "bad_steps"), "requeue", old, new, sizes=(("max_attempts", 3),))
