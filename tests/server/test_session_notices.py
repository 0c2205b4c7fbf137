"""The messages of a new session: the state of workers, the budget, the disk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from tests.engine.store.contract.bench import INFO
from tests.server.conftest import FAKE_INFO, Api
from tuneserve_engine.core.jobs import Job, JobKind, Outcome
from tuneserve_engine.core.records import TenantRecord, Update
from tuneserve_engine.core.usage import Usage
from tuneserve_server.access.limits import DiskGuard

pytestmark = pytest.mark.anyio


async def opened(api: Any) -> types.CreateSessionResponse:
    """The SDK's reading of the answer; it logs each message at its level."""
    return types.CreateSessionResponse.model_validate(await api.post("/create_session", {}))


async def with_metrics(api: Api, **metrics: float) -> None:
    epoch = (await api.services.store.lease("worker", "process", FAKE_INFO)).epoch
    await api.services.store.renew(epoch, metrics)


async def test_a_ready_service_says_nothing(service: Any) -> None:
    answer = await service.post("/create_session", {})
    assert set(answer) == {"session_id"}


async def test_a_service_without_a_worker_says_that_requests_wait(api: Any) -> None:
    answer = await opened(api)
    assert answer.warning_message == "no worker is ready: requests are accepted and wait for one"
    assert answer.info_message is None


async def test_a_worker_that_compiles_says_how_far_it_is(api: Any) -> None:
    await with_metrics(api, ready=0.0, programs=40.0, programs_compiled=12.0)
    answer = await opened(api)
    assert "tuneserve/fake is warming up (12 of 40 programs compiled)" in str(answer.info_message)
    assert answer.warning_message is None


async def test_programs_that_cannot_be_compiled_are_a_warning(api: Any) -> None:
    await with_metrics(api, ready=1.0, programs=40.0, programs_failed=2.0)
    assert "2 of 40 programs cannot be compiled" in str((await opened(api)).warning_message)


async def test_a_worker_that_only_samples_is_a_warning_for_those_who_train(api: Any) -> None:
    await api.services.store.lease("sampler", "process", FAKE_INFO, 0.0)
    assert "no worker that trains" in str((await opened(api)).warning_message)


@pytest.mark.parametrize(
    ("used_s", "said"),
    [(7.9, None), (9.2, "is spent to 92 %"), (10.0, "a day is spent;")],
)
async def test_a_budget_is_a_warning_once_four_fifths_are_used(
    service: Any, used_s: float, said: str | None
) -> None:
    store = service.services.store
    tenant = (await service.get("/usage"))["tenant"]
    await store.put_new_record(TenantRecord(tenant, tenant, 0.0))
    epoch = (await store.lease("other", "process", replace(INFO, name="other"))).epoch
    job = Job(tenant, JobKind.SAMPLE, "s:sample:0", 1, base_model="other")
    request = (await store.submit(job)).request_id
    await store.finish(epoch, [Outcome(request, usage=Usage(used_s))])
    await store.update_record(Update("tenant", tenant, {"device_s_a_day": 10.0}))
    service.services.budgets._known.clear()  # it is asked again after a second
    warning = (await opened(service)).warning_message
    if said is None:
        assert warning is None
    else:
        assert warning is not None and said in warning
        assert "budget of 10 device seconds a day" in warning and "00:00 UTC" in warning


@pytest.mark.parametrize(("free", "said"), [(2000, None), (1900, "room for 900 more bytes")])
async def test_a_disk_is_a_warning_before_it_refuses(
    service: Any, free: int, said: str | None
) -> None:
    disk = DiskGuard([Path()], 1000, free_bytes=lambda _: free)
    object.__setattr__(service.services, "disk", disk)
    warning = (await opened(service)).warning_message
    assert warning is None if said is None else said in str(warning)


async def test_a_resent_session_is_answered_with_the_same_session(api: Any) -> None:
    headers = {"X-Idempotency-Key": "one"}
    first, second = [await api.post("/create_session", {}, headers=headers) for _ in range(2)]
    assert first == second and first["warning_message"]
