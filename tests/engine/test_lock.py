"""A data directory has one worker at a time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tuneserve_engine.lock import lock_directory

HOLDER = """
import sys, time
from pathlib import Path
from tuneserve_engine.lock import lock_directory
held = lock_directory(Path(sys.argv[1]), timeout_s=0)
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


def test_a_second_process_is_refused_with_the_way_out(holder, tmp_path):
    with pytest.raises(OSError, match=r"another worker .*stop it, or give .* --data-dir") as caught:
        lock_directory(tmp_path, timeout_s=0.1)
    assert str(tmp_path) in str(caught.value)


def test_a_killed_process_holds_it_no_longer(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    lock_directory(tmp_path, timeout_s=10).close()


def test_a_closed_lock_is_free(tmp_path):
    lock_directory(tmp_path, timeout_s=0).close()
    lock_directory(tmp_path, timeout_s=0).close()


def test_it_waits_for_the_one_before(tmp_path, monkeypatch):
    before = lock_directory(tmp_path, timeout_s=0)
    monkeypatch.setattr(time, "sleep", lambda _: before.close())
    lock_directory(tmp_path, timeout_s=1).close()


def test_a_directory_that_is_a_file_is_named(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(OSError, match=r"taken: File exists; choose another"):
        lock_directory(tmp_path / "taken", timeout_s=0)


def test_a_second_worker_refuses_before_it_loads_anything(holder, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "tuneserve_engine"],
        env={**os.environ, "TUNESERVE_DATA_DIR": str(tmp_path), "TUNESERVE_BASE_MODEL": "./none"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 2
    assert "another worker is running" in ran.stderr
    assert "Traceback" not in ran.stderr
