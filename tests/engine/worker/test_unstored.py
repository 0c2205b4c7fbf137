"""Outcomes on their way to the store: their order, their repetition, and the waits for them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tuneserve_engine.core.jobs import Job, JobKind, Outcome
from tuneserve_engine.worker.accounting.usage_ledger import UsageLedger
from tuneserve_engine.worker.observers import JobObserver
from tuneserve_engine.worker.unstored import UnstoredOutcomes

pytestmark = pytest.mark.anyio

EPOCH = 5


class Queue:
    """Keeps what it is given, unless the connection is lost."""

    def __init__(self) -> None:
        self.stored: list[list[str]] = []
        self.is_lost = False

    async def finish(self, epoch: int, outcomes: Sequence[Outcome]) -> None:
        assert epoch == EPOCH
        if self.is_lost:
            raise ConnectionError
        self.stored.append([each.request_id for each in outcomes])


@asynccontextmanager
async def storing(unstored: UnstoredOutcomes, queue: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(unstored.store_forever(queue, EPOCH))
    try:
        async with asyncio.timeout(5.0):
            yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def job(name: str, model: str | None = None, position: int | None = None) -> Job:
    return Job("t", JobKind.OPTIM_STEP, "s", 0, b"", model, position, request_id=name)


class Noted(JobObserver):
    def __init__(self, noted: list[str]) -> None:
        self.noted = noted

    def on_stored(self, outcomes: Sequence[Outcome]) -> None:
        self.noted += [each.request_id for each in outcomes]


def unstored_outcomes(noted: list[str] | None = None) -> UnstoredOutcomes:
    """Outcomes whose storing is added to ``noted``."""
    return UnstoredOutcomes(UsageLedger(time.monotonic), [Noted([] if noted is None else noted)])


def start(unstored: UnstoredOutcomes, *jobs: Job) -> None:
    unstored.jobs |= {each.request_id: each for each in jobs}


async def is_waiting(waiting: asyncio.Task[None]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not waiting.done()


async def test_outcomes_that_are_offered_together_are_stored_together_and_noted() -> None:
    noted: list[str] = []
    unstored = unstored_outcomes(noted)
    queue = Queue()
    start(unstored, job("a"), job("b"), job("c"))
    async with storing(unstored, queue):
        unstored.offer([Outcome("a"), Outcome("b")])
        unstored.offer([Outcome("c")])
        await unstored.wait(None, None)
    assert queue.stored == [["a", "b", "c"]]
    assert noted == ["a", "b", "c"]


async def test_outcomes_with_large_bodies_are_stored_one_after_the_other() -> None:
    large, queue = bytes(40 * 2**20), Queue()
    unstored = unstored_outcomes()
    start(unstored, job("a"), job("b"), job("c"), job("d"))
    async with storing(unstored, queue):
        unstored.offer([Outcome("a", large + large), Outcome("b")])
        unstored.offer([Outcome("c", large), Outcome("d", recording=large)])
        await unstored.wait(None, None)
    assert queue.stored == [["a"], ["b", "c"], ["d"]]


async def test_after_a_lost_connection_the_outcomes_are_offered_again() -> None:
    noted: list[str] = []
    unstored = unstored_outcomes(noted)
    queue = Queue()
    queue.is_lost = True
    start(unstored, job("a"))
    unstored.offer([Outcome("a")])
    with pytest.raises(ConnectionError):
        await unstored.store_forever(queue, EPOCH)  # type: ignore[arg-type]
    assert noted == []
    queue.is_lost = False
    async with storing(unstored, queue):
        await unstored.wait(None, None)
    assert (queue.stored, noted) == ([["a"]], ["a"])


@pytest.mark.parametrize(
    ("model", "position", "waits"),
    [
        ("m", 3, True),
        ("m", 2, False),  # only requests before the position count
        ("m", None, True),
        ("other", 3, False),
        (None, None, True),
    ],
)
async def test_a_wait_is_for_begun_requests_of_the_model_before_the_position(
    model: str | None, position: int | None, waits: bool
) -> None:
    unstored = unstored_outcomes()
    start(unstored, job("a", "m", 2))
    waiting = asyncio.create_task(unstored.wait(model, position))
    assert await is_waiting(waiting) is waits
    async with storing(unstored, Queue()):
        unstored.offer([Outcome("a")])
        await waiting


async def test_a_request_without_a_position_is_waited_for_at_any_position() -> None:
    unstored = unstored_outcomes()
    start(unstored, job("a", "m"))
    waiting = asyncio.create_task(unstored.wait("m", 0))
    assert await is_waiting(waiting)
    unstored.drop(["a", "unknown"])
    await asyncio.wait_for(waiting, 5.0)
