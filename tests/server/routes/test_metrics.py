"""The metrics for Prometheus, and the description of a warming worker in health."""

from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fake_backend import FAKE_INFO
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.telemetry.metric_names import WORKER_METRICS
from tuneserve_server.metric_names import API_METRICS

pytestmark = pytest.mark.anyio

Sample = tuple[str, str | None]  # base model, worker
OF_THE_API = {f"tuneserve_{name}".removesuffix("_total") for name in API_METRICS}


async def lease(
    api: Any, name: str, figures: Mapping[str, float], info: BaseModelInfo = FAKE_INFO
) -> int:
    """The epoch of a worker that has reported these metrics."""
    store = api.services.store
    epoch: int = (await store.lease(name, f"process of {name}", info)).epoch
    await store.renew(epoch, dict(figures))
    return epoch


async def scrape(api: Any) -> dict[str, dict[Sample, float]]:
    """Values of workers by metric, base model and worker, read with Prometheus' own parser."""
    response = await api.http.get("/metrics")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {
        sample.name: {
            (each.labels["base_model"], each.labels.get("worker")): each.value
            for each in family.samples
            if each.name == sample.name
        }
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if family.name not in OF_THE_API
    }


async def kinds(api: Any) -> dict[str, str]:
    text = (await api.http.get("/metrics")).text
    return {
        name: kind
        for line in text.splitlines()
        if line.startswith("# TYPE")
        for _, _, name, kind in [line.split()]
        if name.removesuffix("_total") not in OF_THE_API
    }


async def test_the_metrics_of_every_worker_are_shown_with_its_base_model(api: Any) -> None:
    other = BaseModelInfo("other/model", "fake", 8, 8, 8, "x")
    await lease(api, "one", {"units_total": 3.0, "adapters": 2.0})
    await lease(api, 'the "second"\\', {"units_total": 0.25})
    await lease(api, "far", {"units_total": 1e12}, other)
    shown = await scrape(api)
    assert shown["tuneserve_units_total"] == {
        (FAKE_INFO.name, "one"): 3.0,
        (FAKE_INFO.name, 'the "second"\\'): 0.25,
        ("other/model", "far"): 1e12,
    }
    assert shown["tuneserve_adapters"] == {(FAKE_INFO.name, "one"): 2.0}
    assert shown["tuneserve_workers"] == {(FAKE_INFO.name, None): 2.0, ("other/model", None): 1.0}


async def test_every_metric_has_its_type(api: Any) -> None:
    await lease(api, "one", dict.fromkeys(WORKER_METRICS, 1.0))
    shown = await kinds(api)
    assert shown == {"tuneserve_workers": "gauge"} | {
        f"tuneserve_{name}": "counter" if name.endswith("_total") else "gauge"
        for name in WORKER_METRICS
    }
    assert (await scrape(api)).keys() == shown.keys()


async def test_an_unknown_metric_of_a_later_release_is_left_out(api: Any) -> None:
    await lease(api, "one", {"of a later release": 1.0, "ready": 1.0})
    assert (await scrape(api)).keys() == {"tuneserve_workers", "tuneserve_ready"}


async def test_a_resigned_worker_has_no_metrics_and_its_base_model_no_worker(api: Any) -> None:
    epoch = await lease(api, "one", {"ready": 1.0})
    await api.services.store.resign(epoch)
    assert await scrape(api) == {"tuneserve_workers": {(FAKE_INFO.name, None): 0.0}}


async def test_metrics_before_any_worker_are_empty(api: Any) -> None:
    assert await scrape(api) == {}


async def test_an_unreachable_store_gets_the_usual_error(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(api.services.store, "base_models", away)
    response = await api.http.get("/metrics")
    assert response.status_code == 503
    assert response.json()["code"] == "store_unavailable"


async def test_health_shows_the_progress_of_compilation_of_a_ready_worker(
    api: Any,
) -> None:
    cold = {"ready": 0.0, "programs": 40.0, "programs_compiled": 12.0}
    epoch = await lease(api, "one", cold)
    health = await api.get("/healthz", key=None)
    assert (health["worker"], health["warming"]) == ("ready", "12 of 40 programs compiled")
    assert health["base_models"][0]["warming"] == health["warming"]
    await lease(api, "two", cold | {"programs_compiled": 1.0})
    await lease(api, "three", {"ready": 1.0, "programs": 40.0, "programs_compiled": 40.0})
    assert (await api.get("/healthz"))["warming"] == "13 of 80 programs compiled"
    await api.services.store.renew(epoch, {"ready": 1.0})
    await api.services.store.renew(epoch + 1, {"ready": 1.0})
    health = await api.get("/healthz")
    assert "warming" not in health and "warming" not in health["base_models"][0]


async def test_a_worker_that_compiles_on_demand_is_not_warming_up(api: Any) -> None:
    await lease(api, "one", {"programs": 40.0, "programs_compiled": 3.0, "programs_failed": 0.0})
    health = await api.get("/healthz")
    assert health["worker"] == "ready"
    assert "warming" not in health and "failing" not in health


async def test_health_shows_the_share_of_programs_that_fail_to_compile(api: Any) -> None:
    ready = {"ready": 1.0, "programs": 40.0, "programs_compiled": 39.0, "programs_failed": 1.0}
    await lease(api, "one", ready)
    await lease(api, "two", {"ready": 1.0, "programs": 40.0, "programs_compiled": 40.0})
    health = await api.get("/healthz")
    assert health["failing"] == (
        "1 of 40 programs cannot be compiled; requests that need one fail; the worker's log says "
        "why"
    )
    assert health["base_models"][0]["failing"] == health["failing"]
    assert (health["worker"], "warming" in health) == ("ready", False)
