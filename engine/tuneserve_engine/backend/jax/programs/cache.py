"""Compiled programs on disk, so that a restart neither traces nor compiles them again."""

import hashlib
import logging
import pickle  # noqa: S403 - of the operator's own directory; see ProgramCache
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled

from tuneserve_engine.process.disk_room import check_room
from tuneserve_engine.process.permissions import make_folder, open_new
from tuneserve_engine.telemetry.log_throttle import ThrottledLog

logger = logging.getLogger(__name__)

_MARK = "compiled-without-the-gpu"
"""The file beside programs that ``tuneserve compile --device`` has compiled."""
_DIGEST_BYTES = hashlib.sha256().digest_size


def is_marked(folder: Path) -> bool:
    """Return whether programs in the folder were compiled for a GPU that was not there."""
    return (folder / _MARK).exists()


def mark(folder: Path) -> None:
    """Record that programs in the folder are compiled for a GPU that is not here."""
    make_folder(folder)
    (folder / _MARK).touch()


class ProgramCache:
    """Programs in ``folder``, which processes may share. Write access to it is code execution here.

    ``program_id`` stands for all that the programs depend on, so programs of another version of
    the code or of JAX, or for another device, are not found. JAX's own compilation cache is
    switched off in the whole process: on a CPU, programs loaded from it cannot be kept. A program
    that would leave less than ``min_free_bytes`` on the disk is not kept. Programs are loaded for
    ``devices``, of which there are as many as they were compiled for: one by default.
    """

    def __init__(
        self,
        folder: Path,
        program_id: str,
        *,
        min_free_bytes: int = 0,
        devices: Sequence[jax.Device] = (),
    ) -> None:
        jax.config.update("jax_enable_compilation_cache", False)  # type: ignore[no-untyped-call]
        compilation_cache.reset_cache()  # earlier compilations have fixed the use of JAX's cache
        self._folder = folder
        self._program_id = program_id
        self._min_free_bytes = min_free_bytes
        self._devices = tuple(devices) or tuple(jax.local_devices()[:1])
        logger.info("programs of %s", program_id)
        self.loaded = 0
        """The number of programs that were found in the folder."""
        self._faults = ThrottledLog(logger)

    def load(self, identity: str) -> Compiled | None:
        """Return the program that was kept under ``identity``; None if it is missing or damaged."""
        path = self._path(identity)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._faults.warn("read", f"compiled programs cannot be read again: {error}")
            return None
        digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            logger.warning("%s is damaged; it is compiled again", path)
            return None
        try:
            program, taken, given = pickle.loads(body)  # noqa: S301
            found: Compiled = serialize_executable.deserialize_and_load(
                program, taken, given, execution_devices=self._devices
            )
        except Exception as error:  # of any kind: the program can be compiled again
            logger.warning("%s cannot be loaded (%s); it is compiled again", path, error)
            return None
        self.loaded += 1
        return found

    def has(self, identity: str) -> bool:
        """Return whether a program, perhaps a damaged one, is kept under ``identity``."""
        return self._path(identity).is_file()

    def store_program(self, identity: str, compiled: Compiled) -> None:
        """Write the program, whole or not at all. A failure is only logged."""
        try:
            self.write(identity, compiled)
        except Exception as error:  # of any kind: the program itself works
            self._faults.warn(
                "keep", f"compiled programs cannot be kept in {self._folder}: {error}"
            )

    def write(self, identity: str, compiled: Compiled) -> None:
        """Write the program, whole or not at all.

        Raises ``OSError``, or what serialising it raises.
        """
        body = pickle.dumps(serialize_executable.serialize(compiled))
        check_room(self._folder, len(body), self._min_free_bytes)
        make_folder(self._folder)
        _write(self._path(identity), hashlib.sha256(body).digest() + body)

    def _path(self, identity: str) -> Path:
        digest = hashlib.sha256(f"{self._program_id}\n{identity}".encode()).hexdigest()
        return self._folder / f"{digest}.program"


def _write(path: Path, content: bytes) -> None:
    partial = path.with_suffix(f".{uuid.uuid4().hex}.partial")
    try:
        with open_new(partial) as file:
            file.write(content)
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
