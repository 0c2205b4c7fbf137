"""``tuneserve stop``: ends the service of a data directory, as Ctrl-C in its terminal would."""

import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import typer

from tuneserve_server.cli import output
from tuneserve_server.cli.options import AsJson
from tuneserve_server.cli.output import FAILED, end

_PEER = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)

DataDir = Annotated[Path | None, typer.Option(help="Data directory of the service.", metavar="DIR")]


def stop(
    data_dir: DataDir = None,
    timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for its end.", metavar="SECONDS")
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Stop the service of a data directory on this machine, and wait until it has ended.

    Requests that were accepted stay in the store, and go on at the next start.
    """
    if sys.platform != "linux":
        end("stop works on Linux only; press Ctrl-C in the terminal of the service", FAILED)
    address = output.settings_here(data_dir).admin_socket
    try:
        api = _process_at(address)
    except OSError as error:
        end(
            f"no API process answers at {address.absolute()} ({error.strerror}); name the data "
            "directory of the service with --data-dir",
            FAILED,
        )
    service = _supervisor_of(api) or api
    with ExitStack() as stack:
        # Descriptors, because another process may get the number of one that has ended.
        opened = {pid: _open(pid, stack) for pid in (service, api)}
        try:
            signal.pidfd_send_signal(opened[service], signal.SIGTERM)
        except PermissionError:
            end(f"process {service} is another user's; stop it as that user", FAILED)
        deadline_s = time.monotonic() + timeout
        for ended in opened.values():
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([ended], [], [], left_s)[0]:
                end(f"process {service} still runs after {timeout:g} s; see its log", FAILED)
    if as_json:
        output.print_json({"data_dir": str(address.parent), "process": service})
    else:
        typer.echo(f"stopped the service of {address.parent} (process {service})")


def _process_at(address: Path) -> int:
    """Return the id of the process that listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.fspath(address))
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(peer)[0])


def _supervisor_of(pid: int) -> int | None:
    """Return the id of the ``tuneserve up`` that started the process, if one did."""
    with suppress(OSError, ValueError):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        return int(arguments[arguments.index("--supervisor") + 1])
    return None


def _open(pid: int, stack: ExitStack) -> int:
    """Return a descriptor of the process that can be read once the process has ended."""
    descriptor = os.pidfd_open(pid)
    stack.callback(os.close, descriptor)
    return descriptor
