"""Uploads by signed links: what becomes of the files, which are refused, and what is left."""

import asyncio
import json
import time
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import numpy as np
import pytest
import safetensors.numpy
import tinker

from tests.server.conftest import asample
from tests.server.test_errors import assert_failure
from tests.server.transfer.test_peft_upload import (
    CONFIG,
    FILES,
    MODULES,
    SETTINGS,
    TENSORS,
    WEIGHTS,
    A,
    B,
    left,
)
from tests.support.fake_backend import WIDTH
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.core.records import TenantRecord
from tuneserve_server.routes import external_uploads

pytestmark = pytest.mark.anyio

START = {"base_model": "tuneserve/fake", "lora_config": {"rank": 2}}


async def started(api: Any, **options: Any) -> Any:
    return await api.post("/external_weights_upload_start", START, **options)


async def put(api: Any, url: str, data: bytes, **options: Any) -> httpx.Response:
    answer = await api.http.put(url, content=data, **options)
    assert isinstance(answer, httpx.Response)
    return answer


async def sent(api: Any, files: dict[str, bytes] | None = None, **options: Any) -> str:
    """The id of an upload whose files have arrived."""
    upload = await started(api, **options)
    for name, data in (files or FILES).items():
        answer = await put(api, upload["urls"][name], data)
        assert (answer.status_code, answer.json()) == (200, {"size_bytes": len(data)})
    upload_id: str = upload["upload_id"]
    return upload_id


async def finish(api: Any, upload_id: str, **options: Any) -> httpx.Response:
    body = {"upload_id": upload_id}
    answer = await api.call("POST", "/external_weights_upload_finish", json=body, **options)
    assert isinstance(answer, httpx.Response)
    return answer


async def uploaded(api: Any, **options: Any) -> str:
    answer = await finish(api, await sent(api, **options), **options)
    assert answer.status_code == 200, answer.text
    path: str = answer.json()["tinker_path"]
    return path


def refusal(answer: httpx.Response, status: int) -> str:
    assert_failure(answer, status)
    detail: str = answer.json()["detail"]
    return detail


# --- finished uploads -----------------------------------------------------------------------------


async def test_an_uploaded_adapter_is_listed_as_an_external_checkpoint(service: Any) -> None:
    path = await uploaded(service)
    parsed = tinker.types.ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert parsed.checkpoint_type == "external"
    (listed,) = (await service.get("/checkpoints"))["checkpoints"]
    assert tinker.types.Checkpoint.model_validate(listed).tinker_path == path
    assert listed["base_model"] == "tuneserve/fake"
    info = await service.post("/weights_info", {"tinker_path": path})
    assert (info["lora_rank"], info["train_mlp"], info["train_attn"]) == (2, True, False)


async def test_training_goes_on_from_its_weights_with_a_fresh_optimizer(service: Any) -> None:
    path = await uploaded(service)
    session = await service.session()
    # By hand: scale 3/2, and for each of 2 layers and 2 ranks the sums of 4 As and of 4 Bs.
    shift = 1.5 * 2 * 2 * (4 * A) * (4 * B)
    for number, optimizer in enumerate((False, True)):
        load = {"session_id": session, "model_seq_id": number, "path": path}
        answer = await service.post("/load_weights", {**load, "optimizer": optimizer})
        model = (await service.result(answer))["model_id"]
        output = await service.output(await service.forward_backward(model, 1))
        assert output.metrics["loss:sum"] == pytest.approx((1 + 3) / 8 + (1 + 5) / 8 - 2 * shift)


async def test_its_weights_are_sampled_from(service: Any) -> None:
    path = await uploaded(service)
    session = await service.session()
    drawn = []
    for number, chosen in enumerate(({"model_path": path}, {"base_model": "tuneserve/fake"})):
        keys = {"session_id": session, "sampling_session_seq_id": number}
        answer = await service.post("/create_sampling_session", {**keys, **chosen})
        scored = asample(answer["sampling_session_id"], 0, prompt_logprobs=True)
        result = await service.poll((await service.post("/asample", scored))["request_id"])
        response = wire.SampleResponse.FromString(result.content)
        drawn.append(np.frombuffer(response.prompt_logprobs, np.float32)[1])
    # By hand, as above: the adapter adds its shift to every logprob of the fake backend.
    assert drawn[0] - drawn[1] == pytest.approx(1.5 * 2 * 2 * (4 * A) * (4 * B))


async def test_its_files_are_downloaded_as_they_were_sent(service: Any) -> None:
    path = await uploaded(service)
    route = f"/training_runs/{path.split('/')[2]}/checkpoints/external_weights/uploaded"
    answer = await service.get(f"{route}/external_weights_urls")
    found = {name: await service.http.get(url) for name, url in answer["urls"].items()}
    assert sorted(found) == sorted(FILES)
    for each in found.values():
        assert each.headers["content-length"] == str(len(each.content))
    config = json.loads(found[CONFIG].content)
    assert (config["r"], config["lora_alpha"]) == (2, 3)
    tensors = safetensors.numpy.load(found[WEIGHTS].content)
    for name, sent_numbers in TENSORS.items():
        np.testing.assert_array_equal(tensors[name], sent_numbers)


async def test_a_retry_returns_the_same_upload_and_the_same_checkpoint(service: Any) -> None:
    retry = {"headers": {"X-Idempotency-Key": "k"}}
    first, again = await started(service, **retry), await started(service, **retry)
    assert first == again
    assert (await started(service, key="tml-b", **retry))["upload_id"] != first["upload_id"]
    upload = await sent(service)
    answers = [await finish(service, upload) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert len((await service.get("/checkpoints"))["checkpoints"]) == 1


async def test_a_file_that_was_refused_is_sent_again(service: Any) -> None:
    upload = await started(service)
    await put(service, upload["urls"][CONFIG], b"{}")
    await put(service, upload["urls"][WEIGHTS], FILES[WEIGHTS])
    assert "peft_type" in refusal(await finish(service, upload["upload_id"]), 400)
    await put(service, upload["urls"][CONFIG], FILES[CONFIG])
    assert len(left(service)) == 2, "the replaced file is deleted at once"
    assert (await finish(service, upload["upload_id"])).status_code == 200
    assert len(left(service)) == 1, "only the checkpoint's file is left"


async def test_an_upload_that_is_finished_twice_at_once_makes_one_checkpoint(service: Any) -> None:
    upload = await sent(service)
    answers = await asyncio.gather(*(finish(service, upload) for _ in range(2)))
    assert [each.status_code for each in answers] == [200, 200]
    assert answers[0].json() == answers[1].json()
    assert len((await service.get("/checkpoints"))["checkpoints"]) == len(left(service)) == 1


# --- refusals -------------------------------------------------------------------------------------


async def test_an_upload_that_cannot_be_used_is_not_started(service: Any) -> None:
    for fields, words in (
        ({"base_model": "no/such"}, "'no/such' is not served here"),
        ({"base_model": "tuneserve/fake:peft:65"}, "asks for a context of 65 tokens"),
        ({"lora_config": {"rank": 33}}, "lora_config.rank is 33; this server takes 1 to 32"),
        ({"lora_config": {"rank": 0}}, "lora_config.rank is 0"),
    ):
        path = "/external_weights_upload_start"
        answer = await service.call("POST", path, json={**START, **fields})
        assert words in refusal(answer, 400)


NAN = {**TENSORS, f"{MODULES[0]}.lora_B.weight": np.full((WIDTH, 2), np.nan, np.float32)}
NARROW = {name: each[..., :-1] for name, each in TENSORS.items() if "lora_A" in name}


FAULTY = (
    ({CONFIG: FILES[CONFIG]}, "adapter_model.safetensors has not arrived"),
    ({WEIGHTS: FILES[WEIGHTS]}, "adapter_config.json has not arrived"),
    ({**FILES, WEIGHTS: safetensors.numpy.save(NAN)}, "must be finite"),
    (
        {**FILES, WEIGHTS: safetensors.numpy.save({**TENSORS, **NARROW})},
        f"is [2, {WIDTH - 1}]; with rank 2",
    ),
    ({**FILES, WEIGHTS: FILES[WEIGHTS][:-4]}, "no whole safetensors file"),
    ({**FILES, CONFIG: json.dumps({**SETTINGS, "use_dora": True}).encode()}, "DoRA"),
)


async def test_faulty_files_make_no_checkpoint(service: Any) -> None:
    for number, (files, words) in enumerate(FAULTY):
        tenant = {"key": f"tml-{number}"}
        upload_id = await sent(service, files, **tenant)
        assert words in refusal(await finish(service, upload_id, **tenant), 400)
        assert (await service.get("/checkpoints", **tenant))["checkpoints"] == []


async def test_an_adapter_other_than_the_announced_one_is_refused(service: Any) -> None:
    for config, words in (
        ({"rank": 4}, "has rank 2, and the upload was started with lora_config.rank 4"),
        ({"rank": 2, "train_mlp": False}, "start another upload with train_mlp true"),
    ):
        path = "/external_weights_upload_start"
        upload = await service.post(path, {**START, "lora_config": config})
        for name, data in FILES.items():
            await put(service, upload["urls"][name], data)
        assert words in refusal(await finish(service, upload["upload_id"]), 400)


async def test_a_tenant_has_at_most_four_unfinished_uploads(service: Any) -> None:
    finished = await sent(service)
    for _ in range(3):
        await started(service)
    answer = await service.call("POST", "/external_weights_upload_start", json=START)
    assert "you have 4 unfinished uploads, which is the limit" in refusal(answer, 400)
    await started(service, key="tml-b")
    assert (await finish(service, finished)).status_code == 200
    await started(service)


async def test_files_beyond_the_tenants_bytes_are_refused_and_not_kept(service: Any) -> None:
    tenant = (await service.get("/usage"))["tenant"]
    most = len(FILES[WEIGHTS]) + 100
    limits = TenantRecord(tenant, tenant, time.time(), max_checkpoint_bytes=most)
    await service.services.store.put_record(limits)
    upload = await started(service)
    assert (await put(service, upload["urls"][WEIGHTS], FILES[WEIGHTS])).status_code == 200
    answer = await put(service, upload["urls"][CONFIG], FILES[CONFIG])
    assert "bytes" in refusal(answer, 400)
    assert len(left(service)) == 1


async def test_a_file_above_its_limit_is_refused_as_it_arrives(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.services.imports, "_limit_bytes", 3000)
    upload = await started(service)
    answer = await put(service, upload["urls"][WEIGHTS], bytes(3001))
    assert "the limit is 3000" in refusal(answer, 413)
    answer = await put(service, upload["urls"][CONFIG], bytes(2**18 + 1))
    assert "the limit is 262144" in refusal(answer, 413)
    assert left(service) == set()


# --- links, tenants and what is left --------------------------------------------------------------


async def test_a_link_is_for_one_file_of_one_upload_and_one_time(service: Any) -> None:
    first, other = await started(service), await started(service)
    url = urlsplit(first["urls"][CONFIG])
    query = dict(parse_qsl(url.query))
    later = {**query, "expires": str(int(query["expires"]) + 1)}
    refused = set()
    for path, changed in (
        (url.path.replace(CONFIG, WEIGHTS), query),
        (url.path.replace(CONFIG, "other"), query),
        (url.path.replace(first["upload_id"], other["upload_id"]), query),
        (url.path, later),
        (url.path, {**query, "tenant": "tml-b"}),
        (url.path, {**query, "signature": "\u00e9"}),
        (url.path, {}),
    ):
        answer = await put(service, path, FILES[CONFIG], params=changed)
        refused.add((answer.status_code, answer.json()["code"], answer.json()["detail"]))
    assert len(refused) == 1 and refused.pop()[:2] == (403, "link_invalid")
    assert left(service) == set()


async def test_a_link_ends_with_its_upload(service: Any) -> None:
    upload = await started(service)
    for name, data in FILES.items():
        await put(service, upload["urls"][name], data)
    assert (await finish(service, upload["upload_id"])).status_code == 200
    answer = await put(service, upload["urls"][CONFIG], FILES[CONFIG])
    assert refusal(answer, 403).startswith("this upload link is not valid or has expired")


async def test_a_link_works_for_as_long_as_the_answer_says(service: Any) -> None:
    upload = await started(service)
    in_s = datetime.fromisoformat(upload["expires"]).timestamp() - time.time()
    assert in_s == pytest.approx(service.services.settings.download_ttl_s, abs=60)
    tenant = (await service.get("/usage"))["tenant"]
    past = int(time.time()) - 1
    signed = external_uploads._signature(
        service.services.secret, upload["upload_id"], CONFIG, past, tenant
    )
    query = {"expires": past, "tenant": tenant, "signature": signed}
    url = upload["urls"][CONFIG].partition("?")[0]
    assert_failure(await put(service, url, FILES[CONFIG], params=query), 403)


async def test_another_tenants_upload_looks_like_a_missing_one(service: Any) -> None:
    upload_id = await sent(service)
    absent = upload_id[:-4] + "zzzz"
    said = [
        refusal(await finish(service, each, key="tml-b"), 404).replace(each, "X")
        for each in (upload_id, absent)
    ]
    assert said[0] == said[1]
    path = (await finish(service, upload_id)).json()["tinker_path"]
    assert (
        refusal(await finish(service, upload_id, key="tml-b"), 404).replace(upload_id, "X")
        == said[0]
    )
    answer = await service.call("POST", "/weights_info", json={"tinker_path": path}, key="tml-b")
    assert_failure(answer, 404)


async def test_the_files_of_an_unfinished_upload_are_no_checkpoints(service: Any) -> None:
    upload_id = await sent(service)
    assert (await service.get("/checkpoints"))["checkpoints"] == []
    answer = await service.call("GET", f"/training_runs/{upload_id}/checkpoints")
    assert_failure(answer, 404)
    part = {"tinker_path": f"upload://{upload_id}/{WEIGHTS}"}
    assert_failure(await service.call("POST", "/weights_info", json=part), 404)


async def test_an_unfinished_upload_is_swept(service: Any) -> None:
    upload_id = await sent(service)
    services = service.services
    await services.store.sweep(time.time() + 890 + 3000, SweepPolicy(session_ttl_s=1e9))
    await services.unused.clean(older_than_s=0)
    assert len(left(service)) == 2, "it may still be finished"
    await services.store.sweep(time.time() + 910 + 3000, SweepPolicy(session_ttl_s=1e9))
    await services.unused.clean(older_than_s=0)
    assert left(service) == set()
    assert_failure(await finish(service, upload_id), 404)
