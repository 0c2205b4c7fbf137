"""Unnamed sampler saves count under the limits; the newest of a model and the used ones stay."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.server.openai.openai_case import complete
from tests.server.transfer.test_peft_upload import path_of, send
from tests.support.fake_backend import FAKE_INFO
from tuneserve_engine.core.records import CheckpointRecord, SamplerRecord, TenantRecord, Update
from tuneserve_engine.store.base import CheckpointUsage
from tuneserve_server.cleanup import unnamed_saves
from tuneserve_server.settings import ApiSettings

pytestmark = pytest.mark.anyio
HOUR_S = 3600.0


@pytest.fixture
def settings(tmp_path: Path) -> ApiSettings:
    return ApiSettings(
        data_dir=tmp_path,
        base_model_name="tuneserve/fake",
        poll_s=0.2,
        max_checkpoints=6,
        unnamed_saves=2,
    )


class Saves:
    """The unnamed saves of one model."""

    def __init__(self, service: Any, session: str, model: str) -> None:
        self.service = service
        self.store = service.services.store
        self.session = session
        self.model = model
        self.seq = 0

    async def ask(self, **fields: Any) -> Any:
        self.seq += 1
        request = {"model_id": self.model, "seq_id": self.seq, **fields}
        return await self.service.post("/save_weights_for_sampler", request)

    async def save(self, number: int | None = None) -> str:
        number = 100 + self.seq if number is None else number
        result = await self.service.result(await self.ask(sampling_session_seq_id=number))
        key: str = result["sampling_session_id"]
        return key

    async def unused_for(self, seconds: float, *keys: str) -> None:
        then_s = time.time() - seconds
        await self.store.update_record(
            *(Update("sampler", key, {"used_s": then_s}) for key in keys)
        )
        self.service.services.last_seen._noted_s.clear()

    async def kept(self) -> list[str]:
        """The stored saves, oldest first."""
        page = await self.store.page_of_records(SamplerRecord, parent=self.session)
        return [each.key for each in reversed(page.items)]


@pytest.fixture
async def saves(service: Any) -> Saves:
    session = await service.session()
    return Saves(service, session, await service.model(session))


async def test_a_save_stays_while_its_session_lives_however_seldom_it_is_used(
    saves: Saves, bodies: Any
) -> None:
    """A reference policy is sampled every 20 minutes, while newer saves are made and dropped."""
    reference, *others = [await saves.save() for _ in range(4)]
    await saves.unused_for(HOUR_S, reference, *others)
    keys = [await saves.save(), await saves.save()]
    assert await saves.kept() == [reference, *others, *keys]
    answer = await saves.service.post("/asample", bodies.asample(reference, 0))
    assert (await saves.service.poll(answer["request_id"])).status_code == 200


async def test_at_the_limit_the_least_recently_used_saves_and_their_files_are_removed(
    saves: Saves, bodies: Any
) -> None:
    """The newest of each model stay, and so do saves that a client samples from or polls for."""
    other = Saves(saves.service, saves.session, await saves.service.model(saves.session, 1))
    its = await other.save(50)
    sampled, polled, older, *newer = [await saves.save() for _ in range(5)]
    answer = await saves.service.post("/asample", bodies.asample(polled, 0))
    await saves.unused_for(2 * HOUR_S, its, sampled, polled, older)
    await saves.unused_for(HOUR_S, *newer)
    await saves.service.post("/asample", bodies.asample(sampled, 0))
    assert (await saves.service.poll(answer["request_id"])).status_code == 200
    newest = [await saves.save()]
    assert await saves.kept() == [its, sampled, polled, *newer, *newest]
    newest.append(await saves.save())
    assert await saves.kept() == [its, sampled, polled, newer[1], *newest]
    files = saves.service.services.files
    await saves.service.services.unused.clean(older_than_s=-1)
    assert len(files.ids()) == 6
    refused = await saves.service.call("POST", "/asample", json=bodies.asample(older, 0))
    assert refused.status_code == 404
    assert "to keep weights, save them under a name" in refused.json()["detail"]


async def test_queued_saves_count(saves: Saves) -> None:
    """A client once made 60 saves while the worker was away. All were stored, over a limit of 6."""
    await saves.service.stop_worker()
    answers = []
    for kind in ("save_weights_for_sampler", "save_weights", "save_weights_external"):
        for n in range(20):
            saves.seq += 1
            request = {"model_id": saves.model, "seq_id": saves.seq, "path": f"{kind}{n}"}
            if n % 2 and kind == "save_weights_for_sampler":
                request = {**request, "path": None, "sampling_session_seq_id": 200 + n}
            answers.append(await saves.service.post(f"/{kind}", request))
    await saves.service.start_worker()
    told = await saves.service.error(answers.pop())
    assert "you have 0 checkpoints, and 6 more are being saved; this server keeps up to 6" in told
    for answer in answers:
        await saves.service.poll(answer["request_id"])
    assert len(await saves.kept()) == 3
    assert len((await saves.store.page_of_records(CheckpointRecord)).items) == 3


async def test_the_expected_size_of_a_save_counts_until_the_worker_reports_it(
    saves: Saves,
) -> None:
    first = await saves.store.get_record(SamplerRecord, await saves.save())
    await saves.service.stop_worker()
    answers = [await saves.ask(sampling_session_seq_id=200)]
    coming = (await saves.store.checkpoint_usage(first.tenant)).size_bytes - first.size_bytes
    assert coming > 4 * 4 * 4 * 8  # the numbers of an adapter, without its file's header
    limit = first.size_bytes + 3 * coming
    await saves.store.put_record(
        TenantRecord(first.tenant, first.tenant, 0.0, max_checkpoint_bytes=limit)
    )
    answers += [await saves.ask(sampling_session_seq_id=201 + n) for n in range(3)]
    refused = await saves.store.wait(answers.pop()["request_id"], 0)
    assert f"have {limit} bytes, and 3 more are being saved" in refused.rejection.message
    await saves.service.start_worker()
    for answer in answers:
        assert (await saves.service.poll(answer["request_id"])).status_code == 200
    assert await saves.store.checkpoint_usage(first.tenant) == CheckpointUsage(
        4, 4 * first.size_bytes
    )


async def test_a_completion_of_v1_counts_as_a_use_of_the_save(
    saves: Saves, tokenizer: Path
) -> None:
    used, unused, *others = [await saves.save() for _ in range(6)]
    await saves.service.stop_worker()
    await saves.service.start_worker(info=replace(FAKE_INFO, tokenizer_id=str(tokenizer)))
    await saves.unused_for(HOUR_S, used, unused, *others)
    await complete(saves.service, model=used)
    newest = await saves.save()
    assert await saves.kept() == [used, *others, newest]


async def test_a_waiting_sample_has_its_weights_even_if_the_save_is_removed(
    saves: Saves, bodies: Any
) -> None:
    key = await saves.save()
    await saves.service.stop_worker()
    answer = await saves.service.post("/asample", bodies.asample(key, 0))
    await saves.unused_for(HOUR_S, key)
    await saves.store.delete_record(SamplerRecord, key)
    await saves.service.services.unused.clean(older_than_s=-1)
    await saves.service.start_worker()
    assert (await saves.service.poll(answer["request_id"])).status_code == 200


async def test_saves_count_under_the_limits_of_checkpoints(saves: Saves) -> None:
    keys = [await saves.save() for _ in range(6)]
    assert "you have 6 checkpoints; this server keeps up to 6" in await saves.service.error(
        await saves.ask(sampling_session_seq_id=7)
    )
    assert "you have 6 checkpoints" in await saves.service.error(await saves.ask(path="named"))
    assert await saves.kept() == keys


async def test_at_the_limit_a_save_unused_for_a_minute_is_removed(saves: Saves) -> None:
    keys = [await saves.save() for _ in range(6)]
    await saves.unused_for(61, keys[1])
    newest = await saves.save()
    assert await saves.kept() == [keys[0], *keys[2:], newest]


@pytest.mark.parametrize(
    "route", ["save_weights", "save_weights_for_sampler", "save_weights_external"]
)
async def test_a_named_save_makes_room_too(saves: Saves, route: str) -> None:
    keys = [await saves.save() for _ in range(6)]
    await saves.unused_for(HOUR_S, *keys)
    request = {"model_id": saves.model, "seq_id": 7, "path": "named"}
    result = await saves.service.result(await saves.service.post(f"/{route}", request))
    assert result["path"].endswith("/named")
    assert await saves.kept() == keys[1:]


async def test_saves_stay_if_without_them_there_is_no_room_either(saves: Saves) -> None:
    keys = [await saves.save() for _ in range(6)]
    await saves.unused_for(HOUR_S, *keys)
    tenant = (await saves.store.get_record(SamplerRecord, keys[0])).tenant
    usage = await saves.store.checkpoint_usage(tenant)
    for few in ({"max_checkpoints": 2}, {"max_checkpoint_bytes": usage.size_bytes // 3}):
        await saves.store.put_record(TenantRecord(tenant, tenant, 0.0, **few))
        told = await saves.service.error(await saves.ask(path="named"))
        assert "this server keeps up to" in told or "the limit is" in told
        refused = await send(saves.service)
        assert refused.status_code == 400
        assert await saves.kept() == keys


async def test_a_refused_archive_costs_no_save(saves: Saves) -> None:
    keys = [await saves.save() for _ in range(6)]
    await saves.unused_for(HOUR_S, *keys)
    refused = await send(saves.service, b"no archive")
    assert refused.status_code == 422
    assert await saves.kept() == keys


async def test_an_import_makes_room_too_also_for_its_known_bytes(saves: Saves) -> None:
    keys = [await saves.save() for _ in range(6)]
    await saves.unused_for(HOUR_S, *keys)
    await path_of(saves.service)
    assert await saves.kept() == keys[1:]
    tenant = (await saves.store.get_record(SamplerRecord, keys[1])).tenant
    limit = (await saves.store.checkpoint_usage(tenant)).size_bytes + 1
    few = TenantRecord(tenant, tenant, 0.0, max_checkpoint_bytes=limit, max_checkpoints=100)
    await saves.store.put_record(few)
    await path_of(saves.service)
    assert await saves.kept() == keys[2:]


async def test_saves_count_under_the_limit_of_bytes(saves: Saves) -> None:
    key = await saves.save()
    stored = await saves.store.get_record(SamplerRecord, key)
    size = stored.size_bytes
    assert size > 0
    await saves.store.put_record(
        TenantRecord(stored.tenant, stored.tenant, 0.0, max_checkpoint_bytes=size)
    )
    assert f"your checkpoints have {size} bytes" in await saves.service.error(
        await saves.ask(sampling_session_seq_id=7)
    )


async def test_saves_of_an_earlier_release_count_from_the_update_on(saves: Saves) -> None:
    """The earlier release recorded neither their model nor their size nor the time of use."""
    stored = await saves.store.get_record(SamplerRecord, await saves.save())
    old = replace(stored, model_id="", size_bytes=0, used_s=0.0)
    await saves.store.put_record(old)
    await saves.store.put_record(replace(old, key=f"{old.key}1", file_id="0" * 32))
    await saves.store.put_record(replace(old, key=f"{old.key}2", file_id=None))
    await unnamed_saves.adopt(saves.store, saves.service.services.files)
    now = await saves.store.get_record(SamplerRecord, old.key)
    assert now.size_bytes == stored.size_bytes
    assert abs(time.time() - now.used_s) < 60
    assert await saves.store.checkpoint_usage(old.tenant) == CheckpointUsage(2, stored.size_bytes)
    await saves.store.put_record(replace(now, used_s=5.0))
    await unnamed_saves.adopt(saves.store, saves.service.services.files)
    assert (await saves.store.get_record(SamplerRecord, old.key)).used_s == 5.0
