"""API processes on one store watch each other."""

import pytest

from tests.engine.store.contract.bench import (
    START_S,
)
from tests.server.cleanup.test_awake import SWEEP_S
from tests.support.memory_store import MemoryStore
from tuneserve_engine.core.records import ProcessRecord
from tuneserve_server.cleanup.siblings import Absence, Siblings

pytestmark = pytest.mark.anyio


class TwoProcesses:
    """Two API processes that watch each other, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.store = MemoryStore(clock=lambda: START_S + self.now_s)
        self.first, self.second = (
            Siblings(
                self.store, SWEEP_S, wall=lambda: START_S + self.now_s, clock=lambda: self.now_s
            )
            for _ in range(2)
        )

    async def look(self, *, was_away: bool = False) -> Absence:
        """The absence that the first process finds one sweep later."""
        self.now_s += SWEEP_S
        return await self.first.look(was_away=was_away)

    async def both(self) -> Absence:
        found = await self.look()
        await self.second.look(was_away=False)
        return found


async def test_no_silence_counts_while_another_process_is_stopped() -> None:
    """Clients may be connected to it: three minutes of it once dropped their samples."""
    processes = TwoProcesses()
    for _ in range(10):
        assert await processes.both() == Absence(lasts=False, over_s=0.0)
    found = [(await processes.look()).lasts for _ in range(36)]
    assert found == [False] * 4 + [True] * 32
    await processes.second.look(was_away=True)
    assert await processes.look() == Absence(lasts=False, over_s=180.0)
    assert await processes.both() == Absence(lasts=False, over_s=0.0)
    await processes.second.leave()
    for _ in range(10):
        assert await processes.look() == Absence(lasts=False, over_s=0.0)
    await processes.store.close()


async def test_a_process_that_is_away_for_long_is_dead() -> None:
    processes = TwoProcesses()
    await processes.both()
    found = [(await processes.look()).lasts for _ in range(150)]
    assert found == [False] * 3 + [True] * 117 + [False] * 30  # ten minutes
    assert (await processes.store.page_of_records(ProcessRecord)).total == 1
    await processes.store.close()


async def test_a_process_that_was_away_itself_counts_no_silence() -> None:
    processes = TwoProcesses()
    await processes.both()
    processes.now_s += 300
    assert await processes.look(was_away=True) == Absence(lasts=False, over_s=0.0)
    assert await processes.both() == Absence(lasts=False, over_s=0.0)
    await processes.store.close()
