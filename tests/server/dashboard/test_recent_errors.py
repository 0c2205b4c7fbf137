"""The recent errors of each tenant."""

from tuneserve_server.dashboard.recent_errors import MOST_OF_TENANT, RecentErrors


def test_one_tenants_errors_push_out_only_its_own() -> None:
    now_s = iter(range(1000))
    recent = RecentErrors(lambda: float(next(now_s)))
    recent.record_error("quiet", "code", "text", "/route")
    for number in range(2 * MOST_OF_TENANT):
        recent.record_error("loud", "code", f"text {number} {'x' * 1000}", "/route")
    assert len(recent.newest("loud", 100)) == MOST_OF_TENANT
    assert [each.tenant for each in recent.newest("quiet", 100)] == ["quiet"]
    newest = recent.newest(None, 2)
    assert [each.text[:7] for each in newest] == ["text 39", "text 38"]
    assert len(newest[0].text) < 700
