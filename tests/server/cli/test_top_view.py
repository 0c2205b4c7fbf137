"""The rates that tuneserve top shows."""

from typing import Any

import pytest

from tuneserve_server.cli.top_view import TopSample, TopWindow


def test_rates_are_means_over_the_last_twenty_seconds() -> None:
    watch = TopWindow()

    def at(second: float, busy_s: float, tokens: float) -> dict[str, Any]:
        told = {"device_seconds_total": busy_s, "tokens_trained_total": tokens}
        watch.add_counters(TopSample(second, {}, {}, {("tiny", ""): told}))
        (worker,) = watch.facts()["workers"]
        return dict(worker)

    assert at(100, 50, 1000)["device_busy"] is None
    assert at(110, 55, 1300)["trained_tokens_per_s"] == pytest.approx(30)
    assert at(120, 65, 1300)["device_busy"] == pytest.approx(15 / 20)
    assert at(130, 75, 1300)["device_busy"] == pytest.approx(20 / 20)  # since 110
    assert at(131, 1, 0)["device_busy"] is None  # another process under the same name
