"""Block hashes: fixed vectors, chaining, and no two field tuples with one preimage."""

from hypothesis import given
from hypothesis import strategies as st

from shared import capability
from shared.hashing import block_digest, block_hash, block_hashes, chain_root
from shared.ids import AttemptId, Incarnation, RequestId

VECTORS = {
    "root": "41ac3ac4644a3f669f01c4068bdffa6b",
    "root_salt": "8815bd4d4567c81316e9a3b2a4fade94",
    "block": "1dca0c7920475844ab7ab5dfcc03075e",
    "digest": "f1f8a93f50849ac39408a4433b952d71",
}


def test_published_vectors() -> None:
    """The same in every process and version of Python; a change breaks every deployed cache."""
    assert chain_root().hex() == VECTORS["root"]
    assert chain_root(salt=b"team", adapter=b"a", media=(b"x", b"y")).hex() == VECTORS["root_salt"]
    assert block_hash(chain_root(), range(16)).hex() == VECTORS["block"]
    assert block_digest(bytes(range(256))).hex() == VECTORS["digest"]


def test_only_full_blocks_have_a_hash() -> None:
    """And a longer prompt's hashes begin with the shorter one's."""
    tokens = list(range(40))
    assert len(block_hashes(chain_root(), tokens[:15], 16)) == 0
    assert len(block_hashes(chain_root(), tokens[:16], 16)) == 1
    longer = block_hashes(chain_root(), tokens, 16)
    assert len(longer) == 2
    assert block_hashes(chain_root(), tokens[:17], 16) == longer[:1]
    assert block_hash(longer[0], tokens[16:32]) == longer[1]


fields = st.tuples(st.binary(max_size=4), st.binary(max_size=4), st.lists(st.binary(max_size=3), max_size=3))


@given(fields, fields)
def test_different_fields_never_share_a_root(a: tuple, b: tuple) -> None:
    """Salt, adapter and media are length-prefixed: moving a byte from one to the next changes the root."""
    same = chain_root(salt=a[0], adapter=a[1], media=a[2]) == chain_root(salt=b[0], adapter=b[1], media=b[2])
    assert same == (a == b)


def test_a_capability_fits_only_what_it_was_minted_for() -> None:
    """Each field counts, and so does the border between two of them."""
    key = b"k" * 32
    good = (RequestId("r"), 1, AttemptId("a"), Incarnation("p1"), Incarnation("d1"))
    minted = capability.mint(key, *good)
    assert capability.verify(minted, key, *good)
    assert not capability.verify(minted, b"x" * 32, *good)
    for i, other in enumerate((RequestId("s"), 2, AttemptId("b"), Incarnation("p2"), Incarnation("d2"))):
        changed = (*good[:i], other, *good[i + 1 :])
        assert not capability.verify(minted, key, *changed)  # type: ignore[arg-type]
    assert minted != capability.mint(key, RequestId("r"), 1, AttemptId("ap"), Incarnation("1"), Incarnation("d1"))
