"""Block hashes (what a prefix hit is found by) and block digests (what a transfer is checked by).

A block hash is a chain: H(domain | parent | tokens). The domain of the first block is the chain's root, a
hash over length-prefixed fields, so that no two tuples of fields can give the same preimage. Never
`hash()`: the same prompt has the same hashes in every process, and `tests/unit/shared` holds vectors.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

import xxhash

from shared.ids import BlockDigest, BlockHash

ALGORITHM = b"baton-kv-1"
HASH_BYTES = 16


def chain_root(*, salt: bytes = b"", adapter: bytes = b"", media: Sequence[bytes] = ()) -> BlockHash:
    """Parent of a prompt's first block. `salt` scopes sharing, `adapter` is the adapter's digest, `media`
    the digests of images and audio in the prompt, in order."""
    fields = [ALGORITHM, salt, adapter, *media]
    preimage = struct.pack("<I", len(fields)) + b"".join(struct.pack("<I", len(f)) + f for f in fields)
    return BlockHash(blake2b(preimage, digest_size=HASH_BYTES, person=b"baton-root").digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash of one full block under its parent."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return BlockHash(blake2b(parent + packed, digest_size=HASH_BYTES, person=b"baton-block").digest())


def block_hashes(root: BlockHash, token_ids: Sequence[int], block_size: int) -> tuple[BlockHash, ...]:
    """Hashes of all full blocks of `token_ids`; a last, partly filled block has none."""
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return tuple(hashes)


def block_digest(data: bytes | memoryview) -> BlockDigest:
    """Digest of a block's bytes: xxh3-128. Guards against faults, not against an attacker (the
    connection's capability does that)."""
    return BlockDigest(xxhash.xxh3_128_digest(data))
