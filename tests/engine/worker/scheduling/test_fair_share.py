"""The counters of tenants, computed by hand; ``test_fairness`` has the shares that they lead to."""

from collections.abc import Sequence

import pytest

from tuneserve_engine.core.jobs import Job, JobKind
from tuneserve_engine.worker.scheduling.fair_share import FairShare

SAMPLE, STEP = JobKind.SAMPLE, JobKind.OPTIM_STEP


def job(tenant: str, kind: JobKind = STEP, release: int = 0) -> Job:
    return Job(tenant, kind, tenant, 0, release=release)


def charged(shares: FairShare, seconds: float, *batch: tuple[str, float]) -> FairShare:
    """The counters after a batch of steps of these tenants and shares."""
    shares.charge([job(name) for name, _ in batch], seconds, [share for _, share in batch])
    return shares


def counters(shares: FairShare, tenants: Sequence[str]) -> list[float]:
    return [shares.counter(tenant) for tenant in tenants]


def test_the_time_of_a_batch_is_divided_by_share_and_by_weight() -> None:
    shares = charged(FairShare({"b": 2.0}), 8.0, ("a", 0.25), ("b", 0.5), ("a", 0.25))
    assert counters(shares, "ab") == [4.0, 2.0]
    assert shares.largest_s == 4.0


def test_weights_override_the_first_ones_and_can_be_taken_back() -> None:
    shares = FairShare({"a": 2.0, "b": 3.0})
    shares.set_weights({"a": 5.0})
    assert [shares.weight(name) for name in "abc"] == [5.0, 3.0, 1.0]
    shares.set_weights({})
    assert shares.weight("a") == 2.0


def test_counters_after_a_batch_are_foretold_without_charging() -> None:
    shares = charged(FairShare({}), 1.0, ("a", 1.0))
    assert shares.counters_after([job("a"), job("b")], 4.0, [0.25, 0.75]) == {"a": 2.0, "b": 3.0}
    assert counters(shares, "ab") == [1.0, 0.0]


def test_a_tenant_without_a_share_of_the_batch_is_put_behind_those_that_had_one() -> None:
    shares = charged(FairShare({}), 4.0, ("a", 1.0), ("b", 0.0))
    assert counters(shares, "ab") == [4.0, 4.0]


def test_a_returning_tenant_starts_at_the_lowest_counter_of_those_with_work() -> None:
    shares = charged(charged(FairShare({}), 3.0, ("a", 1.0)), 1.0, ("b", 1.0))
    shares.lift_arrivals({"a": None, "new": None})
    assert counters(shares, ["a", "new"]) == [3.0, 3.0]
    assert shares.counter("b") == 3.0  # it left with less, and is forgotten


def test_an_absent_tenant_above_the_floor_keeps_its_debt() -> None:
    shares = charged(charged(FairShare({}), 9.0, ("a", 1.0)), 1.0, ("b", 1.0))
    shares.lift_arrivals({"b": None})
    assert counters(shares, ["a", "b", "new"]) == [9.0, 1.0, 1.0]


def test_without_work_no_tenant_owes_another() -> None:
    shares = charged(charged(FairShare({}), 9.0, ("a", 1.0)), 1.0, ("b", 1.0))
    shares.lift_arrivals({})
    assert counters(shares, ["a", "b", "new"]) == [9.0, 9.0, 9.0]


def test_the_floor_never_falls() -> None:
    shares = charged(FairShare({}), 5.0, ("a", 1.0))
    shares.lift_arrivals({"a": None})
    shares.lift(["b"])
    assert shares.counter("b") == 5.0
    shares.lift_arrivals({"b": None})
    assert shares.counter("new") == 5.0


def test_turns_go_by_counter_then_by_the_last_batch_then_by_release() -> None:
    shares = FairShare({})
    charged(shares, 1.0, ("a", 1.0))
    charged(shares, 1.0, ("b", 1.0))
    waiting = [job("b", release=1), job("a", release=2), job("c", release=4), job("d", release=3)]
    ordered = sorted(waiting, key=lambda each: shares.turn_key(each.tenant, each))
    assert [each.tenant for each in ordered] == ["d", "c", "a", "b"]


def test_a_tenant_that_is_being_served_goes_by_its_new_counter() -> None:
    shares = charged(FairShare({}), 1.0, ("a", 1.0))
    assert shares.turn_key("a", job("a", release=7), {"a": 2.5}) == (2.5, 2, 7)
    assert shares.turn_key("a", job("a", release=7), {"b": 2.5}) == (1.0, 1, 7)


@pytest.mark.parametrize(
    ("batch_s", "is_near"), [(1.0, False), (7.0, False), (8.0, True), (9.0, True)]
)
def test_near_is_one_batch_of_the_tenants_own_device_time(batch_s: float, is_near: bool) -> None:
    shares = FairShare({"a": 2.0})
    for _ in range(2):
        charged(shares, 4.0, ("a", 1.0))  # its counter is 4 after 8 s of the device
    assert shares.is_near("a", 0.0, batch_s) is is_near


def test_near_is_one_of_the_largest_requests_so_far() -> None:
    shares = charged(FairShare({}), 4.0, ("a", 1.0))
    assert shares.is_near("a", 0.0, 0.1)
    assert not shares.is_near("a", -0.5, 0.1)


def test_the_lead_of_samples_is_their_time_minus_that_of_other_work() -> None:
    shares = FairShare({})
    shares.charge([job("a", SAMPLE), job("a")], 4.0, [0.75, 0.25])
    shares.charge([job("b")], 1.5, [1.0])
    assert [shares.sampling_lead_s.get(name, 0.0) for name in "abc"] == [2.0, -1.5, 0.0]
    shares.lift_arrivals([])
    assert "b" not in shares.sampling_lead_s
