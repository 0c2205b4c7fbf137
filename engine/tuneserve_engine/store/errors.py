"""The errors that calls of the store raise."""


class Fenced(Exception):
    """The worker's lease is over: another process has its name, or it was silent for too long.

    The worker must stop at once; the store writes nothing that it sends.
    """


class StoreUnusable(Exception):
    """The store cannot be used as it is; the message says what to do."""


class StoreFailed(Exception):
    """The store could not carry out the call (a full disk, for example) and changed nothing; a
    retry may succeed."""


class StoreDamaged(StoreFailed):
    """The store's data cannot be read: a backup has to be restored."""


class StoreReplaced(StoreFailed):
    """The store at the address is not the one that was opened; nothing was changed."""


class KeyReused(Exception):
    """A known ``(scope, seq)`` was submitted again with another kind."""


class ResultDropped(Exception):
    """The result was dropped after its retention. The request stays known for as long again."""


class LimitReached(Exception):
    """A limit is reached and nothing was accepted; retry after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
