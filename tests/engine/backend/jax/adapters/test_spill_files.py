"""Spill files of evicted adapters: their place on disk, and their removal."""

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tuneserve_engine.backend.jax.adapters.spill_files import SpillFolder
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.settings.worker import WorkerSettings

HOLDER = """
import sys, time
from pathlib import Path
from tuneserve_engine.backend.jax.adapters.spill_files import SpillFolder
folder = SpillFolder(Path(sys.argv[1]))
(folder.path / "1.page").write_bytes(b"weights")
print(folder.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and its folder in ``tmp_path``."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_killed_process_leaves_files_that_the_next_one_removes(
    holder: tuple[subprocess.Popen[str], Path], tmp_path: Path
):
    process, path = holder
    first = SpillFolder(tmp_path)
    assert (path / "1.page").read_bytes() == b"weights"  # its owner lives
    process.kill()
    process.wait()
    second = SpillFolder(tmp_path)
    assert set(tmp_path.iterdir()) == {first.path, second.path}


def test_a_folder_without_spill_files_stays(tmp_path: Path):
    """The operator may have linked ``pages`` to a disk that has other things too."""
    (tmp_path / "something").mkdir()
    (tmp_path / "something" / "1.page").write_text("of somebody")
    (tmp_path / "2.page").write_text("of somebody")
    folder = SpillFolder(tmp_path)
    assert {path.name for path in tmp_path.rglob("*.page")} == {"1.page", "2.page"}
    assert folder.path.parent == tmp_path


@pytest.mark.parametrize("root", ["given", None])
def test_a_folder_is_removed_with_its_owner(root: str | None, tmp_path: Path):
    folder = SpillFolder(tmp_path / root if root else None)
    path = folder.path
    (path / "1.page").write_bytes(b"weights")
    del folder
    gc.collect()
    assert not path.exists()


def test_a_backend_leaves_no_folder(new_backend: Callable[[], JaxBackend]):
    backend = new_backend()
    path = backend._spill_folder.path
    assert path.is_dir()
    del backend
    gc.collect()
    assert not path.exists()


def test_workers_of_one_data_directory_share_a_root_under_any_name(tmp_path: Path):
    for name in (None, "../a"):
        settings = WorkerSettings(data_dir=tmp_path, worker_name=name)
        assert settings.pages_dir == tmp_path / "pages"
