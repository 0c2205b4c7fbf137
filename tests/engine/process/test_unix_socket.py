"""Unix sockets are private, and replace those of processes that are gone."""

import os
import socket
import stat
from pathlib import Path

import pytest

from tuneserve_engine.process.unix_socket import MAX_PATH_BYTES, check_path, listen


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short path: the folder of a test may be too long for the system."""
    monkeypatch.chdir(tmp_path)
    return Path("folder/a.sock")


def connected(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(os.fspath(path))
    return client


def test_only_the_owner_may_connect(path: Path) -> None:
    with listen(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        connected(path).close()


def test_a_socket_in_use_is_refused_and_stays(path: Path) -> None:
    with listen(path):
        with pytest.raises(FileExistsError, match=r"another process serves folder/a.sock"):
            listen(path)
        connected(path).close()


def test_the_socket_of_a_dead_process_is_replaced(path: Path) -> None:
    listen(path).close()
    assert path.exists()
    with listen(path):
        connected(path).close()


def test_another_file_is_not_removed(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="is not a socket"):
        listen(path)
    assert path.read_text() == "mine"


def test_a_path_that_is_too_long_for_the_system_is_refused() -> None:
    check_path(Path("x" * MAX_PATH_BYTES))
    with pytest.raises(ValueError, match="has 101 bytes; the system allows at most 100"):
        check_path(Path("ß" * 50 + "x"))
