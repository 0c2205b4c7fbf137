"""A worker's liveness file, which a health check reads."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from tests.support.worker_bench import Bench, run, until
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.worker import health
from tuneserve_engine.worker.health import LivenessFile, unhealthy_reason
from tuneserve_engine.worker.worker import WorkerPolicy


@pytest.fixture
def settings(tmp_path: Path) -> WorkerSettings:
    return WorkerSettings(alive_file=tmp_path / "alive", lease_ttl_s=6)


def beaten(settings: WorkerSettings, at_s: float) -> None:
    assert settings.alive_file is not None
    LivenessFile(settings.alive_file).touch()
    os.utime(settings.alive_file, (at_s, at_s))


def test_a_worker_that_renewed_within_its_time_to_live_is_alive(settings: WorkerSettings) -> None:
    beaten(settings, 1000.0)
    assert unhealthy_reason(settings, 1005.9) is None


def test_a_worker_that_did_not_renew_in_time_is_unhealthy(settings: WorkerSettings) -> None:
    beaten(settings, 1000.0)
    assert unhealthy_reason(settings, 1006.5) == (
        "the lease was last renewed 6.5 s ago, and ends after 6 s (lease_ttl_s)"
    )


def test_a_worker_that_loads_its_model_does_not_inherit_its_predecessors_liveness(
    settings: WorkerSettings,
) -> None:
    beaten(settings, 1000.0)
    LivenessFile(settings.alive_file)
    assert "has no lease yet" in str(unhealthy_reason(settings, 1000.0))


def test_a_check_without_a_file_fails() -> None:
    assert "no alive_file is set" in str(unhealthy_reason(WorkerSettings(), 1000.0))


def test_a_file_that_cannot_be_created_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cannot make the file .*; choose another with --alive-file"):
        LivenessFile(tmp_path / "absent" / "alive")


def test_a_worker_continues_when_the_file_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    pulse = LivenessFile(folder / "alive")
    folder.rmdir()
    pulse.touch()
    assert not folder.exists()


def test_without_a_file_a_touch_does_nothing() -> None:
    LivenessFile(None).touch()


def test_the_check_reads_the_settings_of_the_worker(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TUNESERVE_ALIVE_FILE", str(settings.alive_file))
    assert health.main() == 1
    beaten(settings, time.time())
    assert health.main() == 0
    assert capsys.readouterr().out.endswith("the worker holds its lease\n")


def test_the_file_is_not_touched_while_the_lease_cannot_be_renewed(
    settings: WorkerSettings, tmp_path: Path
) -> None:
    beats: list[float] = []
    policy = WorkerPolicy(renew_s=0.01, renewed=lambda: beats.append(time.time()))

    async def scenario(bench: Bench) -> None:
        await until(lambda: len(beats) > 3)
        bench.line.reachable.clear()
        bench.line.cut.set()
        await until(lambda: bench.line.calls[-1] == "connect")
        silent = len(beats)
        await asyncio.sleep(0.1)
        assert len(beats) == silent
        bench.line.reachable.set()
        await until(lambda: len(beats) > silent)

    run(tmp_path, scenario, policy)
