"""The cost and the timings of a request, in milliseconds, as bodies and as headers."""

from tuneserve_engine.core.usage import Totals, Usage
from tuneserve_server.request_cost import cost, headers, timings, totals

USAGE = Usage(
    device_s=0.5,
    trained_tokens=10,
    prompt_tokens=20,
    sampled_tokens=30,
    padded_tokens=40,
    flops=5e9,
    queued_s=0.25,
    ran_s=1.0,
    others=1,
    total_s=2.0,
    packed_s=0.125,
    transfer_s=0.0000004,
    behind=3,
    behind_own=2,
)


def test_the_time_that_is_neither_queued_nor_run_was_held() -> None:
    assert timings(USAGE).model_dump() == {
        **{"total_ms": 2000.0, "held_ms": 750.0, "queue_ms": 250.0, "run_ms": 1000.0},
        **{"pack_ms": 125.0, "device_ms": 500.0, "transfer_ms": 0.0},
    }


def test_clocks_that_disagree_give_no_negative_time() -> None:
    assert timings(Usage(total_s=0.1, queued_s=0.1, ran_s=0.1)).held_ms == 0


def test_the_cost_has_every_count() -> None:
    assert cost(USAGE).model_dump() == {
        **{"trained_tokens": 10, "prompt_tokens": 20, "sampled_tokens": 30, "padded_tokens": 40},
        **{"flops": 5e9, "behind": 3, "behind_own": 2, "others": 1},
    }


def test_totals_are_in_milliseconds_too() -> None:
    found = totals(Totals(requests=2, device_s=1.5, trained_tokens=7, flops=1e3))
    assert (found.requests, found.device_ms, found.trained_tokens) == (2, 1500.0, 7)
    assert (found.prompt_tokens, found.flops) == (0, 1e3)


def test_headers_have_the_same_numbers() -> None:
    told = headers(USAGE)
    assert told["Server-Timing"] == (
        "total;dur=2000.0, held;dur=750.0, queue;dur=250.0, run;dur=1000.0, pack;dur=125.0, "
        "device;dur=500.0, transfer;dur=0.0"
    )
    assert told["X-Tuneserve-Cost"] == (
        "trained_tokens=10, prompt_tokens=20, sampled_tokens=30, padded_tokens=40, "
        "flops=5000000000, behind=3, behind_own=2, others=1"
    )


def test_a_request_without_usage_has_no_headers() -> None:
    assert headers(None) == {}
