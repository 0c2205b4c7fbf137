"""The count of the time in which a service ran, over jumps of the clock and pauses."""

import os
import time
from pathlib import Path

import pytest

from tuneserve_engine.store.files import FileStore
from tuneserve_engine.store.served_time import forget, served_s


class Clock:
    """A clock that the test moves, and that dates the notes too."""

    def __init__(self, root: Path) -> None:
        self.now_s = time.time()
        self.root = root
        self.files = FileStore(root, clock=lambda: self.now_s)

    def notes(self) -> list[str]:
        return sorted(each.name for each in self.root.glob(".seen-*"))

    def served_after(self, seconds: float, what: str = "a") -> float:
        self.now_s += seconds
        before = self.notes()
        found = served_s(self.files, what)
        for name in self.notes():
            if name not in before or found == int(name.rpartition("-")[2]):
                os.utime(self.root / name, (self.now_s, self.now_s))
        return found


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "files")


def test_the_count_begins_with_the_first_call_and_follows_the_clock(clock: Clock) -> None:
    assert clock.served_after(0) == 0
    assert clock.served_after(10) == pytest.approx(10)
    assert clock.served_after(20) == pytest.approx(30)
    assert clock.notes() == [".seen-a-0"]


def test_a_pause_of_any_length_counts_as_an_hour(clock: Clock) -> None:
    assert clock.served_after(0) == 0
    assert clock.served_after(10 * 86_400) == 3600
    assert clock.notes() == [".seen-a-3600"]
    assert clock.served_after(100) == pytest.approx(3700)


def test_a_clock_that_was_set_back_restarts_the_hour(clock: Clock) -> None:
    clock.served_after(0)
    assert clock.served_after(3600) == 3600
    assert clock.served_after(-500) == 3600
    assert clock.served_after(7) == pytest.approx(3607)


def test_counts_are_forgotten_by_their_beginning_except_the_named_ones(clock: Clock) -> None:
    for what in ("lost-a", "lost-b", "other"):
        clock.served_after(0, what)
    forget(clock.files, "lost-", but={"lost-b"})
    assert clock.notes() == [".seen-lost-b-0", ".seen-other-0"]
