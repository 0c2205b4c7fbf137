"""Listings, sessions, housekeeping and timed clean-up."""

import asyncio
import itertools
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.core.records import CheckpointRecord, SamplerRecord, SessionRecord, Update
from tuneserve_engine.store.sqlite.integrity import damaged
from tuneserve_server.cleanup.awake import AwakeTime
from tuneserve_server.cleanup.sweeper import patient, sweep_forever
from tuneserve_server.cli import doctor

pytestmark = pytest.mark.anyio


async def save(service: Any, model: str, seq_id: int, name: str, **fields: Any) -> str:
    request = {"model_id": model, "seq_id": seq_id, "path": name, **fields}
    result = await service.result(await service.post("/save_weights", request))
    path: str = result["path"]
    return path


async def test_runs_are_listed_newest_first_in_pages(service: Any) -> None:
    session = await service.session()
    models = [await service.model(session, number) for number in range(3)]
    page = await service.get("/training_runs?limit=2&offset=0&access_scope=owned")
    assert [run["training_run_id"] for run in page["training_runs"]] == models[:0:-1]
    assert {run["status"] for run in page["training_runs"]} == {"ready"}
    for run in page["training_runs"]:
        times = [datetime.fromisoformat(run[name]) for name in ("created", "last_request_time")]
        assert times == sorted(times)
    assert page["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
    rest = await service.get("/training_runs?limit=2&offset=2")
    assert [run["training_run_id"] for run in rest["training_runs"]] == models[:1]
    nothing = await service.get("/training_runs?limit=0")
    assert (nothing["training_runs"], nothing["cursor"]["total_count"]) == ([], 3)


async def test_a_run_names_its_newest_checkpoints(service: Any) -> None:
    model = await service.model(await service.session())
    await save(service, model, 1, "old")
    await save(service, model, 2, "new")
    request = {"model_id": model, "seq_id": 3, "path": "s", "kind": "snapshot"}
    await service.result(await service.post("/save_weights_for_sampler", request))
    run = await service.get(f"/training_runs/{model}?access_scope=owned")
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/new"
    assert run["last_checkpoint"]["checkpoint_type"] == "training"
    assert run["last_sampler_checkpoint"]["tinker_path"] == f"tinker://{model}/sampler_weights/s"


async def test_checkpoints_are_listed_with_size_and_total(service: Any) -> None:
    model = await service.model(await service.session())
    paths = [await save(service, model, n, f"c{n}") for n in (1, 2)]
    page = await service.get("/checkpoints?limit=1000&offset=0")
    assert [c["tinker_path"] for c in page["checkpoints"]] == paths[::-1]
    assert page["cursor"]["total_count"] == 2
    assert all(c["size_bytes"] > 0 and c["public"] is False for c in page["checkpoints"])
    assert datetime.fromisoformat(page["checkpoints"][0]["time"]).tzinfo is not None


async def test_an_unnamed_sampler_save_is_not_a_checkpoint(service: Any) -> None:
    model = await service.model(await service.session())
    request = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "snapshot"}
    await service.result(await service.post("/save_weights_for_sampler", request))
    assert (await service.get("/checkpoints"))["checkpoints"] == []


async def test_a_ttl_is_set_and_removed(service: Any) -> None:
    model = await service.model(await service.session())
    await save(service, model, 1, "a")
    path = f"/training_runs/{model}/checkpoints/weights/a/ttl"
    await service.ok("PUT", path, {"ttl_seconds": 7200})
    listed = (await service.get("/checkpoints"))["checkpoints"][0]
    left_s = (datetime.fromisoformat(listed["expires_at"]) - datetime.now(UTC)).total_seconds()
    assert 7100 < left_s <= 7200
    await service.ok("PUT", path, {"ttl_seconds": None})
    assert "expires_at" not in (await service.get("/checkpoints"))["checkpoints"][0]
    for body, status in (({"ttl_seconds": 60}, 400), ({}, 422), ({"ttl_seconds": "1h"}, 422)):
        assert (await service.call("PUT", path, json=body)).status_code == status


async def test_an_expired_checkpoint_is_removed_at_once_and_its_file_after_a_sweep(
    service: Any,
) -> None:
    model = await service.model(await service.session())
    path = await save(service, model, 1, "a", ttl_seconds=3600)
    store, files = service.services.store, service.services.files
    await store.update_record(Update("checkpoint", path, {"expires_s": time.time() - 1}))
    assert (await service.get("/checkpoints"))["checkpoints"] == []
    assert (
        await service.call("POST", "/weights_info", json={"tinker_path": path})
    ).status_code == 404
    assert len(files.ids()) == 1
    await store.sweep(time.time(), SweepPolicy())
    await service.services.unused.clean(older_than_s=0)
    # a file of an expired checkpoint is deleted, not quarantined
    assert files.ids() == set() and files.set_aside_groups() == {}
    assert await store.get_record(CheckpointRecord, path) is None


async def test_a_deleted_checkpoint_is_removed_and_its_name_is_free(service: Any) -> None:
    model = await service.model(await service.session())
    await save(service, model, 1, "a")
    path = f"/training_runs/{model}/checkpoints/weights/a"
    await service.ok("DELETE", path)
    assert (await service.call("DELETE", path)).status_code == 404
    await save(service, model, 2, "a")


async def test_named_files_survive_the_clean_up(service: Any) -> None:
    session = await service.session()
    model = await service.model(session)
    await save(service, model, 1, "a")
    request = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0, "kind": "snapshot"}
    await service.result(await service.post("/save_weights_for_sampler", request))
    files = service.services.files
    before = files.ids()
    files.write("0" * 32, {"stray": b"x"})  # this file goes into quarantine
    await service.services.unused.clean(older_than_s=0)
    assert (files.ids(), len(before)) == (before, 2)
    # The sampler goes with its session, and the checkpoint stays.
    await service.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}})
    await service.services.unused.clean(older_than_s=0)
    assert len(files.ids()) == 1


async def test_publishing_marks_the_checkpoint_for_its_owner_only(service: Any) -> None:
    model = await service.model(await service.session())
    await save(service, model, 1, "a")
    path = f"/training_runs/{model}/checkpoints/weights/a/publish"
    await service.ok("POST", path)
    assert (await service.get("/checkpoints"))["checkpoints"][0]["public"] is True
    theirs = await service.call("GET", f"/training_runs/{model}", key="tml-b")
    assert theirs.status_code == 404
    await service.ok("DELETE", path)
    assert (await service.get("/checkpoints"))["checkpoints"][0]["public"] is False


async def test_sessions_are_listed_with_their_owners_metadata(service: Any) -> None:
    request = {
        "tags": ["x"],
        "user_metadata": {"purpose": "test"},
        "sdk_version": "0.38.0",
        "display_name": "one",
    }
    session = (await service.post("/create_session", request))["session_id"]
    assert (await service.get("/sessions?limit=20&offset=0"))["sessions"] == [session]
    described = await service.get(f"/sessions/{session}?access_scope=owned")
    assert described == {
        "training_run_ids": [],
        "sampler_ids": [],
        "user_metadata": {"purpose": "test"},
        "display_name": "one",
    }


async def test_the_same_idempotency_key_gets_the_same_session(api: Any) -> None:
    header = {"X-Idempotency-Key": "stainless-python-retry-1"}
    first, again = [await api.session(headers=header) for _ in range(2)]
    other = await api.session(headers={"X-Idempotency-Key": "stainless-python-retry-2"})
    theirs = await api.session(headers=header, key="tml-b")
    assert first == again
    assert len({first, other, theirs}) == 3


async def test_numbers_in_metadata_are_stored_as_text(api: Any) -> None:
    request = {"tags": [], "user_metadata": {"a": 1, "b": True}, "sdk_version": "0.25.0"}
    session = (await api.post("/create_session", request))["session_id"]
    assert (await api.get(f"/sessions/{session}"))["user_metadata"] == {"a": "1", "b": "True"}


async def test_a_heartbeat_keeps_a_session_alive(api: Any) -> None:
    session = await api.session()
    store = api.services.store
    silent = Update("session", session, {"last_seen_s": time.time() - 10 * 86_400})
    await store.update_record(silent)
    await api.post("/session_heartbeat", {"session_id": session, "type": "session_heartbeat"})
    await store.sweep(time.time(), SweepPolicy())
    assert (await store.get_record(SessionRecord, session)).ended is None
    await store.update_record(silent)
    await store.sweep(time.time(), SweepPolicy())
    response = await api.call("POST", "/session_heartbeat", json={"session_id": session})
    assert (response.status_code, "(expired)" in response.text) == (410, True)


async def test_a_session_does_not_expire_while_the_server_was_away(api: Any) -> None:
    session = await api.session()
    store = api.services.store
    await store.update_record(Update("session", session, {"last_seen_s": 0.0}))
    sweeping = asyncio.create_task(
        sweep_forever(store, api.services.unused, SweepPolicy(session_ttl_s=1), 0.01)
    )
    await asyncio.sleep(0.1)
    sweeping.cancel()
    assert (await store.get_record(SessionRecord, session)).ended is None
    assert patient(SweepPolicy()).session_ttl_s > 1e8


async def test_the_reason_of_the_first_finish_stays(api: Any) -> None:
    session = await api.session()
    for reason in ("errored", "success"):
        await api.post(f"/sessions/{session}/finish", {"reason": {"type": reason}, "detail": None})
    assert (await api.services.store.get_record(SessionRecord, session)).ended == "errored"


async def test_the_capabilities_show_the_served_base_model(service: Any) -> None:
    assert await service.get("/get_server_capabilities") == {
        "supported_models": [
            {
                "model_name": "tuneserve/fake",
                "max_context_length": 64,
                "trainable": True,
                "sampleable": True,
            }
        ]
    }


async def test_a_damaged_store_accepts_nothing_new_and_still_serves_its_contents(
    service: Any,
) -> None:
    session = await service.session()
    model = await service.model(session)
    posted = await service.post("/optim_step", {"model_id": model, "seq_id": 1})
    await service.result(posted)
    services = service.app.state.services
    store, files, unused = services.store, services.files, services.unused
    store.soundness = damaged(Path("/data/store.db"), "page 7: never used")
    health = await service.get("/healthz", key=None)
    assert health["store_check"] == "damaged"
    assert "/data/store.db is damaged (page 7: never used)" in health["store_damage"]
    assert "restore store.db and the files from one backup" in health["store_damage"]
    sampled = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tuneserve/fake"}
    for path, request in (
        ("/create_session", {"tags": [], "sdk_version": "0.38.0"}),
        ("/create_sampling_session", sampled),
        ("/optim_step", {"model_id": model, "seq_id": 2}),
    ):
        refused = await service.call("POST", path, json=request)
        assert (refused.status_code, refused.json()["code"]) == (503, "store_damaged"), path
    assert refused.headers["retry-after"] == "30"
    assert "restore a backup" in refused.json()["detail"]
    await service.result(posted)
    assert doctor._store(services.settings, health).level == "FAIL"
    files.write("0" * 32, {"a": b""})
    # a minute per reading of the clock
    awake = AwakeTime(1000, clock=itertools.count(0.0, 60.0).__next__)
    sweeping = asyncio.create_task(
        sweep_forever(store, unused, SweepPolicy(session_ttl_s=0), 0.001, awake)
    )
    await asyncio.sleep(0.2)
    sweeping.cancel()
    assert files.members("0" * 32) == ["a"]
    assert (await store.get_record(SessionRecord, session)).ended is None


async def test_health_needs_no_key_and_describes_the_worker(api: Any) -> None:
    before = await api.get("/healthz", key=None)
    assert before == {
        "status": "ok",
        "worker": "absent",
        "base_model": "tuneserve/fake",
        "base_models": [],
        "store": "sqlite",
        "durability": "always",
        "store_check": "unchecked",
        "disk": "ok",
        "files": "ok",
        "keys_required": False,
    }
    await api.start_worker()
    after = await api.get("/healthz", key=None)
    model = {"architecture": "fake", "context_length": 64, "max_rank": 32}
    assert after == {
        **before,
        **model,
        "worker": "ready",
        "base_models": [{"name": "tuneserve/fake", "workers": 1, **model}],
    }


async def test_telemetry_is_accepted_and_dropped(api: Any) -> None:
    for content in (b"\xff not json", b"{}", b"x" * 100_000):
        assert await api.post("/telemetry", content=content) == {"status": "accepted"}


async def test_the_sdks_first_calls_get_flags_that_differ_from_its_defaults(
    api: Any,
) -> None:
    two_days_s = 2 * 86_400  # a run with a spent budget waits for the next day, and one more
    for path, flags in (
        (
            "/client/config",
            {
                "sample_join_sampling_session": True,
                "proto_compress_fwdbwd": True,
                "custom_loss_server_side": True,
                "billing_exception_max_pause_duration_sec": two_days_s,
            },
        ),
        ("/client/dynamic_config", {"sample_cancel_enabled": True}),
    ):
        answer = await api.post(path, {"sdk_version": "0.38.0"})
        assert answer == flags


async def test_a_poll_says_when_there_is_no_worker(api: Any, bodies: Any) -> None:
    answer = await api.post("/create_model", bodies.create_model(await api.session()))
    response = await api.call("POST", "/retrieve_future", json=answer)
    assert response.status_code == 408
    assert response.json()["queue_state"] == "paused_capacity"
    assert "no worker" in response.json()["queue_state_reason"]


async def test_an_expired_result_is_410(service: Any, bodies: Any) -> None:
    answer = await service.post("/create_model", bodies.create_model(await service.session()))
    await service.result(answer)
    policy = replace(SweepPolicy(), result_ttl_s=0.0)
    await service.services.store.sweep(time.time() + 1, policy)
    response = await service.poll(answer["request_id"])
    assert (response.status_code, response.json()["code"]) == (410, "result_expired")


async def test_a_failing_store_holds_polls_instead_of_failing_them(
    service: Any, bodies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await service.post("/create_model", bodies.create_model(await service.session()))

    async def broken(*_: object) -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr(service.services.store, "wait", broken)
    started_s = time.monotonic()
    response = await service.call("POST", "/retrieve_future", json=answer)
    assert (response.status_code, response.json()["queue_state"]) == (408, "paused_capacity")
    assert time.monotonic() - started_s >= service.services.settings.poll_s


async def test_a_store_that_fails_late_holds_a_poll_no_longer_than_usual(
    service: Any, bodies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two holds in a row would exceed the 45 seconds after which clients give up."""
    answer = await service.post("/create_model", bodies.create_model(await service.session()))
    poll_s = service.services.settings.__dict__["poll_s"] = 1.0

    async def late(*_: object) -> None:
        await asyncio.sleep(0.8 * poll_s)
        raise OSError("disk on fire")

    monkeypatch.setattr(service.services.store, "wait", late)
    started_s = time.monotonic()
    response = await service.call("POST", "/retrieve_future", json=answer)
    assert (response.status_code, response.json()["queue_state"]) == (408, "paused_capacity")
    assert poll_s <= time.monotonic() - started_s < 1.5 * poll_s


async def test_fields_of_newer_and_older_sdks_are_accepted(service: Any) -> None:
    """Newer SDKs send defaults of unknown fields. SDK 0.25 leaves out later fields."""
    session = await service.session()
    newer = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "tuneserve/fake",
        "lora_config": {"rank": 4, "future_option": None},
        "optimizer_config": {"type": "adamw", "future": [1, {"deep": True}]},
        "future_field": {"a": 1},
        "user_metadata": None,
    }
    await service.result(await service.post("/create_model", newer))
    older = {"session_id": session, "model_seq_id": 1, "base_model": "tuneserve/fake"}
    await service.result(await service.post("/create_model", older))
    adam = {"learning_rate": 1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
    step = {"model_id": f"{session}:train:1", "seq_id": 1, "adam_params": adam}
    assert "error" not in await service.result(await service.post("/optim_step", step))


async def test_a_session_lists_its_newest_samplers_and_pages_the_others(service: Any) -> None:
    """36,000 samplers once took half a second of the store."""
    session, store = await service.session(), service.services.store
    tenant = (await store.get_record(SessionRecord, session)).tenant
    keys = [f"{session}:sample:{n}" for n in range(1001)]
    for key in keys:
        await store.put_record(SamplerRecord(key, tenant, session, "tuneserve/fake", 0.0))
    listed = (await service.get(f"/sessions/{session}"))["sampler_ids"]
    assert listed == keys[:0:-1]
    rest = await service.get(f"/sessions/{session}?offset=1000&limit=5000")
    assert rest["sampler_ids"] == keys[:1]
    assert rest["training_run_ids"] == []
