"""The jobs that a model holds until it is ready."""

from tuneserve_engine.core.jobs import Job, JobKind
from tuneserve_engine.worker.models.hosted import HostedModel


def test_held_jobs_are_taken_once() -> None:
    job = Job("t", JobKind.OPTIM_STEP, "m", 1)
    one, other = HostedModel(is_ready=False), HostedModel(is_ready=False)
    one.held.append(job)
    assert (one.take_held(), one.take_held(), other.held) == ([job], [], [])
