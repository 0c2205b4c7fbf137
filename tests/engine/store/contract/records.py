"""Records: storing, listing and changing them."""

import asyncio

import pytest

from tests.engine.store.contract.bench import (
    START_S,
    Bench,
    Contract,
    api_key,
    checkpoint,
    custom_loss,
    model,
    sampler,
    scenario,
    session,
    tenant,
)
from tuneserve_engine.core.jobs import Outcome
from tuneserve_engine.core.records import (
    AuditRecord,
    CheckpointRecord,
    KeyRecord,
    ModelRecord,
    SessionRecord,
    TenantRecord,
    Update,
)


class RecordsContract(Contract):
    # --- records ------------------------------------------------------------------------------

    @scenario
    async def test_records_are_read_as_they_were_written(self, bench: Bench) -> None:
        metadata = {"name": "läuft ✓", "": "\x00"}
        for record in (
            session(tags=["a"], user_metadata=metadata),
            model(user_metadata=metadata),
            sampler(model_path="tinker://x"),
            custom_loss(graph='{"läuft": "✓"}', error="\x00"),
            checkpoint(expires_s=1.5, user_metadata=metadata),
            api_key(name="läuft ✓", expires_s=1.5),
            tenant(weight=0.5, max_jobs=0, max_checkpoint_bytes=2**50),
            AuditRecord("a", "alice", "2026-11-29", "key_create", 1.5, {"made": "läuft ✓"}),
        ):
            await bench.store.put_record(record)
            assert await bench.store.get_record(type(record), record.key) == record
            await bench.store.delete_record(type(record), record.key)
            assert await bench.store.get_record(type(record), record.key) is None

    @scenario
    async def test_put_new_record_returns_an_existing_record(self, bench: Bench) -> None:
        assert await bench.store.put_new_record(session(sdk_version="1")) == session(
            sdk_version="1"
        )
        assert await bench.store.put_new_record(session(sdk_version="2")) == session(
            sdk_version="1"
        )

    @scenario
    async def test_an_update_changes_only_the_fields_that_it_names(self, bench: Bench) -> None:
        await bench.store.put_record(checkpoint())
        await bench.store.update_record(
            Update("checkpoint", checkpoint().key, {"public": True, "expires_s": 5.0}),
            Update("checkpoint", "missing", {"public": True}),
        )
        want = checkpoint(public=True, expires_s=5.0)
        assert await bench.store.get_record(CheckpointRecord, checkpoint().key) == want

    @scenario
    async def test_entries_are_set_and_removed_and_the_others_stay(self, bench: Bench) -> None:
        odd = {"1": "2", "é/\\": '"\n\0', "": "", "🙂": "[]"}
        await bench.store.put_record(model(user_metadata={"a": "1", "b": "2"}))
        for entries, want in (
            ({"b": None, "c": "3", "missing": None}, {"a": "1", "c": "3"}),
            ({"a": None, "c": None}, {}),
            ({}, {}),
            (odd, odd),
            ({"x": "y"}, odd | {"x": "y"}),
        ):
            change = Update("model", model().key, {}, {"user_metadata": entries})
            await bench.store.update_record(change)
            found = await bench.store.get_record(ModelRecord, model().key)
            assert found == model(user_metadata=want)
        with pytest.raises(ValueError, match="colour"):
            await bench.store.update_record(
                Update("model", model().key, {}, {"colour": {"a": "b"}})
            )

    @scenario
    async def test_changes_of_entries_at_the_same_moment_are_all_kept(self, bench: Bench) -> None:
        await bench.store.put_record(model())
        changes = [
            Update("model", model().key, {}, {"user_metadata": {f"entry {n}": "x"}})
            for n in range(20)
        ]
        await asyncio.gather(*map(bench.store.update_record, changes))
        found = await bench.store.get_record(ModelRecord, model().key)
        assert found is not None and len(found.user_metadata) == 20

    @scenario
    async def test_a_key_is_revoked_and_stays_listed_under_its_tenant(self, bench: Bench) -> None:
        for key in ("0a", "0b"):
            await bench.store.put_record(api_key(key))
        await bench.store.put_record(api_key("0c", tenant="bob", parent="bob"))
        await bench.store.update_record(Update("key", "0a", {"revoked_s": START_S + 1}))
        page = await bench.store.page_of_records(KeyRecord, tenant="alice")
        assert page.items == [api_key("0b"), api_key("0a", revoked_s=START_S + 1)]
        assert (await bench.store.page_of_records(KeyRecord, limit=0)).total == 3

    @scenario
    async def test_a_tenants_limits_can_be_removed(self, bench: Bench) -> None:
        await bench.store.put_record(tenant(max_jobs=1, max_models=2))
        await bench.store.update_record(
            Update("tenant", "alice", {"max_jobs": None, "weight": 2.0})
        )
        assert await bench.store.get_record(TenantRecord, "alice") == tenant(
            max_models=2, weight=2.0
        )

    @scenario
    async def test_an_invalid_update_changes_nothing(self, bench: Bench) -> None:
        await bench.store.put_record(checkpoint())
        good = Update("checkpoint", checkpoint().key, {"public": True})
        for changes in ({"colour": "red"}, {"size_bytes": "many"}, {"key": "other"}):
            with pytest.raises(ValueError, match=r"colour|size_bytes|key"):
                await bench.store.update_record(
                    good, Update("checkpoint", checkpoint().key, changes)
                )
        assert await bench.store.get_record(CheckpointRecord, checkpoint().key) == checkpoint()

    @scenario
    async def test_pages_list_the_newest_first(self, bench: Bench) -> None:
        for n in range(5):
            await bench.store.put_record(model(f"s:train:{n}"))
        await bench.store.put_record(model("t:train:0", tenant="bob"))
        await bench.store.put_record(model("s:train:1", last_request_s=START_S + 1))
        mine = await bench.store.page_of_records(ModelRecord, tenant="alice", limit=2, offset=1)
        assert ([each.key for each in mine.items], mine.total) == (["s:train:3", "s:train:2"], 5)
        other = await bench.store.page_of_records(ModelRecord, parent="t")
        assert ([each.key for each in other.items], other.total) == (["t:train:0"], 1)
        assert (await bench.store.page_of_records(ModelRecord)).total == 6
        assert (
            await bench.store.page_of_records(ModelRecord, tenant="alice", parent="t")
        ).items == []
        assert (await bench.store.page_of_records(SessionRecord)).total == 0

    @scenario
    async def test_an_overwritten_checkpoint_is_listed_as_new(self, bench: Bench) -> None:
        await bench.submit(1, 2, 3)
        await bench.finish(
            Outcome(bench.ids[1], checkpoint=checkpoint("one")),
            Outcome(bench.ids[2], checkpoint=checkpoint("two")),
            Outcome(bench.ids[3], checkpoint=checkpoint("one"), overwrite=True),
        )
        page = await bench.store.page_of_records(CheckpointRecord, parent="s:train:0")
        assert [each.name for each in page.items] == ["one", "two"]
