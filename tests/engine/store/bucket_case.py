"""Buckets that fail, die or date their objects as a test wishes."""

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from tuneserve_engine.store.bucket import Bucket, Creation, Limits, StoredObject
from tuneserve_engine.store.file_cache import FileCache
from tuneserve_engine.store.object_files import ObjectFileStore

QUICK = Limits(request_s=1.0, retry_s=1.0)
ID, OTHER = "0123456789abcdef" * 2, "f" * 32
MEMBERS = {"adapter.safetensors": b"weights", "adapter_config.json": b"{}"}


class Killed(BaseException):
    """The end of a process: nothing handles it."""


class HookedBucket(Bucket):
    """A bucket with ``before`` called before each request, and ``after`` once it was carried out.

    Both get the number of the request, from 0, and what it does: a verb and a key or prefix. A
    deletion of several objects is a request for each: the real one may be carried out in part.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url, QUICK)
        self.before: Callable[[int, str], None] = lambda number, what: None
        self.after: Callable[[int, str], None] = lambda number, what: None
        self.calls: list[str] = []
        self.dates: dict[str, float] = {}
        self.dated: Callable[[StoredObject], float] = lambda each: each.modified_s

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        number = len(self.calls)
        self.calls.append(what)
        self.before(number, what)
        result = call()
        self.after(number, what)
        return result

    def get(self, key: str) -> bytes:
        return bytes(self._call(f"get {key}", lambda: super(HookedBucket, self).get(key)))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        read = super().get_range
        return bytes(self._call(f"get {key}", lambda: read(key, start, end)))

    def put_object(self, key: str, data: bytes | Path) -> None:
        self._call(f"put {key}", lambda: super(HookedBucket, self).put_object(key, data))

    def create(self, key: str, data: bytes) -> Creation:
        made = self._call(f"create {key}", lambda: super(HookedBucket, self).create(key, data))
        assert isinstance(made, Creation)
        return made

    def delete(self, keys: Sequence[str]) -> None:
        delete = super().delete
        for key in keys:
            self._call(f"delete {key}", lambda key=key: delete([key]))

    def objects(self, prefix: str) -> list[StoredObject]:
        found = self._call(f"list {prefix}", lambda: super(HookedBucket, self).objects(prefix))
        return [each._replace(modified_s=self._date(each)) for each in found]

    def modified_s(self, key: str) -> float:
        modified_s = self._call(f"head {key}", lambda: super(HookedBucket, self).modified_s(key))
        return self._date(StoredObject(key, 0, modified_s))

    def _date(self, each: StoredObject) -> float:
        return self.dates.get(each.key, self.dated(each))


class ClockedBucket(HookedBucket):
    """A bucket with a clock of the test's own, which dates objects, rounded as ``rounded`` does."""

    def __init__(self, url: str, rounded: Callable[[float], float] = math.floor) -> None:
        super().__init__(url)
        self.now_s = 1_800_000_000.0
        self._rounded = rounded

    def put_object(self, key: str, data: bytes | Path) -> None:
        super().put_object(key, data)
        self.dates[key] = self._rounded(self.now_s)

    def create(self, key: str, data: bytes) -> Creation:
        made = super().create(key, data)
        self.dates.setdefault(key, self._rounded(self.now_s))
        return made

    def delete(self, keys: Sequence[str]) -> None:
        super().delete(keys)
        for key in keys:
            self.dates.pop(key, None)


def raising(error: BaseException, calls: Collection[int]) -> Callable[[int, str], None]:
    """A hook that raises the error at these calls."""

    def hook(number: int, what: str) -> None:
        if number in calls:
            raise error

    return hook


def store_of(bucket: Bucket, cache: Path, **given: Any) -> ObjectFileStore:
    return ObjectFileStore(bucket, FileCache(cache, max_bytes=2**30), **given)


def read(files: ObjectFileStore, file_id: str) -> dict[str, bytes]:
    folder = files.path(file_id)
    return {name: (folder / name).read_bytes() for name in files.members(file_id)}
