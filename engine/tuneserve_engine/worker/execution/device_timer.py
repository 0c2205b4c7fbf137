"""Device seconds: how long a batch had the device, and for which of its requests."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


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
        self._batch = DeviceTime()

    @contextmanager
    def time_batch(self) -> Iterator[DeviceTime]:
        """Time the calls of a batch. May be entered during a call of another batch."""
        before, self._batch = self._batch, DeviceTime()
        started_s = self.now_s()
        try:
            yield self._batch
        finally:
            self._batch = before
            self._between_s += self.now_s() - started_s

    @contextmanager
    def charge(self, parts: Mapping[str, float] | None = None) -> Iterator[dict[str, float]]:
        """Charge the time of the calls inside to their requests.

        ``parts`` maps requests to their parts of the work, in any measure. The yielded dictionary
        starts with them, and the caller may add parts that the calls return. Calls that raise are
        charged to no request.
        """
        of_requests = dict(parts or {})
        batch, started_s = self._batch, self.now_s()
        batch.began_s = batch.began_s or self._clock()
        try:
            yield of_requests
        except BaseException:
            of_requests.clear()
            raise
        finally:
            seconds = self.now_s() - started_s
            batch.device_s += seconds
            whole = sum(of_requests.values())
            for request_id, part in of_requests.items():
                if part:
                    known_s = batch.shares.get(request_id, 0.0)
                    batch.shares[request_id] = known_s + seconds * part / whole

    def now_s(self) -> float:
        """Return the timer's own time in seconds."""
        return self._clock() - self._waited_s() - self._between_s
