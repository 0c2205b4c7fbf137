"""The lines that a worker logs about its batches."""

import asyncio
import logging

import pytest

from tuneserve_engine.core.jobs import Job, JobKind
from tuneserve_engine.worker import batch_log
from tuneserve_engine.worker.batch_log import BatchLog, BatchTimes


def job(tenant: str, kind: JobKind = JobKind.FORWARD_BACKWARD) -> Job:
    return Job(tenant=tenant, kind=kind, scope="s", seq=1, payload=b"", request_id="r")


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_batches_share_a_log_line_a_second_and_have_their_own_only_for_debugging(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """Of 13,213 lines, 13,196 were once about single batches."""
    monkeypatch.setattr(batch_log, "EVERY_S", 0.05)
    caplog.set_level(level)

    async def run() -> None:
        log = BatchLog()
        for n in range(100):
            log.record(f"1-{n}", [job("a"), job("b")], n % 2, BatchTimes(0.3, 0.2, 0.1))
        log.record("1-100", [job("c", JobKind.OPTIM_STEP)], 0, BatchTimes(0.3, 0.5, 0.1))
        await asyncio.sleep(0.2)
        log.record("1-101", [job("a")], 0, BatchTimes(0.3, 0.25, 0.1))
        await asyncio.sleep(0.2)

    asyncio.run(run())
    own = [each for each in caplog.records if each.levelno == logging.DEBUG]
    assert len([each for each in own if each.name == batch_log.__name__]) == (
        102 if level == logging.DEBUG else 0
    )
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.INFO]
    assert said == [
        "101 units: 200 forward_backward, 1 optim_step of 3 tenants, 50 failed, 20.500 s on the "
        "device",
        "1 units: 1 forward_backward of 1 tenants, 0 failed, 0.250 s on the device",
    ]
