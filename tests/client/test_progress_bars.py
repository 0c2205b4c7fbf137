"""Progress bars around results."""

from typing import Any

import pytest

from tuneserve_client.progress_bars import gather, progress


class Result:
    """A future that records each call."""

    def __init__(self, calls: list[str], name: str, error: Exception | None = None) -> None:
        self._calls, self._name, self._error = calls, name, error

    def done(self) -> bool:
        self._calls.append(f"start {self._name}")
        return False

    def result(self) -> str:
        self._calls.append(f"wait for {self._name}")
        if self._error is not None:
            raise self._error
        return self._name


def test_every_result_is_being_fetched_before_the_first_is_waited_for() -> None:
    calls: list[str] = []
    futures: Any = [Result(calls, "a"), Result(calls, "b")]
    assert gather(futures, shown=False) == ["a", "b"]
    assert calls == ["start a", "start b", "wait for a", "wait for b"]


def test_the_first_error_is_raised() -> None:
    futures: Any = [Result([], "a"), Result([], "b", KeyError("b")), Result([], "c", KeyError("c"))]
    with pytest.raises(KeyError, match="b"):
        gather(futures, shown=False)


def test_a_bar_shows_its_description_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    bar = progress(range(2), "doubling", shown=True)
    for number in bar:
        bar.show(number=number)
    shown = capsys.readouterr().err
    assert "doubling: 100%" in shown and "2/2" in shown and "number=1" in shown
