"""Device seconds: how long a batch had the device, and for which of its requests."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass
class DeviceTime:
    """The device time of one batch.

    The part of ``device_s`` that is in none of the ``shares`` belongs to no request: calls that
    failed, or whose work cannot be attributed to single requests. ``began_s`` is the clock's time
    when the first call began; 0 before.
    """

    device_s: float = 0.0
    began_s: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)  # seconds, by request id


class DeviceTimer:
    """A timer of backend calls.

    Its time stands still while the backend waits for adapters (``waited_s`` in all), and while
    another batch has the device between two micro-batches.
    """

    def __init__(self, clock: Callable[[], float], waited_s: Callable[[], float]) -> None:
        self._clock = clock
        self._waited_s = waited_s
        self._between_s = 0.0
        self._reading = DeviceTime()

    @contextmanager
    def unit(self) -> Iterator[DeviceTime]:
        """Time the calls of a batch. May be entered during a call of another batch."""
        before, self._reading = self._reading, DeviceTime()
        started_s = self.now_s()
        try:
            yield self._reading
        finally:
            self._reading = before
            self._between_s += self.now_s() - started_s

    def timed(self, call: Callable[[], T], parts: Callable[[T], Mapping[str, float]]) -> T:
        """Return the result of the call, and charge its time to its requests.

        ``parts`` returns each request's part of the result, in any measure. A call that raises is
        charged to no request.
        """
        self._reading.began_s = self._reading.began_s or self._clock()
        started_s = self.now_s()
        try:
            given = call()
        finally:
            seconds = self.now_s() - started_s
            self._reading.device_s += seconds
        of = parts(given)
        whole = sum(of.values())
        shares = self._reading.shares
        for request_id, part in of.items():
            if part:
                shares[request_id] = shares.get(request_id, 0.0) + seconds * part / whole
        return given

    def now_s(self) -> float:
        """Return the timer's own time in seconds."""
        return self._clock() - self._waited_s() - self._between_s
