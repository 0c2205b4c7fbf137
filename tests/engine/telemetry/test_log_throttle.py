"""Throttling of log lines that a fault repeats."""

import logging

import pytest

from tuneserve_engine.telemetry.log_throttle import ThrottledLog

logger = logging.getLogger(__name__)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_kind_of_line_is_written_once_a_minute_with_the_number_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    repeats = ThrottledLog(logger, 60, clock=clock)
    for clock.now_s in (0, 1, 59):
        repeats.warn("disk", f"{clock.now_s} s: full")
    repeats.warn("store", "away")
    for clock.now_s in (60, 119, 121):
        repeats.warn("disk", f"{clock.now_s} s: full")
    assert caplog.messages == [
        "0 s: full",
        "away",
        "60 s: full (and 2 more like this)",
        "121 s: full (and 1 more like this)",
    ]


def test_a_new_fault_is_written_at_once(caplog: pytest.LogCaptureFixture) -> None:
    repeats = ThrottledLog(logger, 60, clock=Clock())
    repeats.warn("store", "away")
    repeats.warn("store", "away")
    repeats.forget()
    repeats.warn("store", "away again")
    assert caplog.messages == ["away", "away again"]
