"""The rates of counters between the dashboard's looks."""

from typing import Any

from tuneserve_server.dashboard.state import Rates


def test_rates_cover_the_last_seconds() -> None:
    now_s = 0.0
    rates = Rates(lambda: now_s)
    rates.add_counters({"a": {"n": 0.0}})
    assert rates.rates_of("a") == {}
    for count in range(1, 61):
        now_s = float(count)
        rates.add_counters({"a": {"n": 2.0 * count if count <= 30 else 60.0 + 5 * (count - 30)}})
        assert count > 30 or rates.rates_of("a") == {"n": 2.0}
    assert rates.rates_of("a") == {"n": 5.0}
    now_s += 60  # no viewer looked in the meantime
    rates.add_counters({"a": {"n": 300.0}})
    assert rates.rates_of("a") == {}


def test_a_new_or_restarted_counter_has_a_rate_from_its_second_reading() -> None:
    now_s = 0.0
    rates = Rates(lambda: now_s)
    seen: list[Any] = [{"a": 10.0}, {}, {"a": 20.0}, {"a": 21.0}, {"a": 3.0, "b": 5.0}]
    for values in [*seen, {"a": 5.0, "b": 9.0}]:
        now_s += 1
        rates.add_counters({key: {"n": value} for key, value in values.items()})
        if values == {"a": 21.0}:
            assert rates.rates_of("a") == {"n": 1.0}
        if values == {"a": 3.0, "b": 5.0}:
            assert rates.rates_of("a") == rates.rates_of("b") == {}
    assert (rates.rates_of("a"), rates.rates_of("b")) == ({"n": 2.0}, {"n": 4.0})
