"""Who asked the store for what, and what it answered: noted by several processes in one file."""

import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tuneserve_engine.store.base import Queue

QUEUE_METHODS = {name for name in vars(Queue) if not name.startswith("_")}


@dataclass(frozen=True)
class Entry:
    """One call of a worker: when it was begun, and, once it has ended, how."""

    method: str
    epoch: int  # of a lease: the one that it gave
    begun_s: float  # the same clock in every process of this machine
    ended: str = ""  # "", or "ok", or the name of what it raised
    model: str = ""  # that the call is about
    name: str = ""  # who leases
    taken: dict[str, int] = field(default_factory=dict)  # highest release of each model's jobs


class Diary:
    """Entries at the end of a file that others write to, too. ``news`` gives those not yet read."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._read = 0
        self._rest = b""

    def close(self) -> None:
        os.close(self._file)

    def note(self, entry: Entry) -> None:
        os.write(self._file, json.dumps(asdict(entry)).encode() + b"\n")

    def news(self) -> Iterator[Entry]:
        while chunk := os.pread(self._file, 1 << 20, self._read):
            self._read += len(chunk)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                yield Entry(**json.loads(line))


class Watched:
    """A queue whose every call is in the diary twice: before it is passed on, and when it ended."""

    def __init__(self, queue: Queue, diary: Diary) -> None:
        self._queue = queue
        self._diary = diary

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method not in QUEUE_METHODS:
            raise AttributeError(method)

        async def call(*given: Any, **named: Any) -> Any:
            arguments = dict(zip(_PARAMETERS[method], given, strict=False)) | named
            return await self._call(method, arguments)

        return call

    async def _call(self, method: str, arguments: dict[str, Any]) -> Any:
        entry = Entry(
            method,
            arguments.get("epoch", 0),
            time.monotonic(),
            model=arguments.get("model_id", ""),
            name=arguments.get("name", ""),
        )
        self._diary.note(entry)
        try:
            answer = await getattr(self._queue, method)(**arguments)
        except BaseException as error:
            self._diary.note(replace(entry, ended=type(error).__name__))
            raise
        entry = replace(entry, ended="ok")
        if method == "lease":
            entry = replace(entry, epoch=answer.epoch)
        elif method == "take_jobs":
            for job in answer:
                if job.model_id is not None:
                    entry.taken[job.model_id] = job.release
        self._diary.note(entry)
        return answer


_PARAMETERS = {
    method: [name for name in getattr(Queue, method).__annotations__ if name != "return"]
    for method in QUEUE_METHODS
}
