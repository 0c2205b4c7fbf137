"""The reading of snapshots before their samples wait for the device, which then need not wait."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.core.jobs import Job, JobKind, snapshot_and_sequences
from tuneserve_engine.worker.pending import PendingJobs

MOST_READ = 2
"""The number of snapshots that are read and not yet on the device; each is in the host's memory."""
_REMEMBERED = 64
"""The number of snapshots read last that are taken to be on the device still."""
_LOOK_S = 1.0
"""The seconds after which a reader without room looks whether the samples were cancelled."""


def snapshot_of(job: Job) -> str | None:
    """Return the file of a sample's snapshot; None for other jobs."""
    return snapshot_and_sequences(job.payload)[0] if job.kind == JobKind.SAMPLE else None


class ReadSnapshots:
    """The states of snapshots that ``read`` has returned before the device needed them."""

    def __init__(self, read: Callable[[str], AdapterState]) -> None:
        self._read = read
        self._states: dict[str, AdapterState] = {}
        self.taken: Callable[[], None] = _nothing
        """Called whenever there is room for another one, on any thread."""

    def read_ahead(self, file_id: str) -> None:
        """Read the snapshot, on any thread. A failure is that of ``take_state``, for its sample."""
        with suppress(Exception):
            self._states[file_id] = self._read(file_id)

    def take_state(self, file_id: str) -> AdapterState:
        """Return the snapshot's state, which is forgotten here; read it now if need be."""
        state = self._states.pop(file_id, None)
        if state is None:
            return self._read(file_id)
        self.taken()
        return state

    def keep_only(self, file_ids: Collection[str]) -> None:
        for file_id in set(self._states).difference(file_ids):
            self._states.pop(file_id, None)

    def __len__(self) -> int:
        return len(self._states)


class SnapshotReader:
    """A reader that holds samples back until their snapshots are read. Call it on the event loop.

    ``spawn`` runs a task beside everything else, and ``on_reader`` a call on a thread of its own.
    """

    def __init__(
        self,
        snapshots: ReadSnapshots,
        pending: PendingJobs,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_reader: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        self._snapshots = snapshots
        self._pending = pending
        self._spawn = spawn
        self._on_reader = on_reader
        self._known: dict[str, None] = {}
        self._has_room = asyncio.Event()
        self._is_reading = False

    def route(self, job: Job) -> None:
        """Pass a sample on, now or once its snapshot is read."""
        file_id = snapshot_of(job)
        if file_id is None or (file_id in self._known and file_id not in self._pending.held):
            if file_id is not None:
                self._known[file_id] = self._known.pop(file_id)
            self._pending.add_jobs([job])
            return
        self._known[file_id] = None
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        self._pending.hold(file_id, job)
        if not self._is_reading:
            self._is_reading = True
            self._spawn(self._read_held())

    async def _read_held(self) -> None:
        loop = asyncio.get_running_loop()

        def taken() -> None:
            loop.call_soon_threadsafe(self._has_room.set)

        self._snapshots.taken = taken
        try:
            while self._pending.held:
                await self._wait_for_room()
                file_id = next(iter(self._pending.held), None)
                if file_id is not None:
                    await self._on_reader(partial(self._snapshots.read_ahead, file_id))
                    self._pending.release(file_id)
        finally:
            self._is_reading = False

    async def _wait_for_room(self) -> None:
        while len(self._snapshots) >= MOST_READ:
            self._has_room.clear()
            waiting = {snapshot_of(job) for job in self._pending.in_order()}
            self._snapshots.keep_only({each for each in waiting if each is not None})
            if len(self._snapshots) >= MOST_READ:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._has_room.wait()


def _nothing() -> None:
    pass
