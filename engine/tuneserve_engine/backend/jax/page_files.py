"""Files of adapters that are paged out. No checkpoints: they mean nothing to another process."""

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tuneserve_engine.adapters import AdapterConfig
from tuneserve_engine.backend.base import AdapterState, Tensors
from tuneserve_engine.errors import ServerError

_SUFFIX = ".page"
_GROUPS = ("weights", "first_moment", "second_moment", "accumulator")


@dataclass(frozen=True)
class PageFile:
    """One adapter's tensors on disk; what is small stays here."""

    path: Path
    config: AdapterConfig
    step: int

    @classmethod
    def write(cls, path: Path, state: AdapterState) -> "PageFile":
        """Writes the state, whose arrays are contiguous, to ``path`` with a suffix.

        Raises ServerError, and leaves no file, if that fails.
        """
        path = path.with_suffix(_SUFFIX)
        try:
            save_file(tensors_of(state), path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise ServerError(
                f"an adapter of {bytes_of(state)} bytes could not be written to {path.parent}: "
                f"{error}; make room there, or give adapters more of the host's memory"
            ) from error
        return cls(path, state.config, state.step)

    def read(self) -> AdapterState:
        """The state, bit for bit; ServerError if the file is gone or damaged."""
        groups: dict[str, Tensors] = {group: {} for group in _GROUPS}
        try:
            tensors = load_file(self.path)
        except (OSError, SafetensorError) as error:
            raise ServerError(
                f"a paged-out adapter could not be read from {self.path}: {error}; restart the "
                "worker, which restores it from its last recovery point"
            ) from error
        for key, tensor in tensors.items():
            group, name = key.split("/", 1)
            groups[group][name] = tensor
        return AdapterState(self.config, step=self.step, **groups)

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)

    @staticmethod
    def empty(directory: Path) -> None:
        """Makes the directory, or deletes what an earlier process left in it."""
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(f"*{_SUFFIX}"):
            path.unlink()


def tensors_of(state: AdapterState) -> Tensors:
    """All tensors of a state, as ``group/name``."""
    return {
        f"{group}/{name}": tensor
        for group in _GROUPS
        for name, tensor in getattr(state, group).items()
    }


def bytes_of(state: AdapterState) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(state).values())
