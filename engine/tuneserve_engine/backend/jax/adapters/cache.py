"""Training adapters on the device, in host memory beyond that, and in files beyond that."""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import cast

import jax

from tuneserve_engine.adapters.kinds import kind_of
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import OutOfMemory
from tuneserve_engine.backend.jax.adapters.arrays import (
    Put,
    TargetShapes,
    TrainingAdapter,
    adapter_bytes,
    check_state,
    restored_adapter,
    saved_state,
)
from tuneserve_engine.backend.jax.adapters.cached_adapter import (
    CachedAdapter,
    free_arrays,
    part_of_state,
    resumable_copy,
)
from tuneserve_engine.backend.jax.adapters.device_svd import DeviceSvd
from tuneserve_engine.backend.jax.adapters.spill_files import SpillFile
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import ServerError

logger = logging.getLogger(__name__)


class AdapterCache:
    """Owns all training adapters of a process; loads them to the device and evicts them.

    ``device_bytes`` and ``host_bytes`` are the most that adapters may take in either memory. The
    least recently used adapters are in files in ``directory``, which belongs to this cache alone.
    If an adapter cannot be written there, or writing would leave less than ``min_free_bytes`` of
    the disk, it stays in host memory beyond the limit; then only new adapters are refused. An
    adapter has the same bits wherever it has been.

    All calls come from one thread, except ``prefetch``, which is thread-safe. One adapter moves
    at a time, by a call or in the background. During a move, a memory may exceed its limit by that
    adapter.
    """

    def __init__(  # noqa: PLR0913 - all by name
        self,
        directory: Path,
        shapes: TargetShapes,
        *,
        device_bytes: int,
        host_bytes: int,
        frozen: DeviceSvd | None = None,
        min_free_bytes: int = 0,
        put: Put = jax.device_put,
    ) -> None:
        self._put = put
        self._directory = directory
        self._min_free_bytes = min_free_bytes
        self._frozen = frozen
        self._shared_bytes = frozen.bytes if frozen is not None else 0  # of the decomposition
        self._numbers = count()
        self._writes_fail = False  # whether the last write of a file failed
        self._shapes = shapes
        self._device_limit = device_bytes
        self._host_limit = host_bytes
        self._entries: OrderedDict[str, CachedAdapter] = OrderedDict()  # least recently used first
        self._pinned: frozenset[str] = frozenset()
        self._prefetch_queue: deque[str] = deque()  # adapters still to be loaded ahead
        self._asked: set[str] = set()  # adapters of the same list that have been tried
        self._is_prefetching = False  # whether the background works on the wishes, or is about to
        self._state = threading.Condition()  # guards all of the above; never held during a move
        self._moving = threading.Lock()
        self._waiting = 0  # callers that move something or wait to do so
        self._background = ThreadPoolExecutor(1, thread_name_prefix="look-ahead")
        self.loads = 0
        self.evictions = 0
        self.waited_s = 0.0

    @property
    def ids(self) -> tuple[str, ...]:
        """All adapters, the least recently used first."""
        with self._state:
            return tuple(self._entries)

    @property
    def on_device(self) -> int:
        """The number of adapters on the device."""
        with self._state:
            return sum(entry.device is not None for entry in self._entries.values())

    def register(self, adapter_id: str, state: AdapterState, rank_bucket: int) -> None:
        """Register or replace an adapter. It is loaded to the device when it is needed there.

        Raises ``UserError`` if the state does not fit this base model, and ``OutOfMemory`` if the
        adapter is new and there is not enough room for another one.
        """
        check_state(state, self._shapes)
        kind = kind_of(state.config)
        size = adapter_bytes(self._shapes, rank_bucket, kind)
        entry = CachedAdapter(state.config, rank_bucket, size, kind.needs_decomposition)
        entry.keep(resumable_copy(state))
        with self._exclusive():
            with self._state:
                old = self._entries.pop(adapter_id, None)
                self._entries[adapter_id] = entry
            try:
                self._make_host_room(may_refuse=old is None)
            except BaseException:
                entry.forget_stored()
                with self._state:
                    del self._entries[adapter_id]
                    if old is not None:
                        self._entries[adapter_id] = old
                raise
            if old is not None:
                old.discard()
                self._free_shared()

    def groups(self, adapter_ids: Sequence[str]) -> list[list[str]]:
        """Split the adapters, in their order, into groups that fit on the device.

        An adapter larger than the device's limit is alone in its group; one that does not exist
        counts as empty.
        """
        groups: list[list[str]] = []
        room = 0
        with self._state:
            entries = [self._entries.get(adapter_id) for adapter_id in adapter_ids]
        is_sharing = any(entry and entry.is_sharing for entry in entries)
        shared = self._shared_bytes if is_sharing else 0
        for adapter_id in adapter_ids:
            with self._state:
                entry = self._entries.get(adapter_id)
            needed = entry.device_bytes if entry is not None else 0
            if not groups or needed > room:
                groups.append([])
                room = self._device_limit - shared
            groups[-1].append(adapter_id)
            room -= needed
        return groups

    def get(self, adapter_ids: Sequence[str]) -> list[TrainingAdapter]:
        """Return the adapters, on the device; they stay there until the next call.

        Other adapters are evicted to make room; if that is not enough, the limit is exceeded.
        Raises ``DeviceFailed`` if an adapter's file cannot be read, and whatever JAX raises.
        """
        started_s = time.monotonic()
        with self._state:
            entries = [self._entry(adapter_id) for adapter_id in adapter_ids]
            self._pinned = frozenset(adapter_ids)
            for adapter_id in adapter_ids:
                self._entries.move_to_end(adapter_id)
            is_ready = all(entry.device is not None for entry in entries)
            is_ready &= self._device_bytes() <= self._device_limit
        if not is_ready:
            with self._exclusive():
                for entry in entries:
                    self._load(entry)
        self.waited_s += time.monotonic() - started_s
        adapters = [entry.device for entry in entries]
        assert None not in adapters, "an adapter was paged out although it was asked for"
        return cast(list[TrainingAdapter], adapters)

    def config(self, adapter_id: str) -> AdapterConfig:
        with self._state:
            return self._entry(adapter_id).config

    def state(self, adapter_id: str, *, optimizer: bool, accumulator: bool) -> AdapterState:
        """Return the ``saved_state`` of the adapter, which stays where it is."""
        with self._exclusive():
            with self._state:
                entry = self._entry(adapter_id)
            if entry.device is not None:
                return saved_state(entry.device, optimizer=optimizer, accumulator=accumulator)
            return part_of_state(entry.stored(), optimizer=optimizer, accumulator=accumulator)

    def remove(self, adapter_id: str) -> None:
        with self._exclusive():
            with self._state:
                entry = self._entry(adapter_id)
                del self._entries[adapter_id]
            entry.discard()
            self._free_shared()

    def prefetch(self, adapter_ids: Sequence[str]) -> None:
        """Start to load the adapters to the device, most urgent first, and return at once.

        Evicts other adapters to make room, but none that the last ``get`` asked for or that comes
        earlier in this list. Replaces what an earlier call has not loaded yet.
        """
        with self._state:
            known = [adapter_id for adapter_id in adapter_ids if adapter_id in self._entries]
            for adapter_id in reversed(known):
                self._entries.move_to_end(adapter_id)
            self._prefetch_queue, self._asked = deque(known), set()
            starts = bool(known) and not self._is_prefetching
            self._is_prefetching |= starts
        if starts:
            self._background.submit(self._prefetch_queued)

    # --- moving: by one thread at a time, which has the turn -------------------------------------

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Wait until nothing moves. The background thread lets all other callers go first."""
        with self._state:
            self._waiting += 1
        try:
            with self._moving:
                yield
        finally:
            with self._state:
                self._waiting -= 1
                self._state.notify_all()

    def _prefetch_queued(self) -> None:
        """Load adapters ahead, until the wishes are done or the device is full.

        Never raises: a failure occurs again when the adapter is needed, and is reported there.
        """
        while True:
            with self._state:
                self._state.wait_for(lambda: not self._waiting)
                if not self._prefetch_queue:
                    self._is_prefetching = False
                    return
                asked, adapter_id = self._asked, self._prefetch_queue.popleft()
                asked.add(adapter_id)
            try:
                with self._moving:
                    entry = self._entries.get(adapter_id)
                    has_room = entry is None or self._load(entry, sparing=asked)
            except Exception:
                logger.warning("%s could not be brought in ahead", adapter_id, exc_info=True)
                has_room = False
            with self._state:
                if not has_room and asked is self._asked:
                    self._prefetch_queue.clear()

    def _load(self, entry: CachedAdapter, *, sparing: Collection[str] | None = None) -> bool:
        """Load the adapter to the device, and return whether it is there.

        ``sparing`` names adapters that must not be evicted: if there is not enough room without
        them, the adapter is not loaded. If it is None, the adapter is loaded in any case, and as
        many others as needed are evicted.
        """
        if sparing is not None and not self._can_fit(self._needed(entry), sparing):
            return False
        try:
            while self._device_bytes() + self._needed(entry) > self._device_limit:
                if not self._evict_one(sparing or (), coming=entry):
                    if sparing is not None:
                        return False
                    break
            if entry.device is None:
                state = entry.stored()
                frozen = self._frozen.on_device(state.config) if self._frozen else None
                adapter = restored_adapter(
                    state, self._shapes, entry.rank_bucket, frozen, self._put
                )
                with self._state:
                    entry.device = adapter
                entry.forget_stored()
                self.loads += 1
        finally:
            self._free_shared()
            self._make_host_room()
        return True

    def _evict_one(self, sparing: Collection[str], *, coming: CachedAdapter) -> bool:
        """Evict the least recently used adapter; return False if all have to stay."""
        with self._state:
            entry = next(iter(self._removable(sparing)), None)
            if entry is None:
                return False
            adapter, entry.device = entry.device, None
        assert adapter is not None
        try:
            entry.keep(saved_state(adapter, optimizer=adapter.step > 0, accumulator=True))
            self._make_host_room(coming)
        except BaseException:
            entry.forget_stored()
            with self._state:
                entry.device = adapter
            raise
        free_arrays(adapter)
        if not coming.is_sharing:
            self._free_shared()
        self.evictions += 1
        return True

    def _make_host_room(
        self, coming: CachedAdapter | None = None, *, may_refuse: bool = False
    ) -> None:
        """Write adapters beyond the host's limit to files.

        ``coming`` is not written: it is about to leave host memory. An adapter that cannot be
        written stays in host memory; with ``may_refuse``, ``OutOfMemory`` is raised instead.
        """
        try:
            self._write_excess(coming)
        except OutOfMemory as error:
            if may_refuse:
                raise
            if not self._writes_fail:
                logger.error("%s; until then they take more of it than they should", error)
            self._writes_fail = True

    def _write_excess(self, coming: CachedAdapter | None) -> None:
        with self._state:
            held = [x for x in self._entries.values() if x.host is not None and x is not coming]
        excess = sum(entry.host_bytes for entry in held) - self._host_limit
        for entry in held:
            if excess <= 0:
                return
            excess -= entry.host_bytes
            assert entry.host is not None
            path = self._directory / str(next(self._numbers))
            entry.file = SpillFile.write(path, entry.host, min_free_bytes=self._min_free_bytes)
            entry.host = None
            self._writes_fail = False

    # --- bookkeeping -----------------------------------------------------------------------------

    def _entry(self, adapter_id: str) -> CachedAdapter:
        entry = self._entries.get(adapter_id)
        if entry is None:
            raise ServerError(
                f"adapter {adapter_id!r} is not on this device ({len(self._entries)} are); "
                "create or load it first"
            )
        return entry

    def _device_bytes(self) -> int:
        with self._state:
            there = [entry for entry in self._entries.values() if entry.device is not None]
            shared = self._shared_bytes if any(entry.is_sharing for entry in there) else 0
            return shared + sum(entry.device_bytes for entry in there)

    def _needed(self, entry: CachedAdapter) -> int:
        """Return the bytes that loading the adapter would add on the device."""
        if entry.device is not None:
            return 0
        brings_shared = entry.is_sharing and not self._is_shared()
        return entry.device_bytes + (self._shared_bytes if brings_shared else 0)

    def _is_shared(self) -> bool:
        """Return whether an adapter on the device needs the decomposition."""
        with self._state:
            return any(x.is_sharing for x in self._entries.values() if x.device is not None)

    def _free_shared(self) -> None:
        """Take the decomposition off the device if no adapter there needs it any more."""
        if self._frozen is not None and not self._is_shared():
            self._frozen.leave_device()

    def _can_fit(self, needed: int, sparing: Collection[str]) -> bool:
        with self._state:
            can_go = sum(entry.device_bytes for entry in self._removable(sparing))
            return self._device_bytes() - can_go + needed <= self._device_limit

    def _removable(self, sparing: Collection[str]) -> list[CachedAdapter]:
        """Return the adapters that may be evicted, the least recently used first."""
        with self._state:
            return [
                entry
                for adapter_id, entry in self._entries.items()
                if entry.device is not None
                and adapter_id not in self._pinned
                and adapter_id not in sparing
            ]
