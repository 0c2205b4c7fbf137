"""The official SDK's sampling clients against real processes: one poller for all their requests,
cancelled requests, and copies of a client.

A sample of the fake backend counts upwards from its seed.
"""

import json
import pickle  # noqa: S403 - the SDK's own way to copy a client
import sqlite3
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from tests.faults.processes import BASE_MODEL, Service, running_service
from tests.sdk import service_client

pytestmark = [
    # The SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
KEY = "tml-sampling"
PROMPT = types.ModelInput.from_ints([5, 6])


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with running_service(tmp_path, retrieve_futures=True) as running:
        yield running


def client_of(service: Service) -> AbstractContextManager[tinker.ServiceClient]:
    return service_client(f"http://127.0.0.1:{service.port}", KEY)


def sampler_of(client: tinker.ServiceClient) -> tinker.SamplingClient:
    return client.create_sampling_client(base_model=BASE_MODEL).result()


def sampling(sampler: tinker.SamplingClient, seed: int) -> Any:
    params = types.SamplingParams(max_tokens=2, seed=seed)
    return sampler.sample(PROMPT, num_samples=1, sampling_params=params)


def tokens(future: Any) -> list[int]:
    (sequence,) = future.result(timeout=60).sequences
    return list(sequence.tokens)


def until(happened: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def answer_to(service: Service, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{service.port}/api/v1/{path}",
        data=json.dumps(body).encode(),
        headers={"X-API-Key": KEY, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


# --- many requests ------------------------------------------------------------------------------


def test_a_thousand_samples_arrive_through_one_poller_and_leave_no_result_behind(
    service: Service,
) -> None:
    with client_of(service) as client:
        sampler = sampler_of(client)
        futures = [sampling(sampler, seed=n % 50) for n in range(1000)]
        drawn = [tokens(future) for future in futures]
        assert drawn == [[n % 50 + 2, n % 50 + 3] for n in range(1000)]
        poller = sampler._futures_poller
        assert poller is not None
        until(lambda: not poller._retrieved)
    service.stop()
    with sqlite3.connect(f"file:{service.data_dir / 'store.db'}?mode=ro", uri=True) as store:
        left = store.execute(
            "SELECT state, COUNT(*), SUM(LENGTH(body)) FROM jobs GROUP BY state"
        ).fetchall()
    store.close()
    assert left == [("expired", 1000, None)]


def test_answers_to_the_poller_may_be_lost(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinker.resources import AsyncFuturesResource

    retrieve, calls = AsyncFuturesResource.retrieve_multi, []

    async def lossy(self: Any, **options: Any) -> Any:
        answer = await retrieve(self, **options)
        calls.append(answer)
        if len(calls) % 2:
            request = httpx.Request("POST", "http://127.0.0.1/api/v1/retrieve_futures")
            raise tinker.APIConnectionError(message="lost on the way back", request=request)
        return answer

    monkeypatch.setattr(AsyncFuturesResource, "retrieve_multi", lossy)
    with client_of(service) as client:
        sampler = sampler_of(client)
        for start in range(0, 9, 3):
            futures = [sampling(sampler, seed) for seed in range(start, start + 3)]
            assert [tokens(future) for future in futures] == [
                [seed + 2, seed + 3] for seed in range(start, start + 3)
            ]
    assert len(calls) >= 4


def test_failures_come_through_the_poller_as_typed_errors(service: Service) -> None:
    with client_of(service) as client:
        sampler = sampler_of(client)
        params = types.SamplingParams(max_tokens=1, temperature=-1.0)
        bad = sampler.sample(PROMPT, num_samples=1, sampling_params=params)
        good = sampling(sampler, 7)
        with pytest.raises(tinker.RequestFailedError, match="temperature is -1") as failure:
            bad.result(timeout=60)
        assert failure.value.category == types.RequestErrorCategory.User
        assert tokens(good) == [9, 10]


# --- requests that are given up -------------------------------------------------------------------


def test_a_sample_that_the_client_abandons_is_cancelled_and_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up: list[str] = []
    with (
        running_service(
            tmp_path, worker=False, max_tenant_jobs=1, retrieve_futures=True
        ) as service,
        client_of(service) as client,
    ):
        sampler = sampler_of(client)
        cancel = client.holder.enqueue_cancel

        def noted(request_id: str) -> None:
            given_up.append(request_id)
            cancel(request_id)

        monkeypatch.setattr(client.holder, "enqueue_cancel", noted)
        unwanted = sampling(sampler, 7)
        until(lambda: bool(sampler._futures_poller and sampler._futures_poller._events))
        wanted = sampling(sampler, 8)  # there is no room for it yet
        unwanted.future().cancel()
        until(lambda: bool(given_up))
        answer = answer_to(service, "retrieve_future", {"request_id": given_up[0]})
        assert answer["category"] == "user"
        assert "was cancelled" in answer["error"]
        until(lambda: bool(sampler._futures_poller and sampler._futures_poller._events))
        service.start_worker()
        assert tokens(wanted) == [10, 11]


# --- copies of a client ---------------------------------------------------------------------------


def test_copies_of_a_client_get_unique_numbers_even_after_a_restart(tmp_path: Path) -> None:
    with running_service(tmp_path) as service, client_of(service) as client:
        sampler = sampler_of(client)
        assert tokens(sampling(sampler, 1)) == [3, 4]
        pickled, handle = pickle.dumps(sampler), sampler.get_sampler_handle()
        copies = [pickle.loads(pickled) for _ in range(3)]  # noqa: S301
        copies += [tinker.SamplingClient.from_sampler_handle(handle, api_key=KEY)]
        futures = [sampling(each, 5) for each in copies for _ in range(4)]
        assert {tuple(tokens(future)) for future in futures} == {(7, 8)}
        service.restart_api()
        copies += [pickle.loads(pickled) for _ in range(2)]  # noqa: S301
        assert [tokens(sampling(each, 6)) for each in copies] == [[8, 9]] * 6
        assert sorted(each._cloned_sampler_id or 0 for each in copies) == [1, 2, 3, 4, 5, 6]
        assert tokens(sampling(sampler, 2)) == [4, 5]
