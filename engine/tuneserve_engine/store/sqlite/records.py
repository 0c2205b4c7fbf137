"""Records in SQLite: one table for all types, with the record itself as JSON. Also the store's own
few values (``meta``)."""

import dataclasses
from contextlib import suppress

import msgspec

from tuneserve_engine.core.records import (
    RECORD_NAME,
    RECORD_TYPES,
    ModelRecord,
    Record,
    SamplerRecord,
    Update,
)
from tuneserve_engine.store.base import Page, R
from tuneserve_engine.store.refusals import ALIVE
from tuneserve_engine.store.sqlite.group_commit import Transaction
from tuneserve_engine.store.sqlite.schema import IS_SAVE, SAVES


def next_of(tx: Transaction, name: str) -> int:
    """Increase a counter by one and return its new value."""
    row = tx.execute(
        "UPDATE meta SET value = value + 1 WHERE name = ? RETURNING value", name
    ).fetchone()
    assert row is not None
    return int(row[0])


def put_record(tx: Transaction, record: Record) -> None:
    """Insert or replace the record; a replaced record keeps its place in listings."""
    tx.execute(
        "INSERT INTO records (type, key, tenant, parent, body) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (type, key) DO UPDATE SET "
        "tenant = excluded.tenant, parent = excluded.parent, body = excluded.body",
        RECORD_NAME[type(record)],
        record.key,
        record.tenant,
        record.parent,
        msgspec.json.encode(record).decode(),
    )


def get_record(tx: Transaction, record_type: type[R], key: str) -> R | None:
    row = tx.execute(
        "SELECT body FROM records WHERE type = ? AND key = ?", RECORD_NAME[record_type], key
    ).fetchone()
    return None if row is None else msgspec.json.decode(row[0], type=record_type)


def delete_record(tx: Transaction, record_type: type[R], key: str) -> None:
    tx.execute("DELETE FROM records WHERE type = ? AND key = ?", RECORD_NAME[record_type], key)


def page_of_records(
    tx: Transaction,
    record_type: type[R],
    tenant: str | None = None,
    parent: str | None = None,
    window: tuple[int | None, int] = (None, 0),
) -> Page[R]:
    """Return a page of records, newest first; ``window`` is (limit, offset)."""
    where, values = "type = ?", [RECORD_NAME[record_type]]
    for column, value in (("tenant", tenant), ("parent", parent)):
        if value is not None:
            where += f" AND {column} = ?"
            values.append(value)
    limit, offset = window
    rows = tx.execute(
        f"SELECT body FROM records WHERE {where} ORDER BY n DESC LIMIT ? OFFSET ?",
        *values,
        -1 if limit is None else limit,
        offset,
    ).fetchall()
    count = tx.execute(f"SELECT COUNT(*) FROM records WHERE {where}", *values).fetchone()
    assert count is not None
    return Page([msgspec.json.decode(body, type=record_type) for (body,) in rows], count[0])


def unnamed_saves(tx: Transaction, tenant: str) -> list[SamplerRecord]:
    rows = tx.execute(f"SELECT body FROM {SAVES} WHERE tenant = ? AND {IS_SAVE}", tenant).fetchall()
    return [msgspec.json.decode(body, type=SamplerRecord) for (body,) in rows]


class Command(msgspec.Struct):
    """The file that a command names, if any; decoding skips the other fields."""

    file_id: str | None = None


def release(tx: Transaction, file_id: str | None) -> None:
    """Note a file that no record will name. Triggers note the files of deleted records."""
    if file_id is not None:
        tx.execute("INSERT OR IGNORE INTO released VALUES (?)", file_id)


def release_file_of(tx: Transaction, job: int) -> None:
    """Note the file that the save with this row number was to write, and may have written."""
    with suppress(msgspec.MsgspecError):
        for (payload,) in tx.execute("SELECT payload FROM payloads WHERE job = ?", job).fetchall():
            release(tx, msgspec.msgpack.decode(payload, type=Command).file_id)


def weights(tx: Transaction) -> dict[str, float]:
    """Return the weights of the tenants that have one of their own."""
    rows = tx.execute(
        "SELECT key, json_extract(body, '$.weight') FROM records WHERE type = 'tenant'"
    ).fetchall()
    return {tenant: float(weight) for tenant, weight in rows if weight is not None}


def update_record(tx: Transaction, change: Update) -> Record | None:
    """Update a record and return it; None if it does not exist.

    A model that has ended, failed or was lost keeps that status: its worker may report the creation
    after the session is over.
    """
    record_type = RECORD_TYPES[change.record]
    stored = get_record(tx, record_type, change.key)
    if stored is None:
        return None
    known = {field.name for field in dataclasses.fields(record_type)} - {"key"}
    if unknown := (change.changes.keys() | change.entries.keys()) - known:
        raise ValueError(
            f"a {change.record} has no changeable field {sorted(unknown)}; fields: {sorted(known)}"
        )
    changes = dict(change.changes)
    if isinstance(stored, ModelRecord) and stored.status not in ALIVE:
        changes.pop("status", None)
    for name, entries in change.entries.items():
        mixed = {**getattr(stored, name), **entries}
        changes[name] = {key: text for key, text in mixed.items() if text is not None}
    merged = msgspec.to_builtins(stored) | msgspec.to_builtins(changes)
    record = msgspec.convert(merged, type=record_type)
    put_record(tx, record)
    return record
