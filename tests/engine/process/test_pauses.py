"""A serving process shortens the pauses of Python's garbage collector and of its global lock."""

import subprocess
import sys

import pytest

from tuneserve_engine.process import pauses


def test_loaded_objects_are_frozen_and_threads_switch_often() -> None:
    code = (
        "import gc, sys\n"
        "from tuneserve_engine.process import pauses\n"
        "before = len(gc.get_objects())\n"
        "pauses.shorten()\n"
        "print(before > 5000, len(gc.get_objects()) < 100, round(sys.getswitchinterval(), 4))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "True", "0.001"]


def test_the_heap_is_frozen_again_when_it_has_stopped_growing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen: list[float] = []
    sizes = iter([0.0, 0.0, 3.0, 7.0, 7.0, 7.0, 8.0, 8.0, 8.0])
    now = 0.0

    def size() -> float:
        nonlocal now
        now = next(sizes)
        return now

    monkeypatch.setattr(pauses, "freeze", lambda: frozen.append(now))
    settling = pauses.Settling(size)
    for _ in range(8):
        settling.look()
    assert frozen == [7.0, 8.0]
