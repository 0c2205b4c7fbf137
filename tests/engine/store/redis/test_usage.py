"""Usage and states of requests in the forms that Redis' scripts give."""

from dataclasses import replace

import msgspec

from tuneserve_engine.core.jobs import JobKind
from tuneserve_engine.core.usage import CurvePoint, TenantUsage, Totals
from tuneserve_engine.store.base import KeptRequest, RequestState
from tuneserve_engine.store.redis import usage


def test_the_state_of_a_request_has_no_usage_once_it_is_dropped() -> None:
    row = [b"t", b"sample", b"s"]
    assert usage.read_request([None] * 8) is None
    assert usage.read_request([*row, b"done", b"user", None, b"1", b"2"]) == RequestState(
        "t", JobKind.SAMPLE, "s", "done", failed=True
    )
    expired = usage.read_request([*row, b"expired", b"user", b"{}", b"1", b"2"])
    assert expired == RequestState("t", JobKind.SAMPLE, "s", "expired")


def test_sums_of_days_are_added_by_name() -> None:
    days = [
        [b"requests b", b"1", b"device_s b", b"0.5", b"requests a model", b"2"],
        [b"requests b", b"3", b"flops b", b"1e3"],
    ]
    assert usage.read_sums(b"t", days) == TenantUsage(
        "t", {"a model": Totals(requests=2), "b": Totals(4, device_s=0.5, flops=1000.0)}
    )


def test_a_point_of_a_curve_gets_the_time_at_which_it_was_stored() -> None:
    point = CurvePoint("forward", 4, loss_sum=2.0)
    stored = b"4 12.5 " + msgspec.json.encode(point)
    assert usage.read_curve_point(stored) == replace(point, time_s=12.5)


def test_a_request_is_kept_until_its_result_is_dropped() -> None:
    key, row = (7, "req_a"), [b"sample", b"done", None, None, b"1.5", b"2.5"]
    kept = KeptRequest("req_a", JobKind.SAMPLE, 7, "done", 1.5, 2.5)
    assert usage.read_kept_request(key, row) == kept
    rejected = usage.read_kept_request(key, [b"sample", b"done", b"user", None, None, b"2.5"])
    assert rejected == replace(kept, created_s=2.5, failed=True)
    for state in (b"expired", None):
        assert usage.read_kept_request(key, [b"sample", state, *row[2:]]) is None
