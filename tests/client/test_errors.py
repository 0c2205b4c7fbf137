"""The class, category and code of each error of the client."""

import pytest

from tuneserve_client import errors


@pytest.mark.parametrize(
    ("status", "code", "kind", "category"),
    [
        (400, "invalid_request", errors.InvalidRequest, "user"),
        (401, "unauthorized", errors.Unauthorized, "user"),
        (402, "budget_spent", errors.BudgetSpent, "user"),
        (403, "forbidden", errors.Forbidden, "user"),
        (404, "not_found", errors.NotFound, "user"),
        (410, "session_ended", errors.SessionEnded, "user"),
        (410, "result_expired", errors.ResultExpired, "user"),
        (429, "overloaded", errors.Overloaded, "user"),
        (499, "new", errors.InvalidRequest, "user"),
        (500, "internal", errors.ServerFault, "server"),
        (503, "disk_full", errors.ServerFault, "server"),
    ],
)
def test_a_refusal_has_the_class_of_its_code_or_otherwise_of_its_status(
    status: int, code: str, kind: type[errors.Refused], category: str
) -> None:
    error = errors.refusal(status, code, "why", 3.0)
    assert type(error) is kind
    assert (error.status, error.code, error.category) == (status, code, category)
    assert (str(error), error.retry_after_s) == ("why", 3.0)


def test_a_failed_request_has_a_default_code_and_no_status() -> None:
    failed = errors.RequestFailed("why", category="server", request_id="req_a")
    assert (failed.code, failed.status, failed.category) == ("request_failed", None, "server")
    assert failed.request_id == "req_a"
    assert errors.RequestFailed("why", category="user", code="other").code == "other"
    assert (errors.LossFailed("why").code, errors.LossFailed("why").category) == (
        "loss_failed",
        "user",
    )
