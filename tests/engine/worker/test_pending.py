"""Jobs wait in the order of the store; replayed jobs come first, and their outcomes are awaited."""

import asyncio
from dataclasses import replace

import pytest

from tuneserve_engine.core.jobs import Job, JobKind, Outcome
from tuneserve_engine.store.base import LogEntry
from tuneserve_engine.worker.pending import PendingJobs


def job(name: str, release: int, model: str = "m", kind: JobKind = JobKind.OPTIM_STEP) -> Job:
    return Job("t", kind, model, release, model_id=model, request_id=name, release=release)


def names(jobs: list[Job]) -> list[str]:
    return [each.request_id for each in jobs]


def test_jobs_are_in_the_order_of_their_release() -> None:
    pending = PendingJobs()
    assert pending.is_empty and not pending.arrived.is_set()
    pending.add_jobs([job("b", 2), job("a", 1)])
    pending.add_jobs([job("a", 1)])  # taken again
    assert names(pending.in_order()) == ["a", "b"]
    assert not pending.is_empty and pending.arrived.is_set()


def test_samples_are_counted_however_they_leave() -> None:
    pending = PendingJobs()
    samples = [job(name, number, kind=JobKind.SAMPLE) for number, name in enumerate("abc")]
    for _ in range(2):
        pending.add_jobs(samples)
    pending.remove_jobs(samples[:1])
    pending.drop_requests(["b", "unknown"])
    assert pending.has_samples
    assert names(pending.withdraw("m")) == ["c"]
    assert pending.is_empty and not pending.has_samples


def test_the_jobs_of_one_model_are_withdrawn() -> None:
    pending = PendingJobs()
    pending.add_jobs([job("c", 3), job("b", 2, "n"), job("a", 1)])
    assert names(pending.withdraw("m")) == ["a", "c"]
    assert names(pending.in_order()) == ["b"]
    with pytest.raises(KeyError):
        pending.remove_jobs([job("a", 1)])


def test_a_replay_has_the_attempts_of_its_cause_and_awaits_all_outcomes() -> None:
    async def test() -> None:
        pending = PendingJobs()
        pending.add_jobs([job("new", 9)])
        logged = [replace(job("a", 1), attempts=3), job("b", 2)]
        entries = [LogEntry(each, b"", halvings=number) for number, each in enumerate(logged)]
        outcomes = pending.replay(entries, attempts=2)
        first, second, new = pending.in_order()
        assert [(each.attempts, each.halvings) for each in (first, second)] == [(3, 0), (2, 1)]
        replayed = [each.request_id in pending.replays for each in (first, second, new)]
        assert replayed == [True, True, False]
        pending.remove_jobs([first, second])
        for each in (second, first):
            pending.finish_replay(each, Outcome(each.request_id))
        assert [each.request_id for each in await outcomes] == ["a", "b"]
        assert not pending.replays

    asyncio.run(asyncio.wait_for(test(), 10))
