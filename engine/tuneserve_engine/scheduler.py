"""Which jobs run together next. Pure: values in, jobs out."""

from collections.abc import Mapping, Sequence

from tuneserve_engine.jobs import Job, JobKind

_SHARED = {JobKind.FORWARD_BACKWARD, JobKind.OPTIM_STEP, JobKind.SAMPLE}
"""Kinds of which many jobs can share a unit."""

MAX_JOBS = 32
"""Jobs of one unit: bounds how long everyone else waits for it."""

MAX_BYTES = 1 << 20
"""Payload bytes after which a unit takes no further job; a larger job still runs, alone."""


def next_unit(pending: Sequence[Job], last_served: Mapping[str, int]) -> list[Job]:
    """The jobs of the next pass, in ``release`` order; empty only if nothing is pending.

    ``pending`` is in release order; ``last_served`` counts up with every unit. The tenant that was
    served longest ago goes first, with its oldest runnable job; runnable jobs of that kind join, in
    the same order of tenants, as room allows. A model's jobs run in order: behind its first pending
    job only more of the same ``forward_backward`` run can share the unit.
    """
    runnable = _runnable(pending)
    if not runnable:
        return []
    in_turn = sorted(runnable, key=lambda job: (last_served.get(job.tenant, -1), job.release))
    first = in_turn[0]
    if first.kind not in _SHARED:
        return [first]
    chosen = {first.request_id}
    size = len(first.payload)
    for job in in_turn:
        if job.kind != first.kind or job.request_id in chosen or len(chosen) == MAX_JOBS:
            continue
        if size + len(job.payload) > MAX_BYTES or _overtakes(job, runnable, chosen):
            continue
        chosen.add(job.request_id)
        size += len(job.payload)
    return [job for job in runnable if job.request_id in chosen]


def _runnable(pending: Sequence[Job]) -> list[Job]:
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


def _overtakes(job: Job, runnable: Sequence[Job], chosen: set[str]) -> bool:
    """Whether an earlier job of the same model was left out."""
    return job.model_id is not None and any(
        other.model_id == job.model_id
        and other.release < job.release
        and other.request_id not in chosen
        for other in runnable
    )
