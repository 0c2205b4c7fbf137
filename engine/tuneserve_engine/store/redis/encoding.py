"""The encoding of jobs and records in Redis: hashes of short texts, with payloads and bodies apart.

A record is a hash of field -> JSON text. Scripts get structured arguments in MessagePack, without
bytes, which Redis' reader does not know, and without integers that Lua's doubles cannot hold.
"""

import dataclasses
import hashlib
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tuneserve_engine.core.jobs import (
    EncodedTokenDelta,
    Job,
    JobKind,
    Outcome,
    Rejection,
    snapshot_and_sequences,
)
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.core.records import (
    RECORD_NAME,
    RECORD_TYPES,
    ModelRecord,
    ModelStatus,
    Record,
    Update,
)
from tuneserve_engine.core.usage import TOTALLED, Totals
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import (
    Completion,
    LogEntry,
    R,
    RecoveryPoint,
    SamplerClient,
)
from tuneserve_engine.store.errors import ResultDropped, StoreUnusable
from tuneserve_engine.store.redis.usage import read_usage

_SUBMITTED = ("tenant", "kind", "scope", "seq", "model", "position", "base")
JOB_FIELDS = (*_SUBMITTED, "release", "attempts", "trace", "digest", "halvings")
FORMAT = 1
UNREADABLE = "?"  # file id of a command that cannot be read: no real id has this form
_FILE_KINDS = (JobKind.SAVE_WEIGHTS, JobKind.LOAD_WEIGHTS, JobKind.SAMPLE)

pack = msgspec.msgpack.encode


def _json(plain: Any) -> str:
    return msgspec.json.encode(plain).decode()


class _Command(msgspec.Struct):
    """The file that a command names, if any; decoding skips the other fields."""

    file_id: str | None = None


# --- records ------------------------------------------------------------------------------------


def record(value: Record, **more: Any) -> dict[str, Any]:
    """Encode a record for a script."""
    fields: list[Any] = []
    for name, plain in msgspec.to_builtins(value).items():
        fields += [name, _json(plain)]
    return {"type": RECORD_NAME[type(value)], "key": value.key, "fields": fields} | more


def listed(name: str) -> str:
    """Return the name of a tenant or a parent in the form that listings have."""
    return _json(name)


def limits(policy: StorePolicy) -> dict[str, Any]:
    """Encode a policy for a script."""
    return dataclasses.asdict(policy) | {"model_window": policy.model_window}


def with_tenant(value: Record) -> dict[str, Any]:
    """Encode a record for a script that counts the records of its tenant and of its parent.

    ``listed`` and ``under`` are the tenant's and the parent's name in the form that listings have.
    """
    names = {"listed": listed(value.tenant), "under": listed(value.parent)}
    return record(value, tenant=value.tenant, **names)


def with_parent(value: Record) -> dict[str, Any]:
    """Encode a record of a session, for a script that has to look at the session."""
    return record(value, parent=value.parent)


def read_record(record_type: type[R], fields: Sequence[bytes]) -> R | None:
    """Decode the record in ``name, JSON text, …``; None without fields."""
    if not fields:
        return None
    pairs = zip(fields[::2], fields[1::2], strict=True)
    body = b",".join(b'"' + name + b'":' + text for name, text in pairs)
    return msgspec.json.decode(b"{" + body + b"}", type=record_type)


def listing(tenant: str | None, parent: str | None) -> str:
    """Return the end of a listing's key."""
    if tenant is None and parent is None:
        return ""
    names = [_json(name) for name in (tenant, parent) if name is not None]
    which = "b" if len(names) == 2 else "p" if tenant is None else "t"
    return f":{which}{''.join(names)}"


_TYPES = {record_type: typing.get_type_hints(record_type) for record_type in RECORD_NAME}


def update(change: Update) -> dict[str, Any]:
    """Encode an update for a script. Raises ``ValueError`` if it does not fit its record."""
    record_type = RECORD_TYPES[change.record]
    known = {field.name for field in dataclasses.fields(record_type)} - {"key"}
    if unknown := (change.changes.keys() | change.entries.keys()) - known:
        raise ValueError(
            f"a {change.record} has no changeable field {sorted(unknown)}; fields: {sorted(known)}"
        )
    fields: list[Any] = []
    for name, value in change.changes.items():
        plain = msgspec.to_builtins(value)
        try:
            msgspec.convert(plain, type=_TYPES[record_type][name])
        except msgspec.ValidationError as error:
            raise ValueError(f"{name} of a {change.record}: {error}") from error
        fields += [name, _json(plain)]
    found: dict[str, Any] = {"type": change.record, "key": change.key, "fields": fields}
    found["entries"] = [  # the field, entries to set, and entries to remove
        [name, {k: v for k, v in of.items() if v is not None}, [k for k in of if of[k] is None]]
        for name, of in change.entries.items()
    ]
    status = change.changes.get("status") if record_type is ModelRecord else None
    if status == ModelStatus.FAILED:
        found["ends"] = {"status": '"failed"'} | rejection(refusals.failed(change.key))
    elif status == ModelStatus.LOST:
        found["ends"] = {"status": '"lost"'} | rejection(refusals.lost(change.key))
    return found


def rejection(of: Rejection) -> dict[str, Any]:
    return {"error": of.message, "category": of.category}


# --- jobs ---------------------------------------------------------------------------------------


def job(new: Job, request_id: str) -> dict[str, Any]:
    """Encode a job to submit; its payload goes beside it."""
    fields: list[Any] = ["tenant", new.tenant, "kind", new.kind.value, "scope", new.scope]
    fields += ["seq", str(new.seq), "base", new.base_model]
    if new.model_id is not None:
        fields += ["model", new.model_id]
    if new.position is not None:
        fields += ["position", new.position]
    if new.trace:
        fields += ["trace", new.trace]
    snapshot = None
    if new.kind == JobKind.SAMPLE and new.rejection is None:
        snapshot, sequences = snapshot_and_sequences(new.payload)
        fields += ["sequences", sequences]
    found: dict[str, Any] = {
        "id": request_id,
        "tenant": new.tenant,
        "kind": new.kind.value,
        "scope": new.scope,
        "seq": str(new.seq),
        "model": new.model_id,
        "position": None if new.model_id is None else new.position,
        "base": new.base_model,
        "file": _file_of(new),
        "snapshot": snapshot,
        "fields": fields,
    }
    if new.saves is not None:
        found |= {"saves": dataclasses.asdict(new.saves) | {"listed": listed(new.tenant)}}
    found |= {} if new.rejection is None else rejection(new.rejection)
    return {name: value for name, value in found.items() if value is not None}


def _file_of(new: Job) -> str | None:
    """Return the id of the file that a job reads or writes, if any."""
    if new.kind not in _FILE_KINDS:
        return None
    try:
        return msgspec.msgpack.decode(new.payload, type=_Command).file_id
    except msgspec.DecodeError:
        return UNREADABLE


def read_job(row: Sequence[Any]) -> Job:
    """Decode the job in ``id, *JOB_FIELDS, payload``."""
    request_id, tenant, kind, scope, seq, model, position, base, *rest = row
    release, attempts, trace, *_ = rest
    return Job(
        tenant=tenant.decode(),
        kind=JobKind(kind.decode()),
        scope=scope.decode(),
        seq=int(seq),
        payload=row[-1],
        model_id=None if model is None else model.decode(),
        position=None if position is None else int(position),
        base_model=base.decode(),
        request_id=request_id.decode(),
        release=int(release),
        attempts=int(attempts or 0),
        trace=(trace or b"").decode(),
    )


def read_entry(row: Sequence[Any]) -> LogEntry:
    digest, halvings = row[-3:-1]
    return LogEntry(read_job(row), bytes.fromhex(digest.decode()), int(halvings))


# --- outcomes -----------------------------------------------------------------------------------


def outcome(result: Outcome) -> dict[str, Any]:
    """Encode an outcome to store; its body goes beside it."""
    found: dict[str, Any] = {"id": result.request_id, "ctype": result.content_type}
    found["updates"] = [update(change) for change in result.updates]
    if result.usage is not None:
        totals = Totals.from_usage(result.usage)
        found["usage"] = _json(result.usage)
        found["sums"] = {name: getattr(totals, name) for name in TOTALLED}
    if result.point is not None:
        kind, position = result.point.kind, result.point.position
        found["point"] = {"kind": kind, "position": position, "text": _json(result.point)}
    if result.rejection is not None:
        return found | rejection(result.rejection)
    if result.checkpoint is not None:
        found["checkpoint"] = record(result.checkpoint)
        found["overwrite"] = result.overwrite
        found["exists"] = refusals.checkpoint_exists(result.checkpoint.key).message
    if result.sampler is not None:
        found["sampler"] = with_parent(result.sampler)
    if result.changed:
        found |= {"digest": refusals.digest(result.body).hex(), "halvings": result.halvings}
    return found


def read_outcome(request_id: str, row: Sequence[Any]) -> Outcome | None:
    """Decode the stored outcome; None while there is none.

    Raises ``KeyError`` for an unknown request, and ``ResultDropped``.
    """
    if not row:
        raise KeyError(request_id)
    state, category, content_type, result, *cost = row
    if state == b"expired":
        raise ResultDropped(f"the result of {request_id} was dropped after its retention time")
    if state != b"done":
        return None
    usage = read_usage(*cost)
    if category is not None:
        rejected = Rejection(result.decode(), category.decode())
        return Outcome(request_id, rejection=rejected, usage=usage)
    return Outcome(request_id, result, content_type.decode(), usage=usage)


# --- clients that sample ------------------------------------------------------------------------


def client(of: SamplerClient) -> str:
    """Return the client's name in scripts."""
    return f"{len(of.tenant.encode())}:{of.tenant}{of.number}:{of.scope}"


def client_in_news(of: SamplerClient) -> str:
    """Return the client's name in messages from Redis."""
    return "+" + hashlib.sha1(client(of).encode(), usedforsecurity=False).hexdigest()


def read_completion(row: Sequence[Any]) -> Completion:
    request_id, number, failed, size = row
    return Completion(request_id.decode(), int(number), bool(failed), size)


def read_parts(packed: bytes) -> dict[str, list[EncodedTokenDelta]]:
    """Decode parts of running samples, by the names of their streams."""
    return msgspec.msgpack.decode(packed, type=dict[str, list[EncodedTokenDelta]])


# --- workers ------------------------------------------------------------------------------------


def read_metrics(told: Sequence[bytes]) -> dict[str, dict[str, float]]:
    """Decode the figures of workers in ``name, JSON text, …``."""
    pairs = zip(told[::2], told[1::2], strict=True)
    return {name.decode(): msgspec.json.decode(text) for name, text in pairs}


def read_weights(told: Sequence[bytes]) -> dict[str, float]:
    """Decode the weights of tenants in ``name, JSON text, …``."""
    pairs = zip(told[::2], told[1::2], strict=True)
    return {name.decode(): msgspec.json.decode(text, type=float) for name, text in pairs}


# --- recovery points ----------------------------------------------------------------------------


def point(new: RecoveryPoint) -> bytes:
    """Encode a recovery point; scripts read the position at its start."""
    return str(new.position).encode() + b" " + msgspec.json.encode(new)


def read_point(stored: bytes) -> RecoveryPoint:
    return msgspec.json.decode(stored.partition(b" ")[2], type=RecoveryPoint)


def read_files(
    of_jobs: Iterable[bytes], of_records: Iterable[bytes], points: Iterable[bytes]
) -> set[str]:
    """Return the file ids in use.

    Raises ``ValueError`` for an unreadable command: keeping a file too many is cheaper than losing
    one.
    """
    found: set[str | None] = set()
    for file_id in of_jobs:
        if file_id == UNREADABLE.encode():
            raise ValueError(
                "a queued request names a file in a form that this release cannot read; start the "
                "release that accepted it"
            )
        found.add(file_id.decode())
    found |= {msgspec.json.decode(text, type=str | None) for text in of_records}
    found |= {read_point(each).file_id for each in points}
    return {file_id for file_id in found if file_id is not None}


def check_format(found: bytes | None) -> None:
    """Raise ``StoreUnusable`` for a store of any other format than this release's."""
    if not found:
        raise StoreUnusable(
            "the store in Redis has lost its format and its secret, as after it was wiped while "
            "a service used it; start Redis with the store's data (appendonlydir, from a backup); "
            "or, to begin with a new store, empty this database (FLUSHDB) or choose another (the "
            "number at the end of the address)"
        )
    if found != str(FORMAT).encode():
        raise StoreUnusable(
            f"the store in Redis has format {found.decode()}, this release reads format "
            f"{FORMAT}; start the release that wrote it, or choose another database (the "
            "number at the end of the address)"
        )
