"""What stops a command with one clear line and a non-zero exit."""

from shared.errors import BatonError


class CommandError(BatonError):
    """A command cannot do what it was asked. `str(error)` is all that the user sees."""

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        self.details = details  # e.g. the last lines of a log; printed below the message
