"""What allows a reader to pull a request's blocks: an HMAC that the scheduler mints at dispatch.

The key is random per deployment and lives in Redis; no service prints it.
"""

import hmac
import struct

from shared.ids import AttemptId, Incarnation, RequestId


def mint(
    key: bytes, request_id: RequestId, epoch: int, attempt: AttemptId, source: Incarnation, reader: Incarnation
) -> bytes:
    """Capability for `reader` to pull this attempt's blocks from `source`. 32 bytes."""
    fields = [request_id.encode(), struct.pack("<Q", epoch), attempt.encode(), source.encode(), reader.encode()]
    preimage = b"baton-capability-1" + b"".join(struct.pack("<I", len(f)) + f for f in fields)
    return hmac.digest(key, preimage, "sha256")


def verify(
    capability: bytes,
    key: bytes,
    request_id: RequestId,
    epoch: int,
    attempt: AttemptId,
    source: Incarnation,
    reader: Incarnation,
) -> bool:
    """Whether `capability` was minted for exactly these; constant time."""
    return hmac.compare_digest(capability, mint(key, request_id, epoch, attempt, source, reader))
