"""What must hold: after every event, at a fine grain, and in the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from services.transfer import Offer
from shared.ids import BlockId, RequestId
from shared.keys import NOBODY
from shared.messages import ReleaseAnswer, Tokens, encode
from shared.roster import MISSED_GREETINGS
from tests.sim.book import Book
from tests.sim.calls import Call
from tests.sim.hints import HintBook
from tests.sim.redis_streams import Stream
from tests.sim.results import ResultBook
from tests.sim.submits import Submitter

if TYPE_CHECKING:
    from tests.sim.machines import Life
    from tests.sim.world import World

GRACE_S = 0.3
"""A healthy worker has heard of a cancel so long after it took effect."""

OVER = {"cancel": (b"cancelled",), "requeue": (b"requeued", b"failed"), "complete": (1,)}
"""After these answers nobody may go on with that epoch of the request."""

CANCEL_GRACE_S = 0.5
"""A healthy gateway has cancelled so long after its client left."""

UNTOLD_LOOKS = 3
"""A look comes every half second."""

CREDITED = {"dispatch": (3,), "refund": (0,), "complete": (5,)}
"""Scripts that move credit, and where the worker's key stands in their keys."""


class Judge:
    """Watches one world and reports to it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._heard: dict[tuple[str, RequestId], tuple[int, int]] = {}  # (worker, request) -> (epoch, step)
        self._over: dict[str, tuple[int, float]] = {}  # request -> (its last epoch that is over, since)
        self._left: dict[str, float] = {}  # request -> when its client was gone
        self._requeues: dict[str, int] = {}
        self._exhausted: set[str] = set()  # requests that ended because no attempt was left
        self._calls: dict[str, list[Call]] = {}
        self._gateways: dict[str, Life] = {}
        self._disturbed_at = 0.0
        self._num_disturbances = 0  # under way
        self.jumped_at = 0.0  # Redis' clock was set
        self._troubles: list[tuple[float, float]] = []
        self.num_ghosts = 0
        self._untold: dict[str, int] = {}  # worker -> looks in a row at which it was idle and had not told all
        self.last_end = 0.0  # when a request was completed or a client left
        self._held: set[tuple[str, str, int]] = set()  # (reader, request, epoch)
        self.book = Book(world.redis.store, world.keys, world.violate)
        self.results = ResultBook(world)
        self.hints = HintBook(world)
        world.redis.observers.append(self.script_ran)
        world.redis.observers.append(self.book.script_ran)
        world.redis.observers.append(self.results.script_ran)
        world.redis.observers.append(self.hints.script_ran)

    # --- events ---

    def began(self, call: Call, life: Life) -> None:
        self._calls.setdefault(life.incarnation, []).append(call)
        self._gateways[call.ask.name] = life

    def calls_of(self, life: Life) -> list[Call]:
        return self._calls.get(life.incarnation, [])

    def gateway_of(self, call: Call) -> Life:
        return self._gateways[call.ask.name]

    def cancel_heard(self, life: Life, request_id: RequestId, epoch: int, step: int) -> None:
        known = self._heard.get((life.incarnation, request_id), (0, 0))
        if epoch > known[0]:
            self._heard[life.incarnation, request_id] = (epoch, step)

    def left(self, call: Call) -> None:
        """Its client is gone, and its gateway knows."""
        self._left[call.ask.name] = self.last_end = self._world.clock.now()

    def script_ran(self, name: str, keys: list, args: list, answer: object) -> None:
        if answer in OVER.get(name, ()):
            self._over[str(args[0])] = (int(args[1]), self._world.clock.now())
        if name == "complete" and answer == 1:
            self.last_end = self._world.clock.now()
        if name == "submit_adopt" and answer == b"adopted":
            self._adopted(str(args[1]), int(args[2]))
        if name == "requeue":
            self._count_attempts(str(args[0]), answer)
        if name == "accept" and answer == 1:
            self._check_thrift(keys, args)
        if name == "admit" and answer == b"admitted":
            self._check_bound(int(args[3]))
            self._over.pop(str(args[0]), None)  # of an earlier life of it that Redis has forgotten
            self.results.admitted(str(args[0]), int(args[5]), args[6:])
        if name in ("bury", "bury_gateway") and answer is not None:
            self._buried(str(args[0]))
        for place in CREDITED.get(name, ()):
            self._check_credit(keys[place].encode())

    @contextmanager
    def disturbance(self, seconds: float) -> Iterator[None]:
        """Nobody can count on Redis meanwhile; retries are up to half a second apart."""
        self._num_disturbances += 1
        yield
        self._num_disturbances -= 1
        now = self._world.clock.now()
        self._disturbed_at = now + 1.0
        self._troubles.append((now - seconds, now + 0.5))

    @property
    def disturbed_at(self) -> float:
        """Until when nobody could count on Redis, as far as is known by now."""
        return self._world.clock.now() if self._num_disturbances else self._disturbed_at

    def wiped(self) -> None:
        """Redis has lost everything: what it said before counts no more."""
        self._over.clear()
        self._requeues.clear()
        self.book.forget_all()
        self.results.forget_all()
        self.hints.forget()

    def _adopted(self, request_id: str, epoch: int) -> None:
        """What another gateway goes on with is over at its old epoch."""
        if epoch > self._over.get(request_id, (0, 0.0))[0]:
            self._over[request_id] = (epoch, self._world.clock.now())

    def _count_attempts(self, request_id: str, answer: object) -> None:
        """A request is tried so often and no more."""
        limit = self._world.plan.max_attempts
        tries = self._requeues.get(request_id, 0) + (answer in (b"requeued", b"failed"))
        self._requeues[request_id] = tries
        if (answer == b"requeued" and tries >= limit) or (answer == b"failed" and tries != limit):
            self._world.violate(f"{request_id} was lost {tries} times of {limit}, says requeue: {answer}")
        if answer == b"failed":
            self._exhausted.add(request_id)

    def _check_bound(self, limit: int) -> None:
        """The queue is no longer than whoever queued last allowed."""
        waiting = len(self._world.redis.store.get(self._world.keys.queued().encode()) or ())
        if waiting > limit:
            self._world.violate(f"{waiting} wait in the queue, {limit} may")

    def haunt(self) -> None:
        """The streams of the gateways say their last word again, and a late word of an old epoch, wrong in itself. No
        script does either; the gateway must not believe it all the same. Of a request that is over it need not know the
        epoch: when it was buried, the marker went with its stream."""
        store = self._world.redis.store
        for value in [v for k, v in store.data.items() if b":tokens:" in k and v.ids]:
            echo = value.entries[value.ids[-1]]
            value.add(store.now_ms(), echo)
        for key, value in list(store.data.items()):
            if b":req:" not in key or value.get(b"st") in (b"done", b"cancelled") or int(value.get(b"ep", 1)) < 2:
                continue
            request_id, epoch = key.rsplit(b":", 1)[1].decode(), int(value[b"ep"]) - 1
            num = store.run(b"STRLEN", key.replace(b":req:", b":log:") + b":0") // 4
            ghost = Tokens(RequestId(request_id), epoch, 0, num, (998,))
            stream = self._world.keys.tokens(value[b"gw"].decode()).key.encode()
            if stream in store.data:  # else its gateway is dead and forgotten
                store.run(b"XADD", stream, b"*", b"m", encode(ghost))
                self.num_ghosts += 1
            self.hints.haunt(RequestId(request_id), value)

    def _check_thrift(self, keys: list, args: list) -> None:
        """Decode goes on with prefill's blocks, or tells it in the same breath that nobody wants them."""
        request_id, epoch, holder, phase = str(args[0]), int(args[1]), str(args[3]), args[4]
        is_alone = phase == "prefill" or keys[2] == self._world.keys.held(NOBODY)
        if not is_alone and not args[6] and (holder, request_id, epoch) not in self._held:
            self._world.violate(f"{holder} computes {request_id}/{epoch} itself, and prefill does not hear of it")

    # --- transfers ---

    def released(self, reader: str, answer: ReleaseAnswer, offer: Offer | None) -> None:
        """A source answers `held` only where it did hold the blocks until now."""
        if answer.answer == "held":
            self._held.add((reader, answer.request_id, answer.epoch))
            if offer is None or offer.outcome != "released":
                said = "never offered" if offer is None else offer.outcome
                self._world.violate(f"held, says the source of {answer.request_id}/{answer.epoch}, but it was {said}")

    def fetched(self, life: Life, request_id: RequestId, epoch: int) -> None:
        """No fetch is good before the source has confirmed it."""
        if (life.incarnation, request_id, epoch) not in self._held:
            self._world.violate(f"{life.incarnation} took {request_id}/{epoch} without its source's word")

    def byte_lands(self, reader: str, block: BlockId) -> None:
        """A block that bytes move into is set aside for that, or still in quarantine."""
        life = next((one for one in self._world.lives.values() if one.incarnation == reader), None)
        if life is not None and life.pool is not None and block not in life.pool._landing | life.pool._quarantined:
            self._world.violate(f"bytes land in block {block} of {reader}, which is not set aside for them")

    # --- deaths ---

    def _buried(self, incarnation: str) -> None:
        """The living are not buried: only who is dead, leaves, or could not speak."""
        world = self._world
        life = next((one for one in world.all_lives if one.incarnation == incarnation), None)
        if life is None or not life.is_alive or life.stopping.is_set() or life.hung or life.gave_up:
            return
        if not life.is_blind and world.clock.now() - life.disturbed_at > 1.0:
            world.violate(f"{incarnation} was buried alive")

    def nobody_waits_for(self, life: Life) -> None:
        """A worker whose step never ends has lost all that it had, unless the reaper must not reap."""
        if not self._may_reap(5.0):
            return
        for key, value in self._world.redis.store.data.items():
            if b":req:" in key and value.get(b"st") in (b"dispatched", b"prefill", b"decode"):
                holder = value[b"pw"] if value[b"st"] != b"decode" and value[b"pw"] != b"-" else value[b"dw"]
                if holder == life.incarnation.encode():
                    self._world.violate(f"{key.decode()} still waits for {life.incarnation}, which hangs")

    def _may_reap(self, for_s: float) -> bool:
        """Whether a scheduler has been leading, well and free to reap for so long."""
        world = self._world
        life = world.lives["scheduler-0"]
        if not life.is_alive or life.scheduler is None or life.is_blind:
            return False
        now, reaper = life.clock.now(), life.scheduler.reaper
        ahead = now - world.clock.now()  # its own clock is another one
        disturbed_at = max(life.disturbed_at, self.disturbed_at, self.jumped_at) + ahead
        quiet_since = max(reaper._quiet_since, life.link.last_outage or 0.0, disturbed_at)
        in_time = now - reaper.last_look < 1.0 and not world.redis.down
        return in_time and now - quiet_since > world.settings.lease.lease_s + for_s

    def _check_leases(self) -> None:
        """No lease outlives its deadline, once the reaper may reap."""
        world = self._world
        if not self._may_reap(1.0):
            return
        deadline_ms = world.redis.store.now_ms() - 1500
        for member, score in (world.redis.store.get(world.keys.leases().encode()) or {}).items():
            if score < deadline_ms:
                world.violate(f"the lease of {member.decode()} is over by {deadline_ms - score + 1500:.0f} ms")

    def work_seen(self, life: Life, seq_id: str, step: int) -> None:
        """A seq is in a step: nobody may have told this worker, or anybody long ago, that it is cancelled."""
        request_id, epoch, _ = seq_id.split("/")
        told = self._heard.get((life.incarnation, RequestId(request_id)))
        if told is not None and int(epoch) <= told[0] and step > told[1] + 1:
            self._world.violate(f"{life.incarnation} works on {seq_id}, whose cancel it heard before")
        now = self._world.clock.now()
        blind_until = now if life.is_blind else max(life.disturbed_at, self.disturbed_at)
        grace_s = GRACE_S + life.step_s()
        last_epoch, since = self._over.get(request_id, (0, now))
        if int(epoch) <= last_epoch and now - max(since, blind_until) > grace_s:
            self._world.violate(f"{life.incarnation} works on {seq_id}, over {now - since:.2f} s ago")
        since = self._left.get(request_id, now)
        if (
            now - max(since, blind_until) <= grace_s + CANCEL_GRACE_S
            or (gateway := self._gateways[request_id]).over.is_set()
        ):
            return
        if now - max(since, gateway.disturbed_at) > grace_s + CANCEL_GRACE_S and not gateway.is_blind:
            self._world.violate(f"{life.incarnation} works on {seq_id}, whose client left {now - since:.2f} s ago")

    # --- at a fine grain ---

    def _check_credit(self, worker: bytes) -> None:
        """What a worker's record says is taken is what its tasks hold, and never more than it has."""
        store = self._world.redis.store
        record = store.data.get(worker)
        if record is None or record.get(b"state") == b"dead":
            return
        held = store.data.get(worker.replace(b":worker:", b":held:"), {})
        taken = int(record[b"taken"])
        total = sum(int(credit) for credit in held.values())
        if taken != total or not 0 <= taken <= int(record[b"blocks"]):
            self._world.violate(f"credit of {worker.decode()}: {taken} taken, {total} held")

    def look(self) -> None:
        """Pools and books of everybody who is alive."""
        self._check_leases()
        for failure in self._world.redis.failed_scripts:
            self._world.violate(failure)
        for key in [key for key in self._world.redis.store.data if b"}:worker:" in key]:
            self._check_credit(key)
        for life in self._world.lives.values():
            if life.is_alive and life.engine is not None and not life.proc.frozen:
                try:
                    life.engine.check()
                except AssertionError as exc:
                    self._world.violate(f"{life.incarnation}: pool: {exc}", exc)
                self._check_told(life)
            if life.is_alive and life.scheduler is not None:
                life.scheduler.ledger.check()
            if life.is_alive and life.index is not None:
                life.index.index.check()

    def _check_told(self, life: Life) -> None:
        """A worker that is idle has told of all that changed in its cache."""
        assert life.pool is not None
        assert life.engine is not None
        is_idle = life.worker is not None and life.worker.idle() and not life.engine.is_stepping
        untold = is_idle and bool(life.pool._cache._changes)
        looks = self._untold[life.incarnation] = self._untold.get(life.incarnation, 0) + 1 if untold else 0
        if looks == UNTOLD_LOOKS:
            self._world.violate(
                f"{life.incarnation} is idle and has not told what changed: {life.pool._cache._changes}"
            )

    # --- in the end ---

    def noise(self) -> str:
        """What is not at rest yet; "" when all is."""
        world, store = self._world, self._world.redis.store
        for slot in world.slots():
            life = world.lives[slot]
            if not life.is_alive:
                return f"{slot} is down"
            if life.engine is not None and (busy := self._busy(life)):
                return f"{life.incarnation}: {busy}"
        for key, value in list(store.data.items()):
            if key == world.keys.dead().encode():
                continue
            if isinstance(value, Stream) and len(value.ids) > 8 * key.endswith(b":kv") and key not in store.deadlines:
                return f"{key.decode()} has {len(value.ids)} entries"
        for key in [key for key in store.data if b"}:held:" in key or b"}:open:" in key]:
            return f"{key.decode()} is not empty: {store.data[key]}"
        for name in (world.keys.queued(), world.keys.leases()):
            if store.get(name.encode()):
                return f"{name} is not empty"
        return self.results.noise() or self._index_differs() or self._keys_left()

    def _busy(self, life: Life) -> str:
        assert life.engine is not None
        if life.worker is None:
            return "it starts"
        stats = life.engine.stats()
        if not life.worker.idle():
            return f"jobs {life.worker.stats()}"
        if stats.blocks_free != stats.blocks_total or stats.extra["blocks_promised"]:
            return f"{stats.blocks_total - stats.blocks_free} blocks are not free"
        return ""

    def _index_differs(self) -> str:
        world = self._world
        index = world.lives["index-0"].index
        assert index is not None
        known = index.index._workers
        lives = {life.incarnation: life for life in world.lives.values() if life.engine is not None}
        if ghosts := set(known) - set(lives):
            return f"the index knows {ghosts}"
        for incarnation, life in lives.items():
            assert life.engine is not None
            have = set(known[incarnation].hashes) if incarnation in known else set()
            if have != set(life.engine.cached_hashes()):
                return f"the index differs from {incarnation}"
        return ""

    def final(self) -> None:
        """Every client was answered rightly, and nothing is left behind."""
        world = self._world
        self.look()
        for call in world.calls:
            if fault := call.fault():
                world.violate(f"{call.ask.name}: {fault}")
            if call.outcome == "error" and not self._may_fail(call):
                world.violate(f"{call.ask.name}: error {call.error}")

    def _may_fail(self, call: Call | Submitter) -> bool:
        """Only if the queue is short, no attempt is left, its gateway was stopped or given up as dead because it could
        not speak for too long, or it is the client's own fault."""
        if isinstance(call, Submitter):
            return self.results.may_fail(call, self._exhausted)
        if call.error.startswith("429"):
            return self._world.plan.max_queued < 1000
        if call.ask.name in self._exhausted:
            return True
        if call.error == "503 shutting_down":
            return self._gateways[call.ask.name].stopping.is_set()
        blind_s, until = 0.0, 0.0
        for start, end in sorted(self._troubles + self._gateways[call.ask.name].troubles):
            if call.started_at - 10 < end and start < call.ended_at:
                blind_s += max(0.0, end - max(start, until))
                until = max(until, end)
        return blind_s >= self._world.settings.lease.heartbeat_s * (MISSED_GREETINGS - 1)

    def _keys_left(self) -> str:
        """Keys that belong to nobody alive and do not expire."""
        world, store = self._world, self._world.redis.store
        alive = {life.incarnation.encode() for life in world.lives.values() if life.is_alive}
        shared = {b"sched", b"kv", b"index", b"workers", b"leader", b"deployment_key", b"gateways", b"submit", b"dead"}
        for key in store.live_keys():
            parts = key.split(b":", 2)
            if key in store.deadlines or parts[1] in shared or (len(parts) > 2 and parts[2] in alive):
                continue
            return f"key {key.decode()} is left"
        return ""
