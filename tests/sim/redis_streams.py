"""The streams of the Redis in memory, with their consumer groups. See `redis_store.py`."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sim.redis_store import Store

EntryId = tuple[int, int]
LAST = (1 << 63, 0)
SCANS_PER_CLAIM = 10  # XAUTOCLAIM looks at so many times COUNT entries


class Refused(Exception):
    """The server answers with an error."""


@dataclass(slots=True)
class Pending:
    """An entry that a consumer of a group has, and has not acknowledged."""

    consumer: bytes
    since_ms: int


@dataclass(slots=True)
class Group:
    last: EntryId
    pending: dict[EntryId, Pending] = field(default_factory=dict)


class Stream:
    """Entries by id, oldest first."""

    def __init__(self) -> None:
        self.ids: list[EntryId] = []
        self.entries: dict[EntryId, list[bytes]] = {}
        self.last: EntryId = (0, 0)
        self.groups: dict[bytes, Group] = {}

    def add(self, now_ms: int, fields: list[bytes], entry: EntryId | None = None) -> EntryId:
        if entry is None:
            entry = (now_ms, 0) if now_ms > self.last[0] else (self.last[0], self.last[1] + 1)
        if entry <= self.last:
            raise Refused("ERR The ID specified in XADD is equal or smaller than the target stream top item")
        self.last = entry
        self.ids.append(entry)
        self.entries[entry] = fields
        return entry

    def after(self, entry: EntryId, count: int) -> list[EntryId]:
        start = bisect_right(self.ids, entry)
        return self.ids[start : start + count]

    def delete(self, entry: EntryId) -> int:
        if self.entries.pop(entry, None) is None:
            return 0
        del self.ids[bisect_left(self.ids, entry)]
        return 1

    def shown(self, entry: EntryId) -> list[Any]:
        return [show_id(entry), self.entries[entry]]


def parse_id(value: bytes) -> EntryId:
    ms, _, seq = value.partition(b"-")
    return int(ms), int(seq or 0)


def show_id(entry: EntryId) -> bytes:
    return b"%d-%d" % entry


class StreamCommands:
    """Each `_do_<command>` is one command on the store's streams."""

    def __init__(self, store: "Store") -> None:
        self._store = store

    def _stream(self, key: bytes) -> Stream | None:
        return self._store.get(key, Stream)

    def _do_xadd(self, key: bytes, *rest: bytes) -> bytes:
        store, limit = self._store, None
        if rest[0] == b"MAXLEN":
            assert rest[1] == b"~", "only rough limits are modelled, which trim whole nodes of the tree"
            limit, rest = rest[2], rest[3:]
        entry, *fields = rest
        store.added[key] = None
        stream = store.make(key, Stream)
        added = stream.add(store.now_ms(), fields, None if entry == b"*" else parse_id(entry))
        assert limit is None or len(stream.ids) <= int(limit), "the model of MAXLEN ~ ends here"
        return show_id(added)

    def _do_xdel(self, key: bytes, *entries: bytes) -> int:
        stream = self._stream(key)
        return sum(stream.delete(parse_id(entry)) for entry in entries) if stream else 0

    def _do_xtrim(self, key: bytes, how: bytes, count: bytes) -> int:
        assert how == b"MAXLEN"
        stream = self._stream(key)
        surplus = stream.ids[: max(0, len(stream.ids) - int(count))] if stream else []
        return sum(stream.delete(entry) for entry in surplus) if stream else 0

    def _do_xrange(self, key: bytes, first: bytes, last: bytes) -> list[Any]:
        assert first == last, "only single entries are modelled"
        stream, entry = self._stream(key), parse_id(first)
        return [stream.shown(entry)] if stream is not None and entry in stream.entries else []

    def _do_xlen(self, key: bytes) -> int:
        stream = self._stream(key)
        return len(stream.ids) if stream else 0

    # --- groups ---

    def _group(self, key: bytes, name: bytes) -> tuple[Stream, Group]:
        stream = self._stream(key)
        if stream is None or name not in stream.groups:
            raise Refused(f"NOGROUP No such key '{key.decode()}' or consumer group '{name.decode()}'")
        return stream, stream.groups[name]

    def _do_xgroup(self, action: bytes, key: bytes, name: bytes, start: bytes, *options: bytes) -> bytes:
        assert (action, options) == (b"CREATE", (b"MKSTREAM",))
        stream = self._store.make(key, Stream)
        if name in stream.groups:
            raise Refused("BUSYGROUP Consumer Group name already exists")
        stream.groups[name] = Group(parse_id(start))
        return b"OK"

    def _do_xack(self, key: bytes, name: bytes, *entries: bytes) -> int:
        stream = self._stream(key)
        if stream is None or name not in stream.groups:
            return 0
        pending = stream.groups[name].pending
        return sum(pending.pop(parse_id(entry), None) is not None for entry in entries)

    def _do_xclaim(self, key: bytes, name: bytes, consumer: bytes, min_idle: bytes, entry: bytes, *rest: bytes) -> Any:
        assert (min_idle, rest[0], rest[2:]) == (b"0", b"IDLE", (b"JUSTID",))
        _, group = self._group(key, name)
        claimed = parse_id(entry)
        if claimed not in group.pending:
            return []
        group.pending[claimed] = Pending(consumer, self._store.now_ms() - int(rest[1]))
        return [entry]

    def _do_xautoclaim(
        self, key: bytes, name: bytes, consumer: bytes, min_idle: bytes, start: bytes, *options: bytes
    ) -> list[Any]:
        count = int(options[1]) if options else 100
        stream, group = self._group(key, name)
        now_ms, cursor, claimed = self._store.now_ms(), b"0-0", []
        for scanned, (entry, pending) in enumerate(self._from(group, parse_id(start))):
            if scanned == SCANS_PER_CLAIM * count or len(claimed) == count:
                cursor = show_id(entry)
                break
            if now_ms - pending.since_ms >= int(min_idle):
                group.pending[entry] = Pending(consumer, now_ms)
                claimed.append(stream.shown(entry) if entry in stream.entries else None)  # as Redis 6 does
        return [cursor, claimed]

    @staticmethod
    def _from(group: Group, start: EntryId) -> Iterator[tuple[EntryId, Pending]]:
        return iter(sorted(item for item in list(group.pending.items()) if item[0] >= start))

    # --- reads: None if there is nothing, and the caller blocks ---

    def xread(self, count: int, wanted: dict[bytes, bytes]) -> list[Any] | None:
        """Entries after the given ids."""
        reply = []
        for key, last in wanted.items():
            stream = self._stream(key)
            if stream is not None and stream.ids and (found := stream.after(parse_id(last), count)):
                reply.append([key, [stream.shown(entry) for entry in found]])
        return reply or None

    def xreadgroup(self, name: bytes, consumer: bytes, count: int, key: bytes) -> list[Any] | None:
        """Entries that no consumer of the group has been given.

        :raises Refused: there is no such group.
        """
        stream, group = self._group(key, name)
        found = stream.after(group.last, count)
        if not found:
            return None
        group.last = found[-1]
        for entry in found:
            group.pending[entry] = Pending(consumer, self._store.now_ms())
        return [[key, [stream.shown(entry) for entry in found]]]
