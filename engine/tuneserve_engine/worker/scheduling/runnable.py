"""The waiting jobs that may run now, and that may share a batch."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tuneserve_engine.core.jobs import Job, JobKind

_SHARED = {JobKind.FORWARD_BACKWARD, JobKind.OPTIM_STEP}
"""The kinds of jobs, besides samples, that can share a batch with others of their kind."""


class Running(NamedTuple):
    """A running batch: it has had the device for ``seconds`` so far, and others in between for
    ``interrupted_s``."""

    batch: Sequence[Job]
    seconds: float
    interrupted_s: float


class RunningSample(NamedTuple):
    """A sample that has begun, and the number of its sequences that have not ended."""

    job: Job
    sequences: int


def by_tenant(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    """Return the jobs of each tenant, in release order."""
    found: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: job.release):
        found.setdefault(job.tenant, []).append(job)
    return found


def can_share(job: Job) -> bool:
    """Return whether the job may share a batch.

    A job that may have killed a worker, or that needs halved micro-batches, runs alone.
    """
    return job.kind in _SHARED and job.attempts == 0 and job.halvings == 0


def runnable_of(pending: Sequence[Job]) -> list[Job]:
    """Return the jobs that need not wait for an earlier job of their model.

    These are each model's first job and, if that is a ``forward_backward``, the
    ``forward_backward`` jobs that directly follow it. A job without a model never waits.
    """
    runnable = []
    blocked: set[str] = set()
    only_gradients: set[str] = set()
    for job in pending:
        model = job.model_id
        if model is None:
            runnable.append(job)
            continue
        gradient = job.kind == JobKind.FORWARD_BACKWARD
        if model in blocked or (model in only_gradients and not gradient):
            blocked.add(model)
            continue
        runnable.append(job)
        (only_gradients if gradient else blocked).add(model)
    return runnable
