"""What must hold of the queue's results: each grows by what comes next, ends once, and is one gateway's at a time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anyio

from shared.leases import unpack_tokens
from tests.sim.calls import Ask
from tests.sim.redis_streams import EntryId, Stream, parse_id
from tests.sim.submits import BAD_STATUS, Submitter

if TYPE_CHECKING:
    from tests.sim.machines import Life
    from tests.sim.world import World


class ResultBook:
    """Looks at every entry of every result, as it is written."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: dict[str, EntryId] = {}
        self._tokens: dict[tuple[str, int], list[int]] = {}  # by submission and choice
        self._text: dict[tuple[str, int], str] = {}
        self._ended: set[str] = set()
        self._endings: dict[str, anyio.Event] = {}
        self._owners: dict[str, str] = {}
        self.entries: dict[str, str] = {}  # request -> id of the submission
        self.num_dead = 0
        self.num_adopted = 0

    def forget_all(self) -> None:
        """Redis is empty."""
        for book in (self._seen, self._tokens, self._text, self._ended, self._owners):
            book.clear()
        self.num_dead = 0
        for name in list(self._endings):
            self._endings.pop(name).set()

    def ending(self, submission: str) -> anyio.Event:
        """Set at its end, or when Redis loses everything."""
        event = self._endings.setdefault(submission, anyio.Event())
        if submission in self._ended:
            event.set()
        return event

    def script_ran(self, name: str, keys: list[Any], args: list[Any], answer: Any) -> None:
        match name:
            case "submit_open" if answer[0] == b"open":
                submitted = self._world.redis.store.get(str(keys[1]).encode(), Stream)
                if submitted is None or parse_id(str(args[2]).encode()) not in submitted.entries:
                    self._world.violate(f"{args[0]} opens {args[3]}, of which Redis knows nothing")
                self._opened(str(args[3]), str(args[0]))
                self.entries[f"sub-{args[2]}"] = str(args[3])
            case "result_add" if answer == 1:
                self._check_owner(str(args[2]), str(args[0]))
                self._look(str(args[2]), str(keys[1]))
            case "submit_end" if answer == 1:
                if str(args[4]) not in self._ended:
                    self._check_owner(str(args[4]), str(args[0]))
                    self.num_dead += args[8] != ""
                self._look(str(args[4]), str(keys[1]))
            case "submit_adopt" if answer == b"adopted":
                self.num_adopted += 1

    def admitted(self, request: str, epoch: int, logs: list[bytes]) -> None:
        """What may have been admitted before goes on from what is out, or from more that its gateway has heard of."""
        submission = self.entries.get(request)
        if submission is None or epoch == 1:
            return
        said = [unpack_tokens(log) for log in logs]
        out = [tuple(self._tokens.get((submission, choice), ())) for choice in range(len(logs))]
        if any(log[: len(tokens)] != tokens for log, tokens in zip(said, out, strict=True)):
            self._world.violate(f"{request} is admitted with {said}, of {submission} {out} are out")

    # --- owners ---

    def _opened(self, submission: str, owner: str) -> None:
        before = self._owners.get(submission)
        self._owners[submission] = owner
        if before is None or before == owner:
            return
        world = self._world
        lives = [life for life in world.all_lives if life.incarnation in (before, owner)]
        if all(map(self._is_well, lives)):  # one that wakes up opens what it was given before
            world.violate(f"{owner} takes {submission} from {before}, which is well")

    def _is_well(self, life: Life) -> bool:
        """It has been able to renew all the time."""
        world = self._world
        if not life.is_alive or life.stopping.is_set() or life.is_blind:
            return False
        disturbed = max(life.disturbed_at, world.judge.disturbed_at, world.judge.jumped_at)
        return world.clock.now() - disturbed > world.settings.gateway.submission_lease_s

    def _check_owner(self, submission: str, writer: str) -> None:
        if (owner := self._owners.get(submission)) != writer:
            self._world.violate(f"{writer} writes the result of {submission}, which is {owner}'s")

    # --- entries ---

    def _look(self, submission: str, key: str) -> None:
        stream = self._world.redis.store.get(key.encode(), Stream)
        assert stream is not None
        for entry in stream.after(self._seen.get(submission, (0, 0)), 1 << 30):
            self._seen[submission] = entry
            fields = stream.entries[entry]
            self._entry(submission, dict(zip(fields[::2], fields[1::2], strict=True)))
        if key.encode() not in self._world.redis.store.deadlines:
            self._world.violate(f"the result of {submission} never expires")

    def _entry(self, submission: str, values: dict[bytes, bytes]) -> None:
        world = self._world
        if submission in self._ended:
            world.violate(f"the result of {submission} goes on after its end: {values}")
        client = world.submitters.get(submission)
        if b"status" in values:
            self._ended.add(submission)
            if submission in self._endings:
                self._endings[submission].set()
            self._end(submission, client, values)
            return
        if client is None:
            world.violate(f"tokens for {submission}, which nobody submitted")
            return
        choice = int(values[b"choice"])
        tokens = self._tokens.setdefault((submission, choice), [])
        if int(values[b"offset"]) != len(tokens):
            world.violate(
                f"choice {choice} of {submission} goes on at {values[b'offset']!r} after {len(tokens)} tokens"
            )
        tokens += json.loads(values[b"tokens"])
        text = self._text[submission, choice] = self._said(submission, choice) + values[b"text"].decode()
        if not any(self._begins(tokens, text, ask, choice) for ask in self._asked(client)):
            world.violate(f"the result of {submission} is {tokens}, {text!r} in choice {choice}")

    def _said(self, submission: str, choice: int) -> str:
        return self._text.get((submission, choice), "")

    @staticmethod
    def _asked(client: Submitter) -> list[Ask]:
        """All that was asked under the id."""
        return [ask for ask in (client.ask, client.other()) if ask is not None]

    @staticmethod
    def _begins(tokens: list[int], text: str, ask: Ask, choice: int) -> bool:
        """Whether an answer to that begins like this."""
        if choice >= ask.num_choices:
            return False
        return tuple(tokens) == ask.tokens(choice)[: len(tokens)] and ask.expected(choice)[0].startswith(text)

    def _end(self, submission: str, client: Submitter | None, values: dict[bytes, bytes]) -> None:
        bad = client.ask.queued.bad if client is not None and client.ask.queued is not None else "id"
        if b"error" in values:
            if bad and values[b"status"].decode() != BAD_STATUS[bad]:
                self._world.violate(f"{submission} ends with {values}, though {bad} is wrong with it")
            return
        choices = json.loads(values[b"result"])["choices"]
        said = tuple((choice["text"], choice["finish_reason"]) for choice in choices)
        wanted = [] if bad or client is None else [ask.expected_all() for ask in self._asked(client)]
        parts = [self._said(submission, i) for i in range(len(choices))]
        if said not in wanted or parts != [text for text, _ in said]:
            self._world.violate(f"{submission} ends with {said} after {parts}, expected {wanted}")

    # --- in the end ---

    def noise(self) -> str:
        """What is not at rest yet; "" when all is."""
        store, keys = self._world.redis.store, self._world.keys
        submitted = store.get(keys.submit().encode(), Stream)
        pending = sum(len(group.pending) for group in submitted.groups.values()) if submitted else 0
        if submitted is not None and (submitted.ids or pending):
            return f"{len(submitted.ids)} submissions wait, {pending} are in work"
        for key in [key for key in store.live_keys() if b"}:sub:" in key]:
            if store.data[key][b"state"] != b"done" or key not in store.deadlines:
                return f"{key.decode()} is {store.data[key]}"
        dead = store.get(keys.dead().encode(), Stream)
        if (found := len(dead.ids) if dead else 0) != self.num_dead:
            return f"{found} dead letters, expected {self.num_dead}"
        return ""

    def may_fail(self, client: Submitter, exhausted: set[str]) -> bool:
        """Its client's fault, or no attempt was left."""
        queued = client.ask.queued
        assert queued is not None
        names = {request for request, submission in self.entries.items() if submission == client.ask.name}
        return bool(queued.bad) or bool(names & exhausted)
