"""A data directory has one worker per name at a time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tuneserve_engine.process.lock import lock_name

HOLDER = """
import sys, time
from pathlib import Path
from tuneserve_engine.process.lock import lock_name
held = lock_name(Path(sys.argv[1]), "a/b", timeout_s=0)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds the lock of ``tmp_path``."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_with_a_way_out(holder, tmp_path):
    with pytest.raises(OSError, match=r"another worker named a/b .* --worker-name") as caught:
        lock_name(tmp_path, "a/b", timeout_s=0.1)
    assert str(tmp_path) in str(caught.value)


def test_workers_of_other_names_share_the_directory(holder, tmp_path):
    lock_name(tmp_path, "a", timeout_s=0).close()
    lock_name(tmp_path, "a%2Fb", timeout_s=0).close()


def test_a_killed_process_releases_the_lock(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    lock_name(tmp_path, "a/b", timeout_s=10).close()


def test_a_closed_lock_is_free(tmp_path):
    lock_name(tmp_path, "a/b", timeout_s=0).close()
    lock_name(tmp_path, "a/b", timeout_s=0).close()


def test_a_lock_waits_for_the_previous_holder(tmp_path, monkeypatch):
    before = lock_name(tmp_path, "a/b", timeout_s=0)
    monkeypatch.setattr(time, "sleep", lambda _: before.close())
    lock_name(tmp_path, "a/b", timeout_s=1).close()


def test_a_lock_that_its_holder_deletes_is_created_again(tmp_path, monkeypatch):
    """Otherwise its next holder could not keep another process from creating a second lock."""
    before = lock_name(tmp_path, "a", timeout_s=0)

    def delete(_: float) -> None:
        (tmp_path / "a.lock").unlink()
        before.close()

    monkeypatch.setattr(time, "sleep", delete)
    with lock_name(tmp_path, "a", timeout_s=1):
        monkeypatch.undo()
        with pytest.raises(OSError, match="another worker named a"):
            lock_name(tmp_path, "a", timeout_s=0)


def test_a_directory_that_is_a_file_is_named(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(OSError, match=r"taken: File exists; choose another"):
        lock_name(tmp_path / "taken", "a", timeout_s=0)


def test_a_second_worker_refuses_before_it_loads_anything(holder, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "tuneserve_engine.worker"],
        env={
            **os.environ,
            "TUNESERVE_DATA_DIR": str(tmp_path),
            "TUNESERVE_WORKER_NAME": "a/b",
            "TUNESERVE_BASE_MODEL": "./none",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 2
    assert "another worker named a/b is running" in ran.stderr
    assert "Traceback" not in ran.stderr
