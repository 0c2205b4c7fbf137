"""Checkpoints downloaded as archives: contents, signed links and the limit of parallel ones."""

import asyncio
import io
import json
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from starlette.types import Message

from tests.support.fake_backend import FAKE_INFO
from tuneserve_engine.adapters.peft_export import Converted
from tuneserve_server.transfer import peft_download
from tuneserve_server.transfer.peft_download import Archive, ArchiveResponse

pytestmark = pytest.mark.anyio

PEFT = ["adapter_config.json", "adapter_model.safetensors"]


async def saved(service: Any, **fields: Any) -> str:
    """Train a model, save it as each kind of checkpoint, and return its id."""
    session = await service.session()
    request = {**service_model(session), **fields}
    model = f"{session}:train:0"
    await service.result(await service.post("/create_model", request))
    await service.output(await service.forward_backward(model, 1))
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
    await service.poll((await service.post("/optim_step", step))["request_id"])
    routes = ("/save_weights", "/save_weights_for_sampler", "/save_weights_external")
    for seq_id, route in enumerate(routes, 3):
        body = {"model_id": model, "seq_id": seq_id, "path": "a"}
        assert "path" in await service.result(await service.post(route, body))
    return model


def service_model(session: str) -> dict[str, Any]:
    return {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "tuneserve/fake",
        "lora_config": {"rank": 4, "seed": 1},
    }


def ids(page: dict[str, Any]) -> list[str]:
    """The runs of a page; their other figures may change with time."""
    return [each["training_run_id"] for each in page["training_runs"]]


def route(model: str, kind: str = "weights") -> str:
    return f"/training_runs/{model}/checkpoints/{kind}/a/archive"


async def link(service: Any, model: str, kind: str = "weights") -> str:
    url: str = (await service.get(route(model, kind)))["url"]
    return url


async def downloaded(service: Any, url: str) -> dict[str, bytes]:
    """The files of an archive, in their order."""
    answer = await service.http.get(url)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["content-type"] == "application/x-tar"
    found = {}
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        for each in archive:
            content = archive.extractfile(each)
            assert each.isfile() and content is not None
            found[each.name] = content.read()
    return found


def checkpoint_file(service: Any, url: str) -> Any:
    """The source of the archive on the server's disk."""
    file_id = urlsplit(url).path.split("/")[-2]
    return service.services.files.path(file_id) / "adapter.safetensors"


@pytest.mark.parametrize("kind", ["lora", "rslora"])
async def test_checkpoints_of_all_kinds_equal_the_workers_export_to_the_bit(
    service: Any, kind: str
) -> None:
    model = await saved(service, adapter={"kind": kind})
    runs = await service.get("/training_runs")
    urls = await service.get(
        f"/training_runs/{model}/checkpoints/external_weights/a/external_weights_urls"
    )
    export = {name: (await service.http.get(url)).content for name, url in urls["urls"].items()}
    assert sorted(export) == PEFT
    for each in ("weights", "sampler_weights", "external_weights"):
        answer = await service.get(route(model, each))
        assert {"url", "expires"} == answer.keys()
        found = await downloaded(service, answer["url"])
        assert list(found) == [*PEFT, "checkpoint_complete"]
        assert found == {**export, "checkpoint_complete": b""}
    assert ids(await service.get("/training_runs")) == ids(runs), "a run was made for it"


async def test_only_the_lora_checkpoints_of_an_osft_adapter_become_archives(api: Any) -> None:
    """Only a worker can convert the training checkpoint, and the message says how."""
    shapes = tuple((name, (2, 8, 8)) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    await api.start_worker(info=replace(FAKE_INFO, target_shapes=shapes))
    model = await saved(
        api,
        adapter={"kind": "osft", "rank": 4},
        lora_config={"train_mlp": False, "train_unembed": False},
    )
    response = await api.call("GET", route(model))
    assert (response.status_code, response.json()["code"]) == (400, "export_needed")
    assert "download the result of save_weights_external" in response.json()["detail"]
    for kind in ("sampler_weights", "external_weights"):
        found = await downloaded(api, await link(api, model, kind))
        assert json.loads(found["adapter_config.json"])["peft_type"] == "LORA"


async def test_an_encrypted_export_stays_encrypted(service: Any) -> None:
    import pyrage

    identity = pyrage.x25519.Identity.generate()
    model = await service.model(await service.session())
    recipients = {"age_encryption_recipients": [str(identity.to_public())]}
    body = {"model_id": model, "seq_id": 1, "path": "a", **recipients}
    await service.result(await service.post("/save_weights_external", body))
    found = await downloaded(service, await link(service, model, "external_weights"))
    assert list(found) == [*(f"{name}.age" for name in PEFT), "checkpoint_complete"]
    sealed = found["adapter_config.json.age"]
    assert json.loads(pyrage.decrypt(sealed, [identity]))["r"] == 4


# --- links ----------------------------------------------------------------------------------------


async def test_another_tenants_checkpoint_looks_like_a_missing_one(service: Any) -> None:
    model = await saved(service)
    refused = []
    for path in (route(model), route("00000000:train:0")):
        response = await service.call("GET", path, key="tml-b")
        detail = response.json()["detail"].rpartition(":")[0]
        refused.append((response.status_code, response.json()["code"], detail.partition(":")[0]))
    assert refused[0] == refused[1]
    assert refused[0][:2] == (404, "not_found")


async def test_a_download_requires_a_link_signed_for_this_checkpoint(service: Any) -> None:
    model, other = await saved(service), await saved(service)
    url, others = await link(service, model), await link(service, other)
    ids = [urlsplit(each).path.split("/")[-2] for each in (url, others)]
    expires = parse_qs(urlsplit(url).query)["expires"][0]
    for forged in (
        url[:-1] + ("0" if url[-1] != "0" else "1"),
        url.replace(*ids),
        url.replace(f"expires={expires}", f"expires={int(expires) + 1}"),
        url.replace("checkpoint.tar", "adapter.safetensors"),
        url.replace("tenant=t-", "tenant=t-0"),
        url.partition("?")[0],
    ):
        assert forged != url
        response = await service.http.get(forged)
        assert (response.status_code, response.json()["code"]) == (403, "link_invalid")
    assert await downloaded(service, url)


async def test_a_link_expires_at_the_stated_time(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await service.get(route(await saved(service)))
    expires = int(parse_qs(urlsplit(answer["url"]).query)["expires"][0])
    assert 895 <= expires - time.time() <= 900
    for late, status in ((-1, 200), (1, 403)):
        monkeypatch.setattr(time, "time", lambda late=late: expires + late)
        assert (await service.http.get(answer["url"])).status_code == status
        monkeypatch.undo()


async def test_a_link_to_a_deleted_checkpoint_is_404(service: Any) -> None:
    url = await link(service, await saved(service))
    path = checkpoint_file(service, url)
    service.services.files.delete(path.parent.name)
    response = await service.http.get(url)
    assert (response.status_code, response.json()["code"]) == (404, "not_found")


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["weights", "external_weights"])
async def test_a_damaged_checkpoint_is_reported_and_not_sent(service: Any, kind: str) -> None:
    model = await saved(service)
    url = await link(service, model, kind)
    name = "adapter.safetensors" if kind == "weights" else "adapter_model.safetensors"
    path = checkpoint_file(service, url).with_name(name)
    whole = path.read_bytes()
    at = whole.index(b"weights/q_proj.A" if kind == "weights" else b"lora_A") + 3
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    asked = await service.call("GET", route(model, kind))
    for response in (asked, await service.http.get(url)):
        assert (response.status_code, response.json()["code"]) == (500, "checkpoint_damaged")
        assert f"{path.parent.name}/{name}" in response.json()["detail"]
    assert f"tinker://{model}/{kind}/a" in asked.json()["detail"]
    path.write_bytes(whole)
    assert await downloaded(service, url)


# --- limits ---------------------------------------------------------------------------------------


async def test_a_tenant_has_a_limited_number_of_parallel_downloads(service: Any) -> None:
    counted = service.services.archives.counted
    model = await saved(service)
    url = await link(service, model)
    tenant = parse_qs(urlsplit(url).query)["tenant"][0]
    blocks = [counted(tenant) for _ in range(peft_download.OF_TENANT)]
    for each in blocks:
        each.__enter__()
    for response in (await service.call("GET", route(model)), await service.http.get(url)):
        assert (response.status_code, response.json()["code"]) == (429, "overloaded")
        assert response.headers["retry-after"] == "5"
    for each in blocks:
        each.__exit__(None, None, None)
    for _ in range(2 * peft_download.OF_TENANT):
        assert await downloaded(service, url)


async def test_the_event_loop_runs_while_an_adapter_is_read(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = await link(service, await saved(service))
    asked, go_on = threading.Event(), threading.Event()
    real = Converted.weights

    def slow(found: Converted) -> Iterator[bytes]:
        asked.set()
        assert go_on.wait(10)
        yield from real(found)

    monkeypatch.setattr(Converted, "weights", slow)
    downloading = asyncio.create_task(downloaded(service, url))
    while not asked.is_set():
        await asyncio.sleep(0.01)
    assert (await service.call("GET", "/healthz")).status_code == 200
    assert not downloading.done()
    go_on.set()
    assert len(await downloading) == 3


async def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_download, "_PIECE_S", 0.05)
    sent = []

    async def send(message: Message) -> None:
        sent.append(message["type"])
        if len(sent) > 1:
            await asyncio.sleep(60)

    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    async def pieces() -> Any:
        for piece in Archive(2, iter([b"a", b"b"])).pieces:
            yield piece

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET"}
    async with asyncio.timeout(5):
        await ArchiveResponse(pieces())(scope, receive, send)
    assert sent == ["http.response.start", "http.response.body"]
