"""Unix sockets in the data directory, to which the permissions of the file control access."""

import os
import socket
import stat
from pathlib import Path

from tuneserve_engine.process.permissions import make_folder

MAX_PATH_BYTES = 100  # the kernel's limit is 108 on Linux, 104 on macOS, with the final zero


def check_path(path: Path) -> None:
    """Raise ``ValueError`` if the path is too long for the system."""
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise ValueError(
            f"the socket path {path} has {size} bytes; the system allows at most {MAX_PATH_BYTES}; "
            "choose a shorter data directory"
        )


def listen(path: Path) -> socket.socket:
    """Return a listening socket to which only its owner can connect.

    The socket listens only after its permissions are set; clients that connect before it is served
    wait. Replaces the socket of a process that is gone; raises ``FileExistsError`` if it is in use.
    """
    check_path(path)
    make_folder(path.parent)
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} is not a socket; move it away or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()  # its process is gone
            return
    raise FileExistsError(
        f"another process serves {path}; stop it, or give this one a data directory of its own"
    )
