"""Log lines about a worker's batches: at most one a second, and one per batch at level DEBUG."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tuneserve_engine.core.jobs import Job

logger = logging.getLogger(__name__)

EVERY_S = 1.0


@dataclass(frozen=True)
class BatchTimes:
    """Seconds of a batch: from its choice to its end, on the device, and for encoding afterwards.

    ``whole_s`` includes ``device_s``; ``encoding_s`` is the time for the results after the end.
    """

    whole_s: float
    device_s: float
    encoding_s: float


@dataclass
class _Sum:
    batches: int = 0
    jobs: Counter[str] = field(default_factory=Counter)
    tenants: set[str] = field(default_factory=set)
    failed: int = 0
    device_s: float = 0.0


class BatchLog:
    """A log that sums batches up, and logs the sum a second after the first of them ended."""

    def __init__(self) -> None:
        self._sum = _Sum()

    def record(self, batch_id: str, jobs: Sequence[Job], failed: int, times: BatchTimes) -> None:
        """Add a batch that has ended, in which ``failed`` of the jobs failed."""
        logger.debug(
            "unit %s: %d %s of %d tenants, %d failed, %.3f s; %.3f s of it on the device, then "
            "%.3f s for the results",
            batch_id,
            len(jobs),
            jobs[0].kind,
            len({job.tenant for job in jobs}),
            failed,
            times.whole_s,
            times.device_s,
            times.encoding_s,
            extra={
                "batch_id": batch_id,
                "request_ids": [job.request_id for job in jobs],
                "tenants": sorted({job.tenant for job in jobs}),
            },
        )
        if self._sum.batches == 0:
            asyncio.get_running_loop().call_later(EVERY_S, self.flush)
        self._sum.batches += 1
        self._sum.jobs.update(str(job.kind) for job in jobs)
        self._sum.tenants |= {job.tenant for job in jobs}
        self._sum.failed += failed
        self._sum.device_s += times.device_s

    def flush(self) -> None:
        """Log the batches recorded since the last line, if there are any."""
        total, self._sum = self._sum, _Sum()
        if total.batches:
            logger.info(
                "%d units: %s of %d tenants, %d failed, %.3f s on the device",
                total.batches,
                ", ".join(f"{count} {kind}" for kind, count in sorted(total.jobs.items())),
                len(total.tenants),
                total.failed,
                total.device_s,
                extra={"tenants": sorted(total.tenants)},
            )
