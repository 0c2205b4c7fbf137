"""The worker's link to the store, alone."""

import asyncio
from typing import Any

import pytest

from tests.support.fake_backend import FAKE_INFO
from tuneserve_engine.store.base import Lease, Queue, Renewal
from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_engine.worker.lease import StoreSession

TIMEOUT_S = 10


class Lost:
    """A queue that loses its connection as soon as the worker has its lease."""

    async def lease(self, *_: Any) -> Lease:
        return Lease(1, False)

    async def renew(self, *_: Any) -> Renewal:
        raise ConnectionResetError("lost")


def test_a_link_cancelled_while_it_loses_the_store_ends() -> None:
    """Until Python 3.13, a task group that fails while it is cancelled forgets the cancellation."""

    async def scenario() -> None:
        connections = 0
        unwinding = asyncio.Event()

        async def connect() -> Any:
            nonlocal connections
            connections += 1
            return Lost()

        async def traffic(queue: Queue, epoch: int) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                unwinding.set()
                await asyncio.sleep(0.01)

        link = StoreSession(connect, "worker", FAKE_INFO, lambda _: None, 1.0)
        keeping = asyncio.create_task(link.run_session(traffic))
        await asyncio.wait_for(unwinding.wait(), TIMEOUT_S)
        keeping.cancel()
        done, _ = await asyncio.wait({keeping}, timeout=TIMEOUT_S)
        assert done
        with pytest.raises(asyncio.CancelledError):
            await keeping
        assert connections == 1

    asyncio.run(scenario())


def test_a_worker_that_the_store_refuses_ends_with_the_reason() -> None:
    class Refusing(Lost):
        async def lease(self, *_: Any) -> Lease:
            raise StoreUnusable("this worker has another revision")

    async def scenario() -> None:
        async def connect() -> Any:
            return Refusing()

        link = StoreSession(connect, "worker", FAKE_INFO, lambda _: None, 1.0)
        with pytest.raises(StoreUnusable, match="another revision"):
            await asyncio.wait_for(link.run_session(), TIMEOUT_S)

    asyncio.run(scenario())
