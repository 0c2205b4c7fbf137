"""The start of a worker of several processes: they meet, share the devices and compare notes."""

import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

from tuneserve_engine.backend.hosts.link import SILENCE_S, Channel, WrongKey
from tuneserve_engine.core.backend_options import PlanRequest

logger = logging.getLogger(__name__)

MEETING_S = 600.0
"""The seconds for which processes wait for each other at the start."""
_HANDSHAKE_S = 5.0
_RETRY_S = 0.5
_REMIND_S = 30.0


class NotMet(Exception):
    """The processes of a worker have not come together; a later start may succeed."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a worker by name, the leader's first, and this process's number among them.

    ``key`` is known to all of them. The leader listens on ``port``, and JAX on the next one.
    """

    names: Sequence[str]
    number: int
    port: int
    key: bytes
    meeting_s: float = MEETING_S
    silence_s: float = SILENCE_S

    @property
    def coordinator(self) -> str:
        """The address at which JAX's processes find each other."""
        name = self.names[0]
        return f"[{name}]:{self.port + 1}" if ":" in name else f"{name}:{self.port + 1}"


class _Hello(NamedTuple):
    """The first message of a follower."""

    number: int
    hosts: int
    version: str


class Terms(NamedTuple):
    """The leader's choices, which the followers adopt: all plan the same memory alike."""

    device: Any
    plan: PlanRequest


def wait_for_followers(hosts: Hosts) -> dict[int, Channel]:
    """Return a channel to each follower, by its number.

    Raises ``NotMet`` if they are not all there in time, or if the port is taken.
    """
    channels: dict[int, Channel] = {}
    with _listening(hosts.port) as server:
        for left_s in _until(time.monotonic() + hosts.meeting_s):
            missing = [
                name for number, name in enumerate(hosts.names[1:], 1) if number not in channels
            ]
            if not missing:
                return channels
            server.settimeout(min(left_s, _REMIND_S))
            try:
                connected, address = server.accept()
            except TimeoutError:
                logger.info("waiting for %s", ", ".join(missing))
                continue
            try:
                number, channel = _welcomed(hosts, connected)
            except WrongKey:
                logger.warning("%s has another hosts_key; it is not let in", _shown(address))
            except (OSError, EOFError, ValueError) as error:
                logger.warning("%s is not let in: %s", _shown(address), error)
            else:
                if number in channels:
                    name = hosts.names[number]
                    logger.warning("%s has come again: its first process is let go", name)
                    channels[number].close()
                channels[number] = channel
                logger.info("%s is here", hosts.names[number])
    for channel in channels.values():
        channel.close()
    raise NotMet(
        f"{', '.join(missing)} did not come within {hosts.meeting_s:g} s; start the worker there, "
        f"too, with the same hosts, and let it reach {hosts.names[0]}:{hosts.port}"
    )


def _welcomed(hosts: Hosts, connected: socket.socket) -> tuple[int, Channel]:
    """Let a follower in. Raises ``ValueError``, after telling it, if it does not belong here."""
    channel = Channel(connected, _HANDSHAKE_S)
    try:
        channel.prove(hosts.key, leads=True)
        hello = channel.receive()
        refusal = ""
        if hello.hosts != len(hosts.names) or not 0 < hello.number < hello.hosts:
            refusal = (
                f"it is number {hello.number} of {hello.hosts} hosts, here are {len(hosts.names)}"
            )
        elif hello.version != version("tuneserve"):
            refusal = f"it has tuneserve {hello.version}, the leader has {version('tuneserve')}"
        channel.send(refusal)
        if refusal:
            raise ValueError(refusal)
    except BaseException:
        channel.close()
        raise
    channel.allow_silence(hosts.silence_s)
    return hello.number, channel


def find_leader(hosts: Hosts) -> Channel:
    """Return a channel to the leader, as soon as it is there.

    Raises ``NotMet`` if it does not come in time, and ``ValueError`` if it refuses this process.
    """
    address = hosts.names[0], hosts.port
    reminded_s = time.monotonic()
    for _ in _until(time.monotonic() + hosts.meeting_s):
        try:
            return _let_in(hosts, address)
        except WrongKey:
            raise ValueError(
                f"the leader at {address[0]}:{address[1]} has another hosts_key; give all hosts "
                "of a worker the same one"
            ) from None
        except (OSError, EOFError) as error:  # not there yet, or about to end
            if time.monotonic() - reminded_s > _REMIND_S:
                logger.info("waiting for the leader at %s:%d: %s", *address, error)
                reminded_s = time.monotonic()
            time.sleep(_RETRY_S)
    raise NotMet(f"the leader at {address[0]}:{address[1]} did not come in {hosts.meeting_s:g} s")


def _let_in(hosts: Hosts, address: tuple[str, int]) -> Channel:
    channel = Channel(socket.create_connection(address, _HANDSHAKE_S), _HANDSHAKE_S)
    try:
        channel.prove(hosts.key, leads=False)
        channel.send(_Hello(hosts.number, len(hosts.names), version("tuneserve")))
        refusal = channel.receive()
        if refusal:
            raise ValueError(f"the leader does not let this host in: {refusal}")
    except BaseException:
        channel.close()
        raise
    channel.allow_silence(hosts.silence_s)
    return channel


def differing(ids: Mapping[str, str], own: str) -> str | None:
    """Return how the numerics ids of other hosts differ from one's own; None if they do not."""
    for name, other in ids.items():
        if other != own:
            parts = set(other.split()) ^ set(own.split())
            return (
                f"{name} would compute other bits than the leader; of the numerics ids differ: "
                f"{' '.join(sorted(parts))}; give all hosts the same software, base model, "
                "settings and kind of device"
            )
    return None


def _shown(address: tuple[str, int]) -> str:
    """Return the IP address, without the prefix of one of version 4 on a socket of version 6."""
    return address[0].removeprefix("::ffff:")


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:  # an earlier process may be about to end
        raise NotMet(f"port {port} (hosts_port) cannot be used: {error.strerror}") from error
    with server:
        yield server


def _until(deadline_s: float) -> Iterator[float]:
    """Yield the seconds that are left, at least once, until none are."""
    yield max(deadline_s - time.monotonic(), _RETRY_S)
    while (left_s := deadline_s - time.monotonic()) > 0:
        yield left_s
