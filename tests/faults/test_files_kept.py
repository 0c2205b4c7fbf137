"""Files outlive their store: whatever happens to it, checkpoints and recovery points stay.

The clean-up deletes files that the store does not name. A store that is empty, another one or older
than the files names too few.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.deployment import SWEPT_S, Deployment, deployed
from tests.redis_server import RedisServer

again = [pytest.param(number, marks=pytest.mark.nightly) for number in range(1, 11)]
each_time = pytest.mark.parametrize("number", [0, *again])


@contextmanager
def on_redis(folder: Path) -> Iterator[tuple[RedisServer, Deployment]]:
    with (
        RedisServer(folder / "redis") as redis,
        deployed(folder / "data", store=redis.url, files_dir=folder / "files") as deployment,
    ):
        yield redis, deployment


def restart_in(redis: RedisServer, folder: Path) -> None:
    redis.kill()
    folder.mkdir(exist_ok=True)
    redis.folder = folder
    redis.start()


def take_back_flush(folder: Path) -> None:
    """Remove the last command from the newest part of the log, as docs/reliability.md says."""
    log = max((folder / "appendonlydir").glob("*.incr.aof"), key=lambda path: path.stat().st_mtime)
    commands, flush, after = log.read_bytes().rpartition(b"*1\r\n$8\r\nFLUSHALL\r\n")
    assert flush and not after  # nothing has been written since
    log.write_bytes(commands)


def wait_until_not_ready(deployment: Deployment, limit_s: float) -> str:
    """The health check's answer once the service is not ready."""
    deadline_s = time.monotonic() + limit_s
    while (health := deployment.health())[0] == 200:
        assert time.monotonic() < deadline_s, health
        time.sleep(0.02)
    status, said = health
    assert (status, said["code"]) == (503, "store_unavailable")
    return str(said["detail"])


def wait_until_ready(deployment: Deployment) -> None:
    deadline_s = time.monotonic() + 10
    while deployment.health()[0] != 200:
        assert time.monotonic() < deadline_s, deployment.log.read_text()
        time.sleep(0.02)


@each_time
def test_an_empty_redis_at_the_start_costs_no_file(tmp_path: Path, number: int) -> None:
    with on_redis(tmp_path) as (redis, deployment):
        deployment.stop()
        files = deployment.files()
        restart_in(redis, tmp_path / "empty")
        said = deployment.refusal()
        assert "is new or empty" in said and "restore it" in said and "Traceback" not in said
        assert files.items() <= deployment.files().items() and len(files) >= 6
        restart_in(redis, tmp_path / "redis")
        deployment.start()
        deployment.start_worker()
        deployment.load_all()


@each_time
@pytest.mark.parametrize("how", ["flushed", pytest.param("restarted", marks=pytest.mark.nightly)])
def test_a_redis_that_is_wiped_under_the_service_costs_no_file_and_no_work(
    tmp_path: Path, number: int, how: str
) -> None:
    with on_redis(tmp_path) as (redis, deployment):
        time.sleep(0.6)  # the clean-up has started
        files = deployment.files()
        if how == "flushed":
            redis.command("FLUSHALL")
        else:
            restart_in(redis, tmp_path / "empty")
        said = wait_until_not_ready(deployment, 2.0)
        assert "is empty, or another" in said and "appendonlydir" in said
        refused = deployment.post("create_session", {})
        assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
        time.sleep(SWEPT_S)
        assert files.items() <= deployment.files().items() and len(files) >= 6
        assert deployment.is_worker_alive()
        assert redis.command("DBSIZE").strip() == b":0"  # no process has written into it
        if how == "flushed":
            redis.kill()
            take_back_flush(tmp_path / "redis")
        before = len(deployment.log.read_text())
        restart_in(redis, tmp_path / "redis")
        wait_until_ready(deployment)
        deployment.load_all()
        deployment.save(1)
        assert deployment.health()[0] == 200
        # The recovery point of before the restart is kept if the model has a newer one already.
        kept = [
            line for line in deployment.log.read_text()[before:].splitlines() if "are kept" in line
        ]
        assert all("its Redis was started again" in line for line in kept), kept


@each_time
def test_a_second_deployment_on_the_directory_costs_no_file(tmp_path: Path, number: int) -> None:
    with deployed(tmp_path / "data") as deployment:
        files = deployment.files()
        second = Deployment(tmp_path / "second", files_dir=deployment.settings.files_dir)
        said = second.refusal()
        assert "belongs to another one" in said and "--files-dir" in said
        adopting = second.command("files", "adopt")
        assert adopting.returncode == 1 and "stop that service" in adopting.stderr
        time.sleep(SWEPT_S)
        assert files.items() <= deployment.files().items() and len(files) >= 6
        assert deployment.health()[1]["files"] == "ok"
        deployment.load_all()


@each_time
def test_a_restored_copy_of_the_store_costs_no_file(tmp_path: Path, number: int) -> None:
    """An operator tries a restore beside the service, on its files by mistake."""
    with deployed(tmp_path / "data") as deployment:
        deployment.stop()
        copy = deployment.stopped_copy(tmp_path / "copy")
        deployment.start()
        deployment.start_worker()
        deployment.save(3)  # the copy does not know them
        deployment.age_files()
        time.sleep(SWEPT_S)
        files = deployment.files()
        try:
            copy.start()
            time.sleep(SWEPT_S)
            health = copy.health()[1]
        finally:
            copy.stop()
        assert files.items() <= deployment.files().items() and len(files) >= 9
        assert health["files"] == "kept" and "older than its directory" in health["files_kept"]
        assert copy.log.read_text().count("unused files are kept") == 1
        # The program cannot decide which of the two should continue.
        health = deployment.health()[1]
        assert health["files"] == "kept" and "a copy of this store" in health["files_kept"]
        deployment.silence()
        adopting = deployment.command("files", "adopt")
        assert adopting.returncode == 0, adopting.stderr
        assert deployment.health()[1]["files"] == "ok"
        deployment.load_all()


@each_time
def test_a_copy_of_the_store_that_starts_first_costs_no_file(tmp_path: Path, number: int) -> None:
    """An operator tries a backup while the service is stopped, on its files by mistake.

    Files that the copy releases are named by the service, and files that the service saves later
    are unknown to the copy.
    """
    with deployed(tmp_path / "data") as deployment:
        deployment.stop()
        files = deployment.files()
        copy = deployment.stopped_copy(tmp_path / "copy")
        try:
            copy.start()
            copy.start_worker()
            for path in copy.paths[:3]:
                copy.delete(path)
            copy.save(2)
            copy.age_files()
            time.sleep(SWEPT_S)
            health = copy.health()[1]
            assert health["files"] == "kept" and "copied, restored or moved" in health["files_kept"]
            assert files.items() <= deployment.files().items()
            deployment.start()
            deployment.start_worker()
            deployment.save(3)  # the copy does not know them
            files = deployment.files()
            deployment.age_files()
            time.sleep(SWEPT_S)
            assert "a copy of this store" in copy.health()[1]["files_kept"]
            assert "older than its directory" in deployment.health()[1]["files_kept"]
        finally:
            copy.stop()
        time.sleep(SWEPT_S)
        assert files.items() <= deployment.files().items() and len(files) >= 11
        deployment.silence()
        adopting = deployment.command("files", "adopt")
        assert adopting.returncode == 0, adopting.stderr
        assert deployment.health()[1]["files"] == "ok"
        deployment.load_all()


@each_time
def test_a_missing_store_costs_no_file(tmp_path: Path, number: int) -> None:
    with deployed(tmp_path / "data") as deployment:
        deployment.stop()
        files = deployment.files()
        store = deployment.settings.store_file
        store.rename(tmp_path / "store.db")
        said = deployment.refusal()
        assert "is new or empty" in said and "tuneserve files adopt" in said
        assert not store.exists()
        (tmp_path / "store.db").rename(store)
        assert files.items() <= deployment.files().items() and len(files) >= 6
        deployment.start()
        deployment.start_worker()
        time.sleep(SWEPT_S)
        deployment.load_all()
