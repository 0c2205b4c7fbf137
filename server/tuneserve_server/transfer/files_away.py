"""The answer to a request while the store of files does not answer."""

from collections.abc import Iterator
from contextlib import contextmanager

from tuneserve_engine.store.files import FULL
from tuneserve_server.errors import StoreUnavailable


@contextmanager
def told_away() -> Iterator[None]:
    """Turn an ``OSError`` into ``StoreUnavailable``, except that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise
        raise StoreUnavailable(
            "the store of files cannot be reached; nothing was changed; send the request again"
        ) from error
