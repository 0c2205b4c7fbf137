"""The room for adapters on the device, in host memory and on disk."""

from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True)
class AdapterRoom:
    """The room for adapters on the device, in host memory and on disk.

    Training adapters take at most ``device_bytes`` of the device; the host takes at most
    ``host_bytes``; the rest goes to files in a new directory under ``directory`` (None: the
    system's temporary directory). Snapshots, which are sampled from, have their own budget: at most
    ``snapshot_bytes`` of the device and a quarter of ``host_bytes``; the remaining three quarters
    are for training adapters. ``decompositions`` is the directory of what some kinds of adapters
    share (None: in the same directory as the files). All these files leave ``min_free_bytes`` of
    the disk free.
    """

    device_bytes: int = _UNLIMITED_BYTES
    host_bytes: int = _UNLIMITED_BYTES
    directory: Path | None = None
    snapshot_bytes: int = _UNLIMITED_BYTES
    decompositions: Path | None = None
    min_free_bytes: int = 0
