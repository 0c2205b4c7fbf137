"""The start of a worker of several processes: they meet, and strangers stay outside."""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from queue import Empty, SimpleQueue

from tuneserve_engine.backend.hosts.link import SILENCE_S, Channel, Link, WrongKey

logger = logging.getLogger(__name__)

MEETING_S = 600.0
"""The seconds for which processes wait for each other at the start."""
_HANDSHAKE_S = 5.0
_HANDSHAKES = 32
"""The connections that are looked at together; a stranger holds up none but its own."""
_HELLO_BYTES = 4096
_LOOK_S = 0.2
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


Welcome = Callable[[int, Channel], Link]
"""A function that starts a link to a follower."""
Arrival = tuple[int, Channel]


def wait_for_followers(hosts: Hosts, welcome: Welcome) -> list[Link]:
    """Return a link to each follower, in the order of their numbers.

    A follower that is lost while others are missing may come again. Raises ``NotMet`` if they are
    not all there in time, or if a port is taken: it stays taken as long as this process lives.
    """
    links: dict[int, Link] = {}
    wanted = range(1, len(hosts.names))
    deadline_s, reminded_s = time.monotonic() + hosts.meeting_s, time.monotonic()
    server = _listening(hosts.port)
    try:
        _listening(hosts.port + 1).close()  # two services of JAX could share it unnoticed
    except NotMet:
        server.close()
        raise
    with _arrivals(server, hosts) as arrivals:
        while missing := [hosts.names[n] for n in wanted if n not in links or links[n].is_lost]:
            if time.monotonic() > deadline_s:
                break
            if time.monotonic() - reminded_s > _REMIND_S:
                logger.info("waiting for %s", ", ".join(missing))
                reminded_s = time.monotonic()
            with suppress(Empty):
                number, channel = arrivals.get(timeout=_LOOK_S)
                if number in links:
                    logger.warning("%s has come again: its first is let go", hosts.names[number])
                    links[number].drop()
                links[number] = welcome(number, channel)
                logger.info("%s is here", hosts.names[number])
    if missing:
        for link in links.values():
            link.drop()
        server.close()
        raise NotMet(
            f"{', '.join(missing)} did not come within {hosts.meeting_s:g} s; start the worker "
            f"there, too, with the same hosts, and let it reach {hosts.names[0]}:{hosts.port}"
        )
    threading.Thread(target=_turn_away, args=(server,), daemon=True).start()
    return [links[number] for number in wanted]


@contextmanager
def _arrivals(server: socket.socket, hosts: Hosts) -> Iterator["SimpleQueue[Arrival]"]:
    """Let followers in on other threads; yield a queue of those that have come."""
    found: SimpleQueue[Arrival] = SimpleQueue()
    ending = threading.Event()

    def accept() -> None:
        pool = ThreadPoolExecutor(_HANDSHAKES)
        while not ending.is_set():
            with suppress(TimeoutError):
                connected, address = server.accept()
                pool.submit(let_in, connected, address[0])
        pool.shutdown(wait=False, cancel_futures=True)

    def let_in(connected: socket.socket, address: str) -> None:
        shown = address.removeprefix("::ffff:")  # one of version 4 on a socket of version 6
        try:
            number, channel = _welcomed(hosts, connected)
        except WrongKey:
            logger.warning("%s has another hosts_key; it is not let in", shown)
        except Exception as error:  # of any kind: it comes from outside
            logger.warning("%s is not let in: %s", shown, error)
        else:
            found.put((number, channel))
            if ending.is_set():
                channel.close()

    server.settimeout(_LOOK_S)
    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield found
    finally:
        ending.set()
        accepting.join()
        with suppress(Empty):
            while True:
                found.get_nowait()[1].close()


def _welcomed(hosts: Hosts, connected: socket.socket) -> Arrival:
    """Let a follower in. Raises ``ValueError``, after telling it, if it does not belong here."""
    with _handshake(connected, hosts) as channel:
        channel.prove(hosts.key, leads=True)
        hello = json.loads(channel.receive(_HELLO_BYTES))
        number, count, release = (hello.get(name) for name in ("number", "hosts", "version"))
        refusal = ""
        if release != version("tuneserve"):
            refusal = f"it has tuneserve {release}, the leader has {version('tuneserve')}"
        elif count != len(hosts.names) or number not in range(1, len(hosts.names)):
            refusal = f"it is number {number} of {count} hosts, here are {len(hosts.names)}"
        channel.send(refusal.encode())
        if refusal:
            raise ValueError(refusal)
    return int(number), channel


def find_leader(hosts: Hosts) -> Channel:
    """Return a channel to the leader, as soon as it is there.

    Raises ``NotMet`` if it does not come in time, and ``ValueError`` if it refuses this process.
    """
    address = hosts.names[0], hosts.port
    deadline_s, reminded_s = time.monotonic() + hosts.meeting_s, time.monotonic()
    while True:
        try:
            return _met(hosts, address)
        except WrongKey:
            raise ValueError(
                f"the leader at {address[0]}:{address[1]} has another hosts_key; give all hosts "
                "of a worker the same one"
            ) from None
        except (OSError, EOFError) as error:  # not there yet, or about to end
            if time.monotonic() - reminded_s > _REMIND_S:
                logger.info("waiting for the leader at %s:%d: %s", *address, error)
                reminded_s = time.monotonic()
        if time.monotonic() > deadline_s:
            break
        time.sleep(_RETRY_S)
    raise NotMet(f"the leader at {address[0]}:{address[1]} did not come in {hosts.meeting_s:g} s")


def _met(hosts: Hosts, address: tuple[str, int]) -> Channel:
    hello = {"number": hosts.number, "hosts": len(hosts.names), "version": version("tuneserve")}
    with _handshake(socket.create_connection(address, _HANDSHAKE_S), hosts) as channel:
        channel.prove(hosts.key, leads=False)
        channel.send(json.dumps(hello).encode())
        if refusal := channel.receive(_HELLO_BYTES).decode():
            raise ValueError(f"the leader does not let this host in: {refusal}")
    return channel


@contextmanager
def _handshake(connected: socket.socket, hosts: Hosts) -> Iterator[Channel]:
    """Yield a channel that is closed if the block fails, or takes too long."""
    channel = Channel(connected, _HANDSHAKE_S)
    ending = threading.Timer(_HANDSHAKE_S, channel.close)
    ending.daemon = True
    ending.start()
    try:
        yield channel
    except BaseException:
        channel.close()
        raise
    finally:
        ending.cancel()
    channel.allow_silence(hosts.silence_s)


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


def _listening(port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:  # an earlier process may be about to end
        raise NotMet(
            f"port {port} (hosts_port, and the next one) cannot be used: {error.strerror}"
        ) from error


def _turn_away(server: socket.socket) -> None:
    """Close all connections that come: the worker is whole. The port stays that of this worker."""
    server.settimeout(None)
    with suppress(OSError):
        while True:
            server.accept()[0].close()
