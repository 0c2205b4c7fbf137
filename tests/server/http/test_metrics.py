"""Requests are counted by route and status."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.routes.test_usage import trained

pytestmark = pytest.mark.anyio


async def scraped(api: Any) -> dict[str, dict[tuple[str, ...], float]]:
    text = (await api.http.get("/metrics")).text
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            found.setdefault(each.name, {})[tuple(each.labels.values())] = each.value
    return found


async def test_requests_are_counted_by_route_and_status(service: Any) -> None:
    model, _ = await trained(service)
    await service.call("GET", f"/training_runs/{model}")
    await service.call("GET", f"/training_runs/{model}", key="tml-b")
    await service.http.get("/no/such/path")
    await service.http.request("BREW", "/no/such/path")
    await service.http.request("BREW", "/api/v1/create_session")
    found = await scraped(service)
    counted = found["tuneserve_http_requests_total"]
    route = "/api/v1/training_runs/{model_id}"
    assert (counted["GET", route, "200"], counted["GET", route, "404"]) == (1, 1)
    assert counted["POST", "/api/v1/forward_backward", "200"] == 2
    assert counted["none", "none", "404"] == 2
    assert counted["none", "/api/v1/create_session", "405"] == 1
    assert found["tuneserve_http_request_duration_seconds_count"]["GET", route] == 2


async def test_a_request_that_raises_is_counted_as_a_500(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(api.services.store, "usage", broken)
    with pytest.raises(ZeroDivisionError):
        await api.call("GET", "/usage")
    counted = (await scraped(api))["tuneserve_http_requests_total"]
    assert counted["GET", "/api/v1/usage", "500"] == 1
