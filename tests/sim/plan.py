"""What a seed decides before the world begins: sizes, clients and faults. A plan is data: it can be printed, shortened
and run again."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tests.sim.calls import Ask, draw_asks, with_choices

FAULTS = (
    *("crash", "freeze", "nap", "partition", "slow", "redis_down", "lost_replies"),
    *("cut", "flip", "kv_loss", "kv_repeat", "skew"),
)
RARE = ("wipe", "usurp", "drain", "jump", "ghost", "bad_steps", "hang", "last_word", "last_rites")
ROLES = ("prefill", "decode", "gateway", "scheduler", "index")
EVERY_KIND = (
    *(f"{kind} {role}" for kind in ("crash", "freeze", "partition", "slow", "skew") for role in ROLES),
    *("redis_down", "wipe", "lost_replies", "flip", "kv_loss", "kv_repeat", "jump", "jump back", "ghost", "bad_steps"),
    *(
        "cut prefill",
        "usurp scheduler",
        "drain prefill",
        "drain decode",
        "drain gateway",
        "hang prefill",
        "hang decode",
        "last_word gateway",
        *("held up bury", "held up bury_gateway"),
    ),
)
"""What must have struck over the seeds of a long run, whom where it matters."""
MANY, CROWD = 500, 2.5
"""So many clients come so much closer together: batches are larger, each fault meets more of them, and a request costs
less time."""
HANG_S = 14.0
"""A step that never ends: by then nobody may wait for that worker any more, and it is killed."""


@dataclass(frozen=True)
class Fault:
    at: float  # seconds after the start
    kind: str
    target: str = ""  # a slot, e.g. decode-1
    seconds: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        return f"{self.at:8.3f}s {self.kind} {self.target} {self.seconds:.2f}s {self.amount:g}"


@dataclass(frozen=True)
class Plan:
    seed: int
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    num_prefill: int = 2
    num_decode: int = 2
    num_gateways: int = 2
    num_blocks: int = 96
    max_attempts: int = 12
    max_queued: int = 100_000
    thorough: bool = False
    check_every: int = 16  # steps between two checks of an engine
    pace: float = 1.0
    is_roomy: bool = False  # large batches
    shm: bool = False  # readers copy from the source's memory, instead of being sent the bytes


def draw(
    seed: int,
    num_requests: int,
    *,
    kinds: Sequence[str] | None = None,
    every_s: float = 0.6,
    pace: float = 0,
    leavers: float = 0.1,
    queued: float = 0.15,
    crowd: float | None = None,
    several: float = 0.025,
) -> Plan:
    """The plan of a seed.

    :param kinds: faults to choose from; None = all, some of them rarely; () = none.
    :param every_s: mean time between two faults.
    :param pace: how long steps take, 1 to 10: slow ones give the faults time to meet requests. 0 = the seed's choice.
    :param leavers: part of the clients that leave early.
    :param queued: part of the clients that come through the Redis queue.
    :param several: part of the clients that want several choices.
    :param crowd: how many times closer together clients come; None = `CROWD` if they are `MANY`.
    """
    rng = Random(f"plan {seed}")
    pace = pace or rng.choice((1, 1, 3, 10))
    crowd = crowd or (CROWD if num_requests >= MANY else 1.0)
    rate = crowd * rng.choice((60.0, 120.0, 200.0)) / pace**0.5
    asks = tuple(draw_asks(rng, num_requests, rate, leavers, talkative=rng.random() < 0.25, queued=queued))
    dice = Random(f"choices {seed}")
    asks = tuple(with_choices(dice, ask) if dice.random() < several else ask for ask in asks)
    num_prefill, num_decode = rng.choice(((2, 2), (1, 2), (2, 1), (3, 2), (1, 1), (0, 2)))
    slots = [f"prefill-{i}" for i in range(num_prefill)] + [f"decode-{i}" for i in range(num_decode)]
    slots += ["gateway-0", "gateway-1", "scheduler-0", "index-0"]
    span = crowd * asks[-1].at  # a crowd is served for longer than it takes to come
    faults = tuple(_draw_faults(rng, span, slots, kinds, every_s)) if kinds != () else ()
    return Plan(
        seed,
        asks,
        faults,
        num_prefill,
        num_decode,
        num_blocks=rng.choice((48, 96, 160)),
        pace=pace,
        shm=rng.random() < 0.5,
        max_queued=30 if seed % 8 == 7 else 100_000,
        thorough=seed % 8 == 0,
        max_attempts=3 if seed % 5 == 2 else 12,
        is_roomy=crowd > 1 and seed % 3 != 0,
    )


def _draw_faults(
    rng: Random, span: float, slots: list[str], kinds: Sequence[str] | None, every_s: float
) -> list[Fault]:
    faults, at = [], rng.expovariate(2 / every_s)
    while at < span:
        faults.append(_fault(rng, at, slots, kinds or (FAULTS if rng.random() < 0.75 else RARE)))
        at += rng.expovariate(1 / every_s)
    return faults


def _fault(rng: Random, at: float, slots: list[str], kinds: Sequence[str]) -> Fault:
    kind = rng.choice(kinds)
    workers = [slot for slot in slots if slot.startswith(("prefill", "decode"))]
    match kind:
        case "crash" | "cut":
            return Fault(at, kind, rng.choice(slots))
        case "drain":
            return Fault(at, kind, rng.choice([*workers, "gateway-0", "gateway-1"]))
        case "hang":
            return Fault(at, kind, rng.choice(workers), HANG_S)
        case "wipe" | "ghost":
            return Fault(at, kind)
        case "usurp":
            return Fault(at, kind, "scheduler-0", rng.choice((0.5, 3.0)))
        case "jump":
            return Fault(at, kind, "", 0.0, rng.choice((0.5, 3.0, 20.0, -0.5, -3.0, -10.0)))
        case "skew":  # a process's own clock goes on from later, as after a suspension
            return Fault(at, kind, rng.choice(slots), 0.0, rng.choice((0.5, 3.0, 20.0)))
        case "last_word":  # a gateway stands still while the end of a submission is on its way, and arrives late
            return Fault(at, kind, rng.choice(("gateway-0", "gateway-1")), rng.choice((3.0, 5.0)))
        case "last_rites":  # somebody is given up, and Redis away for so long before the burial arrives
            return Fault(at, kind, rng.choice([*workers, "gateway-0", "gateway-1"]), rng.choice((3.0, 4.0)))
        case "bad_steps":
            return Fault(at, kind, "", 0.0, rng.choice((1, 2, 4)))
        case "freeze":
            return Fault(at, kind, rng.choice(slots), rng.choice((0.2, 0.8, 2.0, 5.0)))
        case "nap":  # just long enough to be given up
            return Fault(at, "freeze", rng.choice(workers), rng.choice((0.3, 1.4, 1.7)))
        case "widow":  # a gateway dies, and others go on with its submissions
            return Fault(at, "crash", rng.choice(("gateway-0", "gateway-1")))
        case "stupor":  # so long that the gateway is buried
            return Fault(at, "freeze", rng.choice(("gateway-0", "gateway-1")), 5.0)
        case "blink":  # too short to be given up
            return Fault(at, "partition", rng.choice(workers), rng.choice((0.3, 0.6, 0.9)))
        case "doze_gateway":  # long enough to lose its submissions to another
            return Fault(at, "freeze", rng.choice(("gateway-0", "gateway-1")), rng.choice((2.2, 3.0)))
        case "doze":
            return Fault(at, "freeze", rng.choice([slot for slot in workers if slot.startswith("decode")]), 0.3)
        case "setback":
            return Fault(at, "jump", "", 0.0, rng.choice((-3.0, -10.0)))
        case "island":  # cut off for long enough to be given up, then heard of again
            return Fault(at, "partition", rng.choice(workers), rng.choice((1.6, 2.4)))
        case "partition":
            return Fault(at, kind, rng.choice(slots), rng.choice((0.2, 0.8, 2.0, 5.0)))
        case "slow":
            return Fault(at, kind, rng.choice(slots), rng.uniform(0.5, 3), rng.choice((3, 10, 30)))
        case "redis_down":
            return Fault(at, kind, "", rng.choice((0.01, 0.1, 1.0, 3.0)))
        case "lost_replies":
            return Fault(at, kind, "", rng.uniform(0.1, 2), rng.choice((0.02, 0.2, 0.6)))
        case "deafness":  # nearly every answer is lost
            return Fault(at, "lost_replies", "", rng.choice((1.0, 2.0)), 0.85)
        case "flip":
            return Fault(at, kind, "", 0.0, rng.choice((1, 3, 8)))
        case _:
            return Fault(at, kind, "", rng.uniform(0.2, 2), rng.choice((0.1, 0.5)))
