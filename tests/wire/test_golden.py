"""The bytes of every message are pinned: a rolling upgrade reads what the old version wrote."""

import inspect
import json
from pathlib import Path

import msgspec
import pytest

from shared import messages
from shared.ids import Incarnation
from shared.keys import Keys
from tests.wire.samples import SAMPLES, D

GOLDEN: dict[str, str] = json.loads(Path(__file__).with_name("golden.json").read_text())


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_message_has_its_golden_bytes(name: str) -> None:
    """Encoded as ever, and the old bytes decode to the same message."""
    sample = SAMPLES[name]
    assert messages.encode(sample).hex() == GOLDEN[name]
    assert msgspec.msgpack.decode(bytes.fromhex(GOLDEN[name]), type=type(sample)) == sample


def test_every_message_has_a_sample() -> None:
    """A new struct without golden bytes fails here."""
    structs = {
        cls
        for _, cls in inspect.getmembers(messages, inspect.isclass)
        if issubclass(cls, msgspec.Struct) and cls.__module__ == messages.__name__ and cls is not messages.Message
    }
    assert structs == {type(sample) for sample in SAMPLES.values()}
    assert set(GOLDEN) == set(SAMPLES)


def test_a_new_field_does_not_break_an_old_reader() -> None:
    """Durable streams carry maps: unknown fields are skipped."""
    raw = msgspec.msgpack.decode(bytes.fromhex(GOLDEN["cancel"]))
    raw["added_later"] = 1
    assert Keys("c").control(D).decode(msgspec.msgpack.encode(raw)) == SAMPLES["cancel"]


def test_a_channel_refuses_another_channels_message() -> None:
    """The union of a channel is closed."""
    with pytest.raises(msgspec.ValidationError):
        Keys("c").control(Incarnation("x")).decode(bytes.fromhex(GOLDEN["admitted"]))


def test_all_keys_of_a_cell_share_one_hash_tag() -> None:
    """One slot per cell, so that a script may touch any of them."""
    keys = Keys("blue")
    made = [
        *(keys.sched().key, keys.work(D).key, keys.control(D).key, keys.tokens(D).key, keys.kv().key),
        *(keys.index().key, keys.reply(D).key, keys.request(SAMPLES["request"].request_id), keys.queued()),
        *(keys.log(SAMPLES["request"].request_id), keys.leases(), keys.workers(), keys.worker(D), keys.held(D)),
        *(keys.leader(), keys.deployment_key()),
    ]
    assert len(set(made)) == len(made)
    assert all(key.startswith("{blue}:") for key in made)
