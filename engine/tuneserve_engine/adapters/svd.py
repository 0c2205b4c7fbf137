"""The singular value decomposition of a base model's layers, in files: made once per base model.

There is a folder per base model and number type, with a folder per target. A target's folder has
``u`` [L, K, F], ``s`` [L, K] and ``v`` [L, K, D] (K = min(D, F)), the weakest direction first, and
the checksums of these files. A process compares the checksums when it first uses the target
(folders of earlier releases have none).

A target's folder appears complete or not at all, and is never replaced: for equal singular values,
another decomposition may split their space in another way, and an adapter that was trained beside
one decomposition has no meaning beside the other.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tuneserve_engine.adapters.kinds import kind_of
from tuneserve_engine.adapters.kinds.base import SvdFactors, TargetShapes
from tuneserve_engine.adapters.svd_files import (
    ARRAYS,
    ID,
    SUMS,
    check_sums,
    fsync_path,
    is_held,
    sums_of,
    write_header,
    write_member,
)
from tuneserve_engine.adapters.svd_process import SvdProcess
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import ServerError, UserError
from tuneserve_engine.process import permissions
from tuneserve_engine.process.disk_room import check_room

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, np.dtype[np.float32]]
Layers = Callable[[str], Iterable[Array]]
"""A function that returns a target's weights [D, F], layer by layer, of any float type."""

_ID_CHARS = 12


class BaseWeightSvd:
    """The decomposition of all targets in ``shapes`` that have layers.

    Several threads may use an instance, and several processes the folder.
    """

    def __init__(
        self,
        folder: Callable[[], Path],
        shapes: TargetShapes,
        layers: Layers,
        *,
        min_free_bytes: int = 0,
    ) -> None:
        """Set up the decomposition; computes nothing yet.

        ``folder`` returns the folder for exactly these weights, and is called when the folder is
        first needed. Nothing is written that would leave less than ``min_free_bytes`` on its disk.
        """
        self._folder_of_weights = folder
        self._shapes = {name: shape for name, shape in shapes.items() if len(shape) == 3}
        self._layers = layers
        self._min_free_bytes = min_free_bytes
        self._lock = threading.Lock()
        self._read: dict[str, tuple[Array, Array, Array]] = {}
        self._sound: set[str] = set()  # targets whose checksums were compared
        self._id = ""
        self._failure = ""
        self._is_at_work = False
        self.weights = sum(shape[0] for shape in self._shapes.values())
        """The number of weights (layers of all targets) to decompose."""
        self.done = 0
        """The number of weights that are decomposed."""

    @cached_property
    def _folder(self) -> Path:
        return self._folder_of_weights()

    @property
    def is_whole(self) -> bool:
        """Whether this process has made or opened all files."""
        return bool(self._id)

    @property
    def is_kept(self) -> bool:
        """Whether all files exist, so that nothing is left to compute."""
        return all((self._folder / name / ID).is_file() for name in self._shapes)

    @property
    def is_at_work(self) -> bool:
        """Whether a thread is computing missing decompositions."""
        return self._is_at_work

    @property
    def id(self) -> str:
        """The id of exactly these directions."""
        assert self._id, "not prepared"
        return self._id

    def prepare(self) -> None:
        """Make the missing files and open all files: this takes minutes for a large model.

        Other threads that call this meanwhile wait. Raises ``ServerError`` if a weight cannot be
        decomposed, or the files cannot be stored.
        """
        with self._lock:
            if self._id:
                return
            self._failure = ""
            try:
                with self._reasons():
                    if missing := self._missing_bytes():
                        check_room(self._folder, missing, self._min_free_bytes)
                    self._is_at_work = not self.is_kept
                    with SvdProcess() as triples:
                        for name in self._shapes:
                            self._make(name, triples)
                    self._open()
            except ServerError as error:
                self._failure = str(error)
                raise
            except Exception:
                self._failure = (
                    "the base model's directions could not be computed; ask the operator, whose "
                    "log says why, or use lora"
                )
                raise
            finally:
                self._is_at_work = False
                self.done = self._layers_read()

    def require(self) -> None:
        """Open the files if all exist; computes nothing.

        Raises ``ServerError`` if a file is missing, with the reason if the last preparation failed.
        """
        if self._id:
            return
        if not self.is_kept:
            raise ServerError(
                self._failure
                or "the base model's directions are not there yet; ask again in a moment, or, if "
                "nobody creates a model that needs them, create one: then they are made"
            )
        with self._reasons():  # without the lock: another process may have finished the files that
            self._open()  # a thread here still computes, and both open the same files

    def arrays(self, target: str) -> tuple[Array, Array, Array]:
        """Return ``u``, ``s`` and ``v`` of a target, as memory-mapped files.

        Raises like ``require``, and ``FileDamaged``.
        """
        self.require()
        if target not in self._sound:
            check_sums(self._folder / target)
            self._sound.add(target)
        return self._read[target]

    def frozen(self, config: AdapterConfig, target: str) -> SvdFactors:
        """Return the target's decomposition for an adapter of this configuration, without padding.

        Raises like ``arrays``.
        """
        u, s, v = self.arrays(target)
        rank = kind_of(config).rank(config, self._shapes[target])
        return SvdFactors(u, s, v, trainable_mask(rank, s.shape[-1]))

    def check(self, config: AdapterConfig) -> None:
        """Raise ``UserError`` for an adapter that was trained beside another decomposition."""
        if config.frozen not in ("", self.id):
            raise UserError(
                "this adapter was trained beside other directions of the base model "
                f"({config.frozen}) than this server has ({self.id}): they come from another "
                "machine; load it where it was trained, or sample from its sampler checkpoint, "
                "which needs none"
            )

    @contextmanager
    def _reasons(self) -> Iterator[None]:
        """Turn errors inside the context into a ``ServerError`` that says what to do."""
        try:
            yield
        except np.linalg.LinAlgError as error:  # a ValueError, too
            raise ServerError(
                f"a weight of the base model cannot be decomposed ({error}); this base model "
                "takes no adapters of this kind; use lora"
            ) from error
        except MemoryError as error:
            most = max(svd_bytes(*shape[1:]) for shape in self._shapes.values()) / 2**20
            raise ServerError(
                f"decomposing one weight of the base model takes up to {most:,.1f} MiB of the "
                "host's memory, and there was not as much; ask the operator to give the worker "
                "more, and ask again, or use lora"
            ) from error
        except (OSError, ValueError, EOFError) as error:
            raise ServerError(
                f"the base model's directions cannot be kept in {self._folder}: {error}; ask "
                "the operator to mend this, or to make room there, and ask again"
            ) from error

    def _open(self) -> None:
        ids = [self._opened(name) for name in self._shapes]
        self.done = self._layers_read()
        self._id = hashlib.sha256(" ".join(ids).encode()).hexdigest()[:_ID_CHARS]

    def _opened(self, name: str) -> str:
        """Open the target's files and return their id."""
        folder = self._folder / name
        layers, inputs, outputs = self._shapes[name]
        try:
            u, s, v = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ARRAYS)
        except Exception as error:  # any kind: NumPy parses the header as Python
            raise ValueError(f"{folder} cannot be read ({error}): remove it") from error
        count = min(inputs, outputs)
        expected = [(layers, count, outputs), (layers, count), (layers, count, inputs)]
        found = [array.shape for array in (u, s, v)]
        if found != expected:
            raise ValueError(f"{folder} has arrays of {found}, not {expected}: remove it")
        self._read[name] = u, s, v
        return (folder / ID).read_text(encoding="utf-8")

    def _missing_bytes(self) -> int:
        """Return the bytes of the files that are still to be made."""
        missing = [
            shape
            for name, shape in self._shapes.items()
            if not (self._folder / name / ID).is_file()
        ]
        return sum(4 * n * min(d, f) * (d + f + 1) for n, d, f in missing)

    def _layers_read(self) -> int:
        return sum(self._shapes[name][0] for name in tuple(self._read))

    def _make(self, name: str, triples: SvdProcess) -> None:
        """Make the target's folder, unless it exists, and open its files."""
        folder = self._folder / name
        self._clear(name)
        try:
            if not (folder / ID).is_file():
                with self._room(name) as partial:
                    digest = hashlib.sha256()
                    for part in self._write(name, partial, triples):
                        digest.update(part)
                    write_member(partial / ID, digest.hexdigest().encode())
                    write_member(partial / SUMS, json.dumps(sums_of(partial)).encode())
                    fsync_path(partial)
                    partial.rename(folder)
                    fsync_path(self._folder)
        except OSError:
            if not (folder / ID).is_file():  # else another process made it first
                raise
        self._opened(name)
        self.done = self._layers_read()

    def _clear(self, name: str) -> None:
        """Remove the leftovers of dead writers of the target, and a folder without an id.

        A folder without an id is half deleted or half restored, and would block the complete one.
        """
        folder = self._folder / name
        if folder.exists() and not (folder / ID).is_file():
            logger.warning("%s is not whole: it is removed, and made again", folder)
            with suppress(FileNotFoundError):  # another process was first
                folder.rename(self._folder / f"{name}.{uuid.uuid4().hex}.partial")
        for partial in self._folder.glob(f"{name}.*.partial"):
            lock = partial.with_suffix(".lock")
            if not is_held(lock):
                shutil.rmtree(partial, ignore_errors=True)
                lock.unlink(missing_ok=True)

    @contextmanager
    def _room(self, name: str) -> Iterator[Path]:
        """Yield a folder to write in.

        Its lock is made first and removed last: if the folder has no lock, its writer is dead, on
        whatever host it ran.
        """
        permissions.make_folder(self._folder, is_shared=True)
        partial = self._folder / f"{name}.{uuid.uuid4().hex}.partial"
        lock = partial.with_suffix(".lock")
        with permissions.open_shared(lock) as file:
            try:
                with suppress(OSError):  # without file locks, others cannot take it either
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                permissions.make_folder(partial, is_shared=True)
                yield partial
            finally:
                shutil.rmtree(partial, ignore_errors=True)
                lock.unlink(missing_ok=True)

    def _write(self, name: str, folder: Path, triples: SvdProcess) -> Iterator[bytes]:
        """Decompose layer after layer into files in the folder, and yield their contents.

        The files are written, not memory-mapped: on a full disk, writing to a mapped file kills the
        process.
        """
        layers, inputs, outputs = self._shapes[name]
        count = min(inputs, outputs)
        shapes = {"u": (count, outputs), "s": (count,), "v": (count, inputs)}
        already = sum(self._shapes[each][0] for each in tuple(self._read) if each != name)
        with ExitStack() as opened:
            paths = [folder / f"{part}.npy" for part in shapes]
            files = [opened.enter_context(permissions.open_shared(each)) for each in paths]
            for file, shape in zip(files, shapes.values(), strict=True):
                write_header(file, (layers, *shape))
            for layer, weight in zip(range(layers), self._layers(name), strict=True):
                if not threading.main_thread().is_alive():  # the process waits for this thread
                    raise ServerError("the worker stops; ask again")
                if weight.shape != (inputs, outputs):
                    told = f"{name} of layer {layer} has the shape {weight.shape}"
                    raise ValueError(f"{told}, not {(inputs, outputs)}")
                try:
                    found = triples.decompose(weight)
                except np.linalg.LinAlgError as error:
                    raise np.linalg.LinAlgError(f"{name} of layer {layer}: {error}") from error
                for file, content in zip(files, found, strict=True):
                    file.write(content)
                    yield content
                self.done = already + layer + 1
                logger.info(
                    "decomposed %s of layer %d: %d of %d", name, layer, self.done, self.weights
                )
            for file in files:
                file.flush()
                os.fsync(file.fileno())


def svd_bytes(inputs: int, outputs: int) -> int:
    """Estimate the bytes of memory that the triples of a weight take.

    The sum has the weight and the triples in float64, a copy of each in LAPACK's layout, and
    LAPACK's workspace. Measured: 84 to 90 % of it.
    """
    count = min(inputs, outputs)
    return 8 * (2 * inputs * outputs + 2 * count * (inputs + outputs) + 4 * count**2)


def trainable_mask(rank: int, size: int) -> Array:
    """Return 1 for the first ``rank`` of ``size`` directions, and 0 for the others."""
    return (np.arange(size) < rank).astype(np.float32)
