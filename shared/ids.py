"""Names for the things that messages talk about. Strings stay opaque: nobody parses an id."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""What a client asked; chosen by the gateway, unique in a cell."""
WorkerId = NewType("WorkerId", str)
"""A worker's configured name (`decode-0`); survives a restart, and so is never a key of state."""
Incarnation = NewType("Incarnation", str)
"""One life of a process: random, never reused. State of a worker or gateway is keyed by it."""
AttemptId = NewType("AttemptId", str)
"""Random id beside the epoch; together they are the fence of a lease."""
BlockId = NewType("BlockId", int)
"""Index of a block in one worker's pool."""
BlockHash = NewType("BlockHash", bytes)
"""Chained hash of a full block's tokens (see `shared.hashing`): what a prefix hit is found by."""
BlockDigest = NewType("BlockDigest", bytes)
"""Digest of a block's bytes, checked after each transfer."""

TokenCount = NewType("TokenCount", int)
BlockCount = NewType("BlockCount", int)
Seconds = NewType("Seconds", float)
