"""A bucket of an S3-compatible object store: its requests, their time limits and their errors."""

import errno
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import S3Store

SCHEME = "s3://"
T = TypeVar("T")
PROOFS = "proofs/"
"""The prefix of short-lived objects."""
_CONNECT_S = 5.0
_CONCURRENT = 4
_PART_BYTES = 5 * 2**20
_RETRIES = 100  # more than there is time for
_PAUSES_S = (0.1, 2.0)  # before the second attempt, and the longest


class StoredObject(NamedTuple):
    """An object of a bucket. ``modified_s`` may be rounded to a second, up or down."""

    key: str
    size: int
    modified_s: float


class Creation(NamedTuple):
    """The end of a conditional write: the object's content, perhaps written by another process.

    ``repeated`` says that a request of this call had no answer: it may have been carried out, and
    the object may have been deleted, before a later one was.
    """

    content: bytes
    repeated: bool


class Limits(NamedTuple):
    """The time limits of a request, in seconds.

    ``request_s`` is for a request with its answer: at most a part of an object, of 5 MiB, up to
    four at once. A failed one is sent again for ``retry_s``.
    """

    request_s: float = 15.0
    retry_s: float = 15.0


DEFAULT_LIMITS = Limits()


class Bucket:
    """The objects under one prefix of a bucket.

    All methods raise ``OSError``, at the latest when the limits are over: 30 s by default. Its
    ``strerror`` holds no address and no secret. A missing object is ``FileNotFoundError``. The
    library reads credentials, region and endpoint from the environment (``AWS_*``).
    """

    def __init__(self, url: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self.url = url
        self._limits = limits
        name, _, prefix = url.removeprefix(SCHEME).partition("/")
        with _translated(url, "open"):
            self._store = _client(name, prefix, limits, retries=_RETRIES)
            # The library would not say whether it has repeated a request.
            self._unrepeated = _client(name, prefix, limits, retries=0)

    def get(self, key: str) -> bytes:
        return self._patiently("read", key, lambda: bytes(self._store.get(key).bytes()))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` up to, not including, ``end``."""

        def read() -> bytes:
            return bytes(self._store.get_range(key, start=start, end=end))

        data = self._patiently("read", key, read)
        if len(data) != end - start:
            raise OSError(
                errno.EIO,
                f"{len(data)} bytes from {start} to {end}: the object was cut short",
                f"{self.url}/{key}",
            )
        return data

    def put_object(self, key: str, data: bytes | Path) -> None:
        """Write the object; an existing one is replaced."""

        def write() -> None:
            self._store.put(key, data, chunk_size=_PART_BYTES, max_concurrency=_CONCURRENT)

        self._patiently("write", key, write)

    def create(self, key: str, data: bytes) -> Creation:
        """Write the object unless it exists.

        After an ``OSError`` the object may exist or not, and may even appear later.
        """
        repeated = False

        def write() -> bytes:
            nonlocal repeated
            try:
                self._unrepeated.put(key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return self.get(key)
            except Exception:
                repeated = True
                raise
            return data

        content = self._patiently("write", key, write)
        return Creation(content, repeated)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects; missing ones are ignored."""
        if keys:
            self._patiently("delete", keys[0], lambda: self._store.delete(list(keys)))

    def objects(self, prefix: str) -> list[StoredObject]:
        """Return all objects below the prefix, which ends in a slash."""

        def read() -> list[StoredObject]:
            return [
                StoredObject(each["path"], each["size"], each["last_modified"].timestamp())
                for page in self._store.list(prefix)
                for each in page
            ]

        return self._patiently("list", prefix, read)

    def modified_s(self, key: str) -> float:
        """Return the time of the object's last change by the clock of the store."""

        def read() -> float:
            return float(self._store.head(key)["last_modified"].timestamp())

        return self._patiently("date", key, read)

    def _patiently(self, verb: str, key: str, call: Callable[[], T]) -> T:
        """Return the call's result; repeat it for a while if it fails for want of an answer.

        The library repeats requests too, but not if an answer is cut short.
        """
        end_s, pause_s = time.monotonic() + self._limits.retry_s, _PAUSES_S[0]
        while True:
            try:
                with _translated(self.url, verb, key):
                    return call()
            except OSError as error:
                if error.errno != errno.EIO or time.monotonic() + pause_s > end_s:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])

    def prove_writable(self) -> None:
        """Check that this process can list, read, write and delete objects.

        Raises ``OSError`` if it cannot, or if the store does not support conditional writes. A full
        store passes: making room needs the running service.
        """
        proof = f"{PROOFS}{secrets.token_hex(8)}"
        try:
            self.put_object(proof, b"first")
            made = self.create(proof, b"second")
            self.objects(PROOFS)
            self.delete([proof])
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return
            raise
        if made.content != b"first":
            raise OSError(
                errno.ENOTSUP,
                "the store ignores If-None-Match, so two writes could mix; use one with "
                "conditional writes, such as AWS S3, MinIO, Cloudflare R2 or Ceph Squid",
                self.url,
            )


def _client(name: str, prefix: str, limits: Limits, *, retries: int) -> S3Store:
    # Client options in ``config``, because as ``client_options`` they would hide those of the
    # environment (AWS_ALLOW_HTTP and others).
    config: Any = {
        "timeout": f"{limits.request_s} seconds",
        "connect_timeout": f"{min(limits.request_s, _CONNECT_S)} seconds",
    }
    return S3Store(
        name,
        prefix=prefix or None,
        config=config,
        retry_config={
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=limits.retry_s),
            "backoff": {"max_backoff": timedelta(seconds=_PAUSES_S[1])},
        },
    )


@contextmanager
def _translated(url: str, verb: str, key: str = "") -> Iterator[None]:
    """Turn an error of the library into an ``OSError``.

    ``EIO`` says that there was no proper answer. None is a ``ConnectionError``: to our callers,
    those are the store's.
    """
    what, where = f"cannot {verb} an object", f"{url}/{key}".rstrip("/")
    try:
        yield
    except FileNotFoundError as error:
        text = str(error)
        if isinstance(error.errno, int):  # our own, of a request in between
            raise OSError(errno.EIO, f"{what}: it was deleted meanwhile", where) from None
        # Any other 404 is not the bucket's answer. To HEAD ("date") it answers without a body.
        if verb != "date" and "NoSuchKey" not in text:
            raise OSError(errno.EINVAL, f"{what}: {_reason(text)}", where) from None
        raise FileNotFoundError(errno.ENOENT, f"{what}: it does not exist", where) from None
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise _error(what, where, str(error), errno.EACCES) from None
    except (BaseError, ValueError) as error:
        raise _error(what, where, str(error), errno.EIO) from None


def _error(what: str, where: str, text: str, number: int) -> OSError:
    reason = _reason(text)
    if reason.startswith(("401", "403")):
        number = errno.EACCES
    if "StorageFull" in reason or "QuotaExceeded" in reason:
        number = errno.ENOSPC
    elif number == errno.EIO and (reason in _SETTINGS or re.match(r"4(?!08|09|29)\d\d\b", reason)):
        number = errno.EINVAL
    return OSError(number, f"{what}: {reason}", where)


_NO_KEY = "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_NO_TLS = "the endpoint is not https: for http, set AWS_ALLOW_HTTP=true"
_SETTINGS = (_NO_KEY, _NO_TLS)


def _reason(text: str) -> str:
    """Return why a request failed, in a few words.

    The library's text has the whole answer, which may hold what was sent.
    """
    if "/latest/api/token" in text or "Missing AccessKeyId" in text or "SecretAccessKey" in text:
        return _NO_KEY
    status = re.search(r"status code: (\d{3}[^:<\n]*)", text)
    code = re.search(r"<Code>(\w+)</Code>", text)
    if status is not None:
        return status[1].strip() + (f" ({code[1]})" if code is not None else "")
    if "BadScheme" in text:
        return _NO_TLS
    if "TimedOut" in text or "Timeout" in text:
        return "no answer in time"
    found = re.findall(r'message: "([^"]{1,200})"', text)
    if found:
        return str(found[-1])
    return text.partition("\n")[0].rpartition(" - ")[2][:200]
