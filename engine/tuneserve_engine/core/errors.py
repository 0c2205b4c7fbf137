"""Errors that end a job.

EngineError
├── UserError        the request is wrong; category "user"; repeating it gives the same answer
└── ServerError      we failed; category "server"; the request itself may be fine
    ├── FileDamaged  a checkpoint or recovery point is not as it was written
    └── FilesAway    the store of files does not answer

A message says what was wrong, the value, the limit, and what to do next.
"""

from typing import ClassVar, Literal

Category = Literal["user", "server", "unknown"]


class EngineError(Exception):
    """An error that ends one job, with a message that the job's owner reads."""

    category: ClassVar[Category] = "unknown"
    no_room = False  # True: no room here and now; later, or on another worker, it may fit
    files_away = False  # True: a file could not be reached; nothing is known about it


class UserError(EngineError):
    """The error of a request that cannot be carried out as it is."""

    category = "user"


class ServerError(EngineError):
    """The error of a service that could not do what was asked; the request itself is fine."""

    category = "server"


class FileDamaged(ServerError):
    """The error of a file whose content is not what was written, with the ``reason``."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class FilesAway(ServerError):
    """The error of a file that cannot be reached now; it may be in order."""

    files_away = True


def shown(text: str) -> str:
    """Return a client's text in a form fit for a message: quoted, escaped and short."""
    return repr(text if len(text) <= 64 else f"{text[:64]}…")


def shown_number(number: int) -> str:
    """Return the number as text for a message, or its bit length if it is too long to read."""
    return str(number) if abs(number) < 10**24 else f"a number of {number.bit_length()} bits"


REFUSED = 2
"""The exit status of a process that would fail in the same way if it were started again."""
