"""Typed faults of the world. Scarcity is `None`, a caller's bug is an assert; neither is found here."""


class BatonError(Exception):
    """Base of every fault that Baton raises by name. `str(error)` may be shown to an operator."""


class ConfigError(BatonError):
    """The configuration is wrong. The message names the field, and the process does not start."""


class ModelError(BatonError):
    """A model file is missing, damaged or of an architecture that this build does not know."""


class GrammarError(BatonError):
    """A grammar that cannot be compiled, or that grew too complex while tokens were chosen by it."""


class BusError(BatonError):
    """Redis could not be reached, or refused a command, for longer than the retry limit."""


class BusFull(BusError):
    """Redis has no memory for what is new. What it has goes on, and will free some."""


class WireError(BatonError):
    """Bytes that are not a message of the expected channel or protocol version."""


class StaleFence(BatonError):
    """An (epoch, attempt) that no longer holds the request: the work must be dropped, silently."""


class StreamGap(BatonError):
    """Tokens of a request arrived with a hole before them; the token log repairs it."""

    def __init__(self, request_id: str, want: int, got: int) -> None:
        super().__init__(f"request {request_id}: expected token index {want}, got {got}")
        self.request_id, self.want, self.got = request_id, want, got


class TransferError(BatonError):
    """Blocks could not be fetched or verified. Raised only once no byte can move any more, so the
    reader may reuse the destination blocks at once."""


class TransferRefused(TransferError):
    """The source knows the request no longer, the capability is bad, or the pools do not fit."""


class TransferOver(TransferRefused):
    """The attempt is over at its source: it ended with its first token, or was cancelled. Nothing is to be done."""


class TransferStale(TransferError):
    """The source answered `stale` to the release: the bytes read may be another request's."""


class DigestMismatch(TransferError):
    """A block arrived with other bytes than were announced."""
