"""A connection between two processes of a worker, each of which notices the end of the other.

The messages are pickled. Anyone who can send one runs code here, so a connection starts with proofs
that both sides have the same key.
"""

import hmac
import logging
import pickle  # noqa: S403 - from processes that have proved that they know the worker's key
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from tuneserve_engine.backend.base import DeviceFailed

logger = logging.getLogger(__name__)

SILENCE_S = 30.0
"""The seconds after which a silent process counts as lost."""
ANSWER_S = 600.0
"""The seconds for which a process waits for another's part in a call after its own."""
_PING_S = 1.0
_END_S = 5.0
_LENGTH = struct.Struct("!Q")
_NONCE_BYTES = _PROOF_BYTES = 32
_PART_BYTES = 2**20
"""The bytes that the other side takes within the time of silence, if it takes any."""
_SIDES = (b"leader", b"follower")
_CLOSED = "it has closed the connection"


class MemberLost(DeviceFailed):
    """A process of this worker is gone, silent or out of step: the worker cannot go on."""


class WrongKey(Exception):
    """The process at the other end does not have the key of this worker."""


class _Ping(NamedTuple):
    """The message of a process that has nothing to say."""


def packed(message: object) -> bytes:
    """Return a message as ``Link.send_packed`` takes it."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


class Channel:
    """Messages of bytes over a connected socket, one way at a time.

    Raises ``OSError`` if the connection is broken, and also if the other side neither takes nor
    sends a byte for ``silence_s``.
    """

    def __init__(self, connected: socket.socket, silence_s: float) -> None:
        connected.settimeout(silence_s)
        with suppress(OSError):  # a socket of another family
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected

    def allow_silence(self, silence_s: float) -> None:
        self._socket.settimeout(silence_s)

    def prove(self, key: bytes, *, leads: bool) -> None:
        """Exchange proofs of the key. Raises ``WrongKey`` if the other side has another one."""
        mine, other = _SIDES if leads else _SIDES[::-1]
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._socket.sendall(nonce)
        nonces = nonce, self._exactly(_NONCE_BYTES)
        both = b"".join(nonces if leads else nonces[::-1])
        self._socket.sendall(hmac.digest(key, mine + both, "sha256"))
        proof = self._exactly(_PROOF_BYTES)
        if not hmac.compare_digest(bytes(proof), hmac.digest(key, other + both, "sha256")):
            raise WrongKey

    def send(self, body: bytes) -> None:
        self._socket.sendall(_LENGTH.pack(len(body)))
        rest = memoryview(body)
        while rest:
            self._socket.sendall(rest[:_PART_BYTES])
            rest = rest[_PART_BYTES:]

    def receive(self, most: int | None = None) -> bytearray:
        """Return the next message. Raises ``ValueError`` if it has more than ``most`` bytes."""
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if most is not None and size > most:
            raise ValueError(f"a message of {size} bytes; the most is {most}")
        return self._exactly(size)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        body = bytearray(size)
        rest = memoryview(body)
        while rest:
            count = self._socket.recv_into(rest)
            if not count:
                raise EOFError(_CLOSED)
            rest = rest[count:]
        return body


class Link:
    """A channel to a process ``name`` of this worker, which shows every second that it lives.

    ``on_message`` is called, on a thread of the link, with every message; those for which it
    returns False wait for ``receive``: for ``wait_s`` at most, if given. ``on_lost`` is called once
    with the reason if the process is gone, silent or out of step. After that, ``send`` and
    ``receive`` raise ``MemberLost``.
    """

    def __init__(
        self,
        channel: Channel,
        name: str,
        on_message: Callable[[Any], bool],
        on_lost: Callable[[str], None],
        *,
        wait_s: float | None = None,
    ) -> None:
        self.name = name
        self._wait_s = wait_s
        self._channel = channel
        self._on_message = on_message
        self._on_lost = on_lost
        self._sending = threading.Lock()
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._newest_s = 0.0  # when the newest of them arrived
        self._ended = threading.Event()
        self._reason = ""
        self._reader = threading.Thread(target=self._read, name=f"link-{name}", daemon=True)

    def start(self) -> None:
        self._reader.start()
        threading.Thread(target=self._ping, name=f"ping-{self.name}", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        return self._ended.is_set()

    def send(self, message: object) -> None:
        """Send the message. Thread-safe."""
        self.send_packed(packed(message))

    def send_packed(self, body: bytes) -> None:
        """Send what ``packed`` has returned. Thread-safe."""
        try:
            with self._sending:
                self._channel.send(body)
        except ConnectionError:
            self.lose(_CLOSED)
        except OSError as error:
            self.lose(f"nothing can be sent to it: {error}")
        if self._ended.is_set():
            raise self._lost()

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message that waits. Call it from one thread.

        If none comes for ``timeout_s``, the process is lost.
        """
        try:
            message = self._messages.get(timeout=timeout_s)
        except Empty:
            self.lose(f"it has not answered for {timeout_s:g} s")
        if self._ended.is_set():
            raise self._lost()
        return message

    def send_last(self, message: object) -> None:
        """Send the last message: the end of the other process is no loss any more."""
        self._ended.set()
        with suppress(OSError), self._sending:
            self._channel.send(packed(message))

    def drop(self) -> None:
        """Close the connection; the end of the other process is no loss any more."""
        self._ended.set()
        self._channel.close()

    def wait_for_end(self) -> None:
        """Wait some seconds for the end of the other process, and close the connection."""
        self._reader.join(_END_S)
        self._channel.close()

    def lose(self, reason: str) -> None:
        """Treat the process as lost."""
        if self._ended.is_set():
            return
        self._reason = reason
        self._ended.set()
        self._channel.close()
        self._messages.put(None)  # wakes ``receive``
        self._on_lost(f"{self.name}: {reason}")

    def _lost(self) -> MemberLost:
        return MemberLost(f"{self.name}, a process of this worker, is lost: {self._reason}")

    def _read(self) -> None:
        try:
            while True:
                message = pickle.loads(self._channel.receive())  # noqa: S301
                if not isinstance(message, _Ping) and not self._on_message(message):
                    self._newest_s = time.monotonic()
                    self._messages.put(message)
        except TimeoutError:
            self.lose("it has been silent for too long")
        except ConnectionError:  # it ended before it took all that was sent to it
            self.lose(_CLOSED)
        except (OSError, EOFError) as error:
            self.lose(str(error))
        except Exception as error:
            logger.exception("a message of %s cannot be read", self.name)
            self.lose(f"its message cannot be read: {error!r}")

    def _ping(self) -> None:
        while not self._ended.wait(_PING_S):
            with suppress(MemberLost):
                self.send(_Ping())
            age_s = time.monotonic() - self._newest_s
            if self._wait_s is not None and not self._messages.empty() and age_s > self._wait_s:
                self.lose(f"it has been {age_s:.0f} s ahead of this process: they are out of step")
