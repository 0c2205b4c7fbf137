"""The calls of several processes to the store, and its answers, recorded in one file."""

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
    """One call of a worker: its start, and its end once it has one."""

    method: str
    epoch: int  # for a lease: the new epoch
    begun_s: float  # on the clock that all processes of this machine share
    ended: str = ""  # "", or "ok", or the name of the exception
    model: str = ""  # the model of the call
    name: str = ""  # the worker that leases
    taken: dict[str, int] = field(default_factory=dict)  # highest release of each model's jobs


class Diary:
    """Appends entries to a file that others write to as well. ``news`` returns the unread ones."""

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
    """A queue that records every call twice: before it is passed on, and when it has ended."""

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
