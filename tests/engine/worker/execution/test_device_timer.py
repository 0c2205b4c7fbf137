"""Device seconds are divided among requests, and belong to the batch that had the device."""

import pytest

from tuneserve_engine.worker.execution.device_timer import DeviceTimer


class Clock:
    """A clock and a wait for adapters, which the test moves."""

    def __init__(self) -> None:
        self.s = 100.0
        self.waited_s = 0.0
        self.timer = DeviceTimer(lambda: self.s, lambda: self.waited_s)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_calls_time_is_divided_by_the_parts_of_its_requests(clock: Clock) -> None:
    """Of 8 s, 3 of 4 parts are 6 s and 1 is 2 s. Of 4 s, all are those of the request named."""
    with clock.timer.time_batch() as batch:
        with clock.timer.charge({"a": 3, "b": 1, "c": 0}):
            clock.s += 8
        clock.s += 50  # between the calls the batch does not have the device
        with clock.timer.charge() as parts:
            clock.s += 4
            parts["a"] = 0.5
    assert (batch.device_s, batch.shares, batch.began_s) == (12.0, {"a": 10.0, "b": 2.0}, 100.0)


def test_a_call_that_raises_is_charged_to_no_request(clock: Clock) -> None:
    with clock.timer.time_batch() as batch:
        with pytest.raises(KeyError), clock.timer.charge({"a": 1}):
            clock.s += 8
            raise KeyError
    assert (batch.device_s, batch.shares) == (8.0, {})


def test_the_wait_for_adapters_takes_no_device_time(clock: Clock) -> None:
    with clock.timer.time_batch() as batch, clock.timer.charge({"a": 1}):
        clock.s += 8
        clock.waited_s += 5
    assert batch.shares == {"a": 3.0}


def test_a_batch_in_between_has_its_own_time(clock: Clock) -> None:
    """The outer call takes 1 + 2 s, and the inner batch 10 + 20 s, of which 20 are its call's."""
    with clock.timer.time_batch() as outer, clock.timer.charge({"a": 1}):
        clock.s += 1
        with clock.timer.time_batch() as inner:
            clock.s += 10
            with clock.timer.charge({"b": 1}):
                clock.s += 20
        clock.s += 2
    assert (outer.device_s, outer.shares) == (3.0, {"a": 3.0})
    assert (inner.device_s, inner.shares, inner.began_s) == (20.0, {"b": 20.0}, 111.0)
