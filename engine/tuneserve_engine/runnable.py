"""Which of the jobs that wait may run now, and beside others."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tuneserve_engine.jobs import Job, JobKind

_SHARED = {JobKind.FORWARD_BACKWARD, JobKind.OPTIM_STEP}
"""Kinds of which many jobs can share a unit, beside samples."""


class Running(NamedTuple):
    """A unit that has had the device for so many ``seconds``, and goes on. Meanwhile others had it
    for ``interrupted_s``."""

    unit: Sequence[Job]
    seconds: float
    interrupted_s: float


class UnderWay(NamedTuple):
    """A sample that has begun, and how many sequences it has still to end."""

    job: Job
    sequences: int


def by_tenant(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    """Each tenant's, in release order."""
    found: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: job.release):
        found.setdefault(job.tenant, []).append(job)
    return found


def is_sample(job: Job) -> bool:
    return job.kind == JobKind.SAMPLE


def can_share(job: Job) -> bool:
    """Whether the job may share a unit. Not one that may have killed a worker, nor one that needs
    halved micro-batches."""
    return job.kind in _SHARED and job.attempts == 0 and job.halvings == 0


def runnable_of(pending: Sequence[Job]) -> list[Job]:
    """Jobs that nothing earlier of their model must precede, or only a run of gradients."""
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
