"""The reading of snapshots from files beside the device, before their samples begin."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.core.jobs import Job, JobKind, snapshot_and_sequences
from tuneserve_engine.worker.pending import PendingJobs
from tuneserve_engine.worker.scheduling.cost_model import sequences_of

MOST_READ = 2
"""The snapshots that are being read ahead, or wait in the host's memory for their samples."""
_REMEMBERED = 10_000
"""The snapshots that began last and are taken to be on the device still. The device's thread reads
one that is not."""


class ReadSnapshots:
    """The states of snapshots that were read before their samples began.

    ``read`` returns the state in a file. ``on_begun`` is called on the device's thread for every
    sample that begins, with its request and its file.
    """

    def __init__(self, read: Callable[[str], AdapterState]) -> None:
        self._read = read
        self._states: dict[str, AdapterState | Exception] = {}
        self._begun: dict[str, None] = {}
        self.on_begun: Callable[[str, str], None] = _nothing

    def __len__(self) -> int:
        return len(self._states)

    def has_read(self, file_id: str) -> bool:
        """Return whether the file need not be read: its snapshot is here or on the device."""
        return file_id in self._states or file_id in self._begun

    def read_ahead(self, file_id: str) -> None:
        """Read the snapshot, on any thread. A failure is that of ``take_state``, for its sample."""
        try:
            self._states[file_id] = self._read(file_id)
        except Exception as error:
            self._states[file_id] = error

    def take_state(self, file_id: str) -> AdapterState:
        """Return the snapshot's state, which is forgotten here; read it now if need be."""
        self._begun[file_id] = None  # already, so that no other sample has it read again
        state = self._states.pop(file_id, None)
        if isinstance(state, Exception):
            raise state
        return self._read(file_id) if state is None else state

    def note_begun(self, request_id: str, file_id: str, *, is_loaded: bool) -> None:
        """Note that a sample of the snapshot began, or failed at once."""
        self._begun.pop(file_id, None)
        if is_loaded:
            self._states.pop(file_id, None)
            self._begun[file_id] = None
            while len(self._begun) > _REMEMBERED:
                del self._begun[next(iter(self._begun))]
        self.on_begun(request_id, file_id)

    def has_begun(self, file_id: str) -> bool:
        """Return whether a sample of the snapshot began: it is taken to be on the device."""
        return file_id in self._begun

    def discard(self, file_id: str) -> None:
        self._states.pop(file_id, None)


class SnapshotReader:
    """A reader that keeps samples from the device while their snapshots are read.

    At most ``MOST_READ`` snapshots are read ahead. Samples of others may run at once; then the
    device's thread reads the file. Call the methods on the event loop. ``spawn`` runs a task beside
    everything else, and ``on_reader`` a call on a thread of its own.
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
        self._held: dict[str, list[Job]] = {}  # by the file that is being read
        self._unread: dict[str, list[Job]] = {}  # pending, by a file for which there was no room
        self._read: dict[str, set[str]] = {}  # the requests for a file that has been read
        self._is_stopped = False

    def start(self) -> None:
        """Hear of samples that begin, from now on."""
        loop = asyncio.get_running_loop()

        def tell(request_id: str, file_id: str) -> None:
            with suppress(RuntimeError):  # the loop has ended, the last batch has not
                loop.call_soon_threadsafe(self._on_begun, request_id, file_id)

        self._snapshots.on_begun = tell

    def stop(self) -> None:
        """Read nothing from now on."""
        self._is_stopped = True

    @property
    def sequences(self) -> int:
        """The number of sequences of the samples whose snapshots are being read."""
        return sum(sequences_of(job) for jobs in self._held.values() for job in jobs)

    def route(self, job: Job) -> None:
        """Pass a job on to the device; a sample only once its snapshot is read, if there is room.

        Raises nothing: an invalid sample, or one whose file cannot be read, fails when it runs.
        """
        file_id = snapshot_of(job)
        if file_id in self._held:
            self._held[file_id].append(job)
            return
        if file_id is not None and not self._snapshots.has_read(file_id):
            if self._has_room():
                self._hold(file_id, [job])
                return
            self._unread.setdefault(file_id, []).append(job)
        elif file_id in self._read:
            self._read[file_id].add(job.request_id)
        self._pending.add_jobs([job])

    def drop_requests(self, request_ids: Collection[str]) -> None:
        """Forget the samples of these requests, and snapshots that no other sample wants."""
        ended = set(request_ids)
        for waiting in (self._held, self._unread):
            for file_id, jobs in waiting.items():
                waiting[file_id] = [job for job in jobs if job.request_id not in ended]
        self._unread = {file_id: jobs for file_id, jobs in self._unread.items() if jobs}
        for file_id in list(self._read):
            self._end(file_id, ended)

    def _on_begun(self, request_id: str, file_id: str) -> None:
        if self._snapshots.has_begun(file_id):
            self._read.pop(file_id, None)
            self._unread.pop(file_id, None)
        self._end(file_id, {request_id})

    def _end(self, file_id: str, request_ids: set[str]) -> None:
        """Forget a snapshot that was read and that no other sample wants; use its room."""
        if file_id in self._read:
            self._read[file_id] -= request_ids
            if not self._read[file_id]:
                del self._read[file_id]
                self._snapshots.discard(file_id)
        self._read_next()

    def _read_next(self) -> None:
        """Use free room for snapshots whose samples wait for the device."""
        while self._unread and self._has_room() and not self._is_stopped:
            file_id = next(iter(self._unread))
            waiting = [job for job in self._unread.pop(file_id) if self._pending.has_job(job)]
            if waiting and not self._snapshots.has_read(file_id):
                self._pending.remove_jobs(waiting)
                self._hold(file_id, waiting)

    def _has_room(self) -> bool:
        return len(self._held) + len(self._snapshots) < MOST_READ

    def _hold(self, file_id: str, samples: list[Job]) -> None:
        self._held[file_id] = samples
        self._spawn(self._release_once_read(file_id))

    async def _release_once_read(self, file_id: str) -> None:
        await self._on_reader(partial(self._snapshots.read_ahead, file_id))
        samples = self._held.pop(file_id)
        self._read[file_id] = {job.request_id for job in samples}
        self._pending.add_jobs(samples)
        self._end(file_id, set())  # of which all may have been cancelled meanwhile


def snapshot_of(job: Job) -> str | None:
    """Return the file of a sample's snapshot; None for other jobs."""
    return snapshot_and_sequences(job.payload)[0] if job.kind == JobKind.SAMPLE else None


def _nothing(_: str, _file_id: str) -> None:
    pass
