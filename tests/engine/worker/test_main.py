"""The end of a worker process."""

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_backend import FakeBackend
from tuneserve_engine.worker import __main__ as process


def test_an_unexpected_error_ends_the_process_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If it left ``main``, the interpreter would wait for the device's thread first."""

    async def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("sys.argv", ["worker", "--data_dir", str(tmp_path)])
    monkeypatch.setattr(process.JaxBackend, "from_options", lambda _: FakeBackend())
    monkeypatch.setattr(process, "_work", fail)
    monkeypatch.setattr(process.logs, "start", lambda *_: None)
    with caplog.at_level(logging.ERROR):
        assert process.main() == 1
    assert "a bug" in caplog.text
