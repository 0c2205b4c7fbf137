"""Jobs, records and outcomes in the forms that Redis' scripts take and give."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.jobs import (
    Job,
    JobKind,
    LoadWeights,
    Outcome,
    Rejection,
    SampleCommand,
    Saves,
    encode,
)
from tuneserve_engine.core.records import ModelRecord, ModelStatus, SessionRecord, Update
from tuneserve_engine.core.usage import CurvePoint, Usage
from tuneserve_engine.store.base import Completion, RecoveryPoint, SamplerClient
from tuneserve_engine.store.errors import ResultDropped, StoreUnusable
from tuneserve_engine.store.redis import encoding

SESSION = SessionRecord("s-1", 'te"nant', 1.5, 2.5, tags=["a"])
MODEL = ModelRecord("m", "t", "s", "base", AdapterConfig(4, 32.0, 2**62), 1.0, 2.0)
STEP = Job("t", JobKind.OPTIM_STEP, "m", 3, b"payload", "m", 2, "base", trace="00-1")


def sent(fields: list[Any]) -> list[bytes]:
    """Fields of a record as Redis gives them back."""
    return [each.encode() for each in fields]


# --- records ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [SESSION, MODEL])
def test_a_record_is_read_as_it_was_written(kept: Any) -> None:
    found = encoding.record(kept)
    assert found["key"] == kept.key
    assert encoding.read_record(type(kept), sent(found["fields"])) == kept


def test_a_record_without_fields_does_not_exist() -> None:
    assert encoding.read_record(SessionRecord, []) is None


def test_a_record_is_listed_under_its_tenant_and_its_parent_as_json() -> None:
    found = encoding.with_tenant(MODEL)
    assert (found["tenant"], found["listed"], found["under"]) == ("t", '"t"', '"s"')
    assert encoding.with_parent(MODEL)["parent"] == "s"
    assert encoding.listed(SESSION.tenant) == r'"te\"nant"'


@pytest.mark.parametrize(
    ("tenant", "parent", "name"),
    [
        (None, None, ""),
        ("t", None, ':t"t"'),
        (None, "s", ':p"s"'),
        ("t", "s", ':b"t""s"'),
        ("", None, ':t""'),
    ],
)
def test_listings_have_a_key_for_each_way_to_choose(
    tenant: str | None, parent: str | None, name: str
) -> None:
    assert encoding.listing(tenant, parent) == name


def test_an_update_has_the_changed_fields_as_json() -> None:
    assert encoding.update(Update("session", "s", {"ended": "success", "tags": ["x"]})) == {
        "type": "session",
        "key": "s",
        "fields": ["ended", '"success"', "tags", '["x"]'],
        "entries": [],
    }


def test_an_update_of_entries_has_those_to_set_and_those_to_remove() -> None:
    change = Update("model", "m", {}, {"user_metadata": {"a": "1", "b": None, "c": ""}})
    assert encoding.update(change)["entries"] == [["user_metadata", {"a": "1", "c": ""}, ["b"]]]


@pytest.mark.parametrize("status", ["failed", "lost"])
def test_a_model_that_fails_or_is_lost_ends_its_requests_with_the_reason(status: str) -> None:
    found = encoding.update(Update("model", "m", {"status": ModelStatus(status)}))
    assert found["fields"] == ["status", f'"{status}"']
    assert found["ends"]["status"] == f'"{status}"'
    assert found["ends"]["error"].startswith("model m ")
    assert "ends" not in encoding.update(Update("model", "m", {"status": ModelStatus.READY}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"colour": 1}, r"a session has no changeable field \['colour'\]"),
        ({"key": "x"}, r"no changeable field \['key'\]"),
        ({"last_seen_s": "soon"}, "last_seen_s of a session: "),
    ],
)
def test_an_update_that_does_not_fit_its_record_is_refused(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        encoding.update(Update("session", "s", changes))


# --- jobs ---------------------------------------------------------------------------------------


def test_a_submitted_job_has_texts_and_no_empty_fields() -> None:
    found = encoding.job(STEP, "req_a")
    assert found == {
        **{"id": "req_a", "tenant": "t", "kind": "optim_step", "scope": "m", "seq": "3"},
        **{"model": "m", "position": 2, "base": "base"},
        "fields": [
            *("tenant", "t", "kind", "optim_step", "scope", "m", "seq", "3", "base", "base"),
            *("model", "m", "position", 2, "trace", "00-1"),
        ],
    }
    refused = encoding.job(
        replace(STEP, rejection=Rejection("no", "server"), saves=Saves("k", 9)), "req_a"
    )
    assert (refused["error"], refused["category"]) == ("no", "server")
    assert refused["saves"] == {"key": "k", "size_bytes": 9, "listed": '"t"'}


@pytest.mark.parametrize(
    ("kind", "payload", "file"),
    [
        (JobKind.SAMPLE, encode(SampleCommand([1], 0, file_id="f-1")), "f-1"),
        (JobKind.SAMPLE, encode(SampleCommand([1], 0)), None),
        (JobKind.LOAD_WEIGHTS, encode(LoadWeights("f-2", "tinker://p", True)), "f-2"),
        (JobKind.SAMPLE, b"\xc1", "?"),
        (JobKind.FORWARD_BACKWARD, b"\xc1", None),  # its payload is no command
    ],
)
def test_a_job_names_the_file_that_it_reads(
    kind: JobKind, payload: bytes, file: str | None
) -> None:
    job = Job("t", kind, "s", 0, payload)
    assert encoding.job(job, "req_a").get("file") == file


def test_a_job_is_read_from_its_row() -> None:
    row = [b"req_a", b"t", b"optim_step", b"m", b"3", b"m", b"2", b"base", b"7", b"1", b"00-1"]
    digest = [b"00ff", b"2"]
    entry = encoding.read_entry([*row, *digest, b"payload"])
    assert entry.job == replace(STEP, request_id="req_a", release=7, attempts=1)
    assert (entry.digest, entry.halvings) == (b"\x00\xff", 2)
    bare = [*row[:5], None, None, b"base", b"7", None, None, None, None, b"payload"]
    alone = replace(STEP, request_id="req_a", release=7, model_id=None, position=None, trace="")
    assert encoding.read_job(bare) == alone


# --- outcomes -----------------------------------------------------------------------------------


def test_an_outcome_has_its_usage_its_point_and_the_digest_of_a_change() -> None:
    usage = Usage(device_s=0.5, trained_tokens=8)
    point = CurvePoint("optim_step", 4, step=1)
    found = encoding.outcome(
        Outcome("req_a", b"body", usage=usage, point=point, changed=True, halvings=1)
    )
    assert (found["id"], found["ctype"], found["updates"]) == ("req_a", "application/json", [])
    assert (found["sums"]["requests"], found["sums"]["device_s"]) == (1, 0.5)
    assert msgspec.json.decode(found["usage"], type=Usage) == usage
    assert (found["point"]["kind"], found["point"]["position"]) == ("optim_step", 4)
    assert (len(found["digest"]), found["halvings"]) == (32, 1)


def test_a_rejection_changes_no_model() -> None:
    found = encoding.outcome(Outcome("req_a", rejection=Rejection("no"), changed=True))
    assert (found["error"], found["category"]) == ("no", "user")
    assert "digest" not in found


def test_stored_outcomes_are_bodies_or_rejections() -> None:
    cost = (b'{"device_s":0.5}', b"10", b"12.5")
    body = encoding.read_outcome("req_a", [b"done", None, b"text/plain", b"x", *cost])
    usage = Usage(device_s=0.5, total_s=2.5)
    assert body == Outcome("req_a", b"x", "text/plain", usage=usage)
    refused = encoding.read_outcome("req_a", [b"done", b"user", None, b"no", None, b"1", b"2"])
    assert refused == Outcome("req_a", rejection=Rejection("no", "user"))


def test_a_request_without_an_outcome_waits_is_unknown_or_was_dropped() -> None:
    assert encoding.read_outcome("req_a", [b"ready", None, None, None, None, b"1", None]) is None
    with pytest.raises(KeyError, match="req_a"):
        encoding.read_outcome("req_a", [])
    with pytest.raises(ResultDropped, match="result of req_a was dropped"):
        encoding.read_outcome("req_a", [b"expired", None, None, None, None, None, None])


# --- the rest -----------------------------------------------------------------------------------


def test_names_of_clients_differ_wherever_a_part_differs() -> None:
    clients = [
        SamplerClient("t", "s", 1),
        SamplerClient("t1", "s", 1),
        SamplerClient("t", "1:s", 1),
        SamplerClient("t", "s", 11),
    ]
    assert encoding.client(clients[0]) == "1:t1:s"
    for name in (encoding.client, encoding.client_in_news):
        assert len({name(each) for each in clients}) == 4
    assert encoding.client_in_news(clients[0]).startswith("+")


def test_completions_metrics_and_weights_are_read() -> None:
    assert encoding.read_completion([b"req_a", b"3", 0, 12]) == Completion("req_a", 3, False, 12)
    assert encoding.read_completion([b"req_a", b"4", 1, None]) == Completion("req_a", 4, True)
    assert encoding.read_metrics([b"w", b'{"up":1.0}']) == {"w": {"up": 1.0}}
    assert encoding.read_weights([b"t", b"2", b"u", b"0.5"]) == {"t": 2.0, "u": 0.5}


def test_a_recovery_point_begins_with_its_position() -> None:
    point = RecoveryPoint("m", 12, "f-1", "n")
    stored = encoding.point(point)
    assert stored.startswith(b"12 ")
    assert encoding.read_point(stored) == point


def test_files_in_use_are_those_of_jobs_records_and_points() -> None:
    point = encoding.point(RecoveryPoint("m", 1, "f-3", "n"))
    assert encoding.read_files([b"f-1"], [b'"f-2"', b"null"], [point]) == {"f-1", "f-2", "f-3"}
    with pytest.raises(ValueError, match="in a form that this release cannot read"):
        encoding.read_files([b"f-1", b"?"], [], [])


@pytest.mark.parametrize(
    ("found", "told"),
    [(None, "has lost its format"), (b"", "has lost"), (b"2", "has format 2, this .* format 1")],
)
def test_a_store_of_another_format_is_refused(found: bytes | None, told: str) -> None:
    encoding.check_format(b"1")
    with pytest.raises(StoreUnusable, match=told):
        encoding.check_format(found)
