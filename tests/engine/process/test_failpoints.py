"""An armed failpoint sends its signal at one passage."""

import os
import signal
from collections.abc import Iterator

import pytest

from tuneserve_engine.process import failpoints


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, signal.Signals]]]:
    found: list[tuple[int, signal.Signals]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: found.append((pid, number)))
    monkeypatch.setattr(failpoints, "_armed", {})
    yield found


def test_a_point_that_is_not_armed_does_nothing(sent: list[tuple[int, signal.Signals]]) -> None:
    failpoints.failpoint("a")
    assert sent == []


def test_the_signal_is_sent_at_the_nth_passage_only(
    sent: list[tuple[int, signal.Signals]],
) -> None:
    failpoints.arm("a", 2)
    failpoints.arm("b", number=signal.SIGSTOP)
    failpoints.failpoint("a")
    assert sent == []
    failpoints.failpoint("a")
    failpoints.failpoint("a")
    assert sent == [(os.getpid(), signal.SIGKILL)]
    failpoints.failpoint("b")
    assert sent[1:] == [(os.getpid(), signal.SIGSTOP)]
