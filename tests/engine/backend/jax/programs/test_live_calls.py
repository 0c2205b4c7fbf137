"""Compiling ahead rests while programs are called."""

from contextlib import suppress

from tuneserve_engine.backend.jax.programs.live_calls import LiveCalls


class Clock:
    """A clock that ``sleep`` moves. ``calls`` are the times at which a program is called."""

    def __init__(self, calls: tuple[float, ...] = ()) -> None:
        self.tenths = 1000
        self.live = LiveCalls(lambda: self.now_s, self.sleep)
        self.calls = list(calls)

    @property
    def now_s(self) -> float:
        return self.tenths / 10

    def sleep(self, seconds: float) -> None:
        self.tenths += round(10 * seconds)
        while self.calls and self.calls[0] <= self.now_s:
            self.calls.pop(0)
            self.live.note()

    def rest(self, compiled_s: float) -> float:
        """The seconds of rest, to a tenth."""
        started_s = self.now_s
        self.live.rest(compiled_s)
        return round(self.now_s - started_s, 1)


def test_nothing_rests_before_the_first_call() -> None:
    assert Clock().rest(10.0) == 0


def test_a_rest_takes_three_times_as_long_as_the_compiling() -> None:
    clock = Clock()
    clock.live.note()
    assert clock.rest(1.0) == 3.0


def test_a_rest_ends_half_a_minute_after_the_last_call() -> None:
    clock = Clock(calls=(102.0, 104.0))
    clock.live.note()
    assert clock.rest(60.0) == 4.0 + 30.0


def test_a_rest_lasts_while_programs_are_called() -> None:
    clock = Clock(calls=tuple(100.0 + second for second in range(1, 40)))
    clock.live.note()
    assert clock.rest(10.0) == 30.0


def test_compiling_while_nothing_was_called_leaves_no_rest_for_later() -> None:
    clock = Clock(calls=tuple(100.0 + second for second in range(1, 40)))
    assert clock.rest(60.0) == 0
    clock.live.note()
    assert clock.rest(1.0) == 3.0


def test_what_another_thread_compiled_prolongs_a_rest() -> None:
    """It ends its own compiling while the first one rests: at 101, after two seconds."""
    clock = Clock(calls=tuple(100.0 + second for second in range(1, 40)))
    clock.live.note()
    others: list[float] = []

    def wake_up(seconds: float) -> None:
        raise StopIteration

    def sleep(seconds: float) -> None:
        if clock.now_s >= 101.0 and not others:
            others.append(2.0)
            clock.live._sleep = wake_up
            with suppress(StopIteration):
                clock.live.rest(2.0)
            clock.live._sleep = sleep
        clock.sleep(seconds)

    clock.live._sleep = sleep
    assert clock.rest(1.0) == 1.0 + 6.0
