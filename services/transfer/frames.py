"""Frames: a length (u32, little endian), then one msgpack message. Raw block bytes follow a `Data` frame only."""

import struct
from typing import TypeVar

import msgspec

from services.transfer.wire import Wire
from shared.errors import WireError
from shared.messages import Message, ReaderMsg, SourceMsg, encode

MAX_FRAME_BYTES = 1 << 20
MAX_READ_BYTES = 8 << 20  # of one `Read`: what a control frame may have to wait behind
MAX_READY_BLOCKS = 8192  # of one `Ready`: ~24 bytes each on the wire

_LENGTH = struct.Struct("<I")
M = TypeVar("M")

reader_messages = msgspec.msgpack.Decoder(ReaderMsg)
"""Decodes what a reader sends."""
source_messages = msgspec.msgpack.Decoder(SourceMsg)
"""Decodes what a source sends."""


def frame(message: Message) -> bytes:
    """The message as bytes, length first."""
    body = encode(message)
    assert len(body) <= MAX_FRAME_BYTES
    return _LENGTH.pack(len(body)) + body


async def read_frame(wire: Wire, decoder: msgspec.msgpack.Decoder[M], *, patient: bool) -> M:
    """The next message.

    :param patient: wait for its first byte without limit; the rest must come within the wire's timeout.
    :raises WireError: too long, or not a message of the decoder's channel.
    :raises LinkLost: the connection ended or fell silent.
    """
    (length,) = _LENGTH.unpack(await wire.recv_exactly(_LENGTH.size, patient=patient))
    if length > MAX_FRAME_BYTES:
        raise WireError(f"frame of {length} bytes, at most {MAX_FRAME_BYTES} are allowed")
    body = await wire.recv_exactly(length)
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise WireError(f"not a message: {exc}") from None
