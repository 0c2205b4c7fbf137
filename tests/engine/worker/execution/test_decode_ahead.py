"""Prefetching payloads: the jobs, their order and the limit."""

from concurrent.futures import Executor, Future
from itertools import count
from typing import Any

import pytest

from tuneserve_engine.core.jobs import Job, JobKind
from tuneserve_engine.worker.execution.decode_ahead import PayloadPrefetcher
from tuneserve_engine.worker.scheduling.scheduler import MAX_BYTES, Scheduler

GRADIENT, STEP = JobKind.FORWARD_BACKWARD, JobKind.OPTIM_STEP
numbers = count()


def job(tenant: str, kind: JobKind = GRADIENT, size: int = 1) -> Job:
    number = next(numbers)
    return Job(
        tenant, kind, tenant, number, bytes(size), tenant, 0, request_id=f"r{number}",
        release=number,
    )  # fmt: skip


class ByHand(Executor):
    """An executor that runs calls when the test lets it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Future[Any], Job]] = []

    def submit(self, call: Any, /, *given: Any, **_: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.calls.append((future, given[0]))
        return future

    def run(self) -> None:
        """Run the calls that have not been cancelled."""
        for future, each in self.calls:
            if future.set_running_or_notify_cancel():
                future.set_result(each.request_id)
        self.calls.clear()

    @property
    def waiting(self) -> list[str]:
        return [each.request_id for future, each in self.calls if not future.cancelled()]


@pytest.fixture
def host() -> ByHand:
    return ByHand()


@pytest.fixture
def ahead(host: ByHand) -> PayloadPrefetcher[str]:
    return PayloadPrefetcher(lambda each: each.request_id, host)


def ids(jobs: list[Job]) -> list[str]:
    return [each.request_id for each in jobs]


# --- decoding -------------------------------------------------------------------------------------


def test_a_prefetched_payload_is_decoded_once_and_popped_once(
    ahead: PayloadPrefetcher[str], host: ByHand
) -> None:
    jobs = [job("a"), job("b"), job("c")]
    ahead.prefetch(jobs[:2])
    ahead.prefetch(jobs)
    assert host.waiting == ids(jobs)
    host.run()
    taken = ahead.pop(jobs[:2])
    assert {name: future.result() for name, future in taken.items()} == dict(
        zip(ids(jobs[:2]), ids(jobs[:2]), strict=True)
    )
    assert ahead.pop(jobs[:2]) == {}


def test_a_payload_that_is_no_longer_expected_is_forgotten(
    ahead: PayloadPrefetcher[str], host: ByHand
) -> None:
    gone, stays = job("a"), job("b")
    ahead.prefetch([gone, stays])
    ahead.prefetch([stays])
    assert host.waiting == ids([stays])
    assert [*ahead.pop([gone, stays])] == ids([stays])


def test_prefetching_is_limited_to_the_payloads_of_two_batches(
    ahead: PayloadPrefetcher[str], host: ByHand
) -> None:
    jobs = [job(name, size=MAX_BYTES // 2) for name in "abcdef"]
    ahead.prefetch(jobs)
    assert host.waiting == ids(jobs[:4])
    host.run()
    ahead.pop(jobs[:2])
    ahead.prefetch(jobs[2:])
    assert host.waiting == ids(jobs[4:])


def test_a_request_above_the_limit_is_prefetched_alone(
    ahead: PayloadPrefetcher[str], host: ByHand
) -> None:
    jobs = [job("a", size=3 * MAX_BYTES), job("b")]
    ahead.prefetch(jobs)
    assert host.waiting == ids(jobs[:1])


# --- what comes next ------------------------------------------------------------------------------


def scheduler(used: dict[str, float]) -> Scheduler:
    """A scheduler that expects a gradient to take a second. Its tenants have used these seconds."""
    device = Scheduler(batch_s=1.0)
    for tenant, seconds in used.items():
        device.charge([job(tenant, JobKind.SAVE_WEIGHTS)], seconds)
    device.charge([job("z", size=0)], 1.0)
    return device


def test_tenants_take_turns_starting_with_the_one_that_used_the_least() -> None:
    jobs = [job(name) for name in "aaabbc"]
    upcoming = scheduler({"a": 0.5, "b": 0.0, "c": 0.7}).upcoming(jobs, [job("z")], 64)
    assert [each.tenant for each in upcoming] == ["b", "a", "c", "b", "a", "a"]
    assert {each.tenant for each in upcoming[:3]} == {*"abc"}
    by_tenant = {name: [each for each in upcoming if each.tenant == name] for name in "abc"}
    assert all(mine == sorted(mine, key=lambda j: j.release) for mine in by_tenant.values())


def test_the_tenants_of_the_running_batch_come_after_the_waiting_ones() -> None:
    """Otherwise their loaded adapters would take the room of the next tenants' adapters."""
    jobs = [job("a", STEP), job("b"), job("c")]
    upcoming = scheduler({}).upcoming(jobs, [job("a")], 64)
    assert [each.tenant for each in upcoming] == ["b", "c", "a"]


def test_the_number_of_upcoming_jobs_is_limited() -> None:
    jobs = [job("a") for _ in range(10)]
    assert scheduler({}).upcoming(jobs, [job("a")], 3) == jobs[:3]


def test_predicting_upcoming_jobs_changes_no_turn() -> None:
    jobs = [job(name) for name in "abab"]
    asked, silent = scheduler({"a": 0.1}), scheduler({"a": 0.1})
    asked.upcoming(jobs, [job("a")], 64)
    assert asked.next_batch(jobs) == silent.next_batch(jobs)
