"""Limits in SQLite: running counts of unfinished jobs, and the checks that refuse new ones."""

from tuneserve_engine.core.jobs import Job, Rejection
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.core.records import (
    RECORD_NAME,
    Record,
    SamplerRecord,
    SessionRecord,
    TenantRecord,
)
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import CheckpointUsage, R
from tuneserve_engine.store.sqlite import records
from tuneserve_engine.store.sqlite.group_commit import Row, Transaction
from tuneserve_engine.store.sqlite.schema import (
    EXPIRES,
    IS_OPEN,
    IS_SAVE,
    SAVES,
    SAVING,
    SIZE,
    UNFINISHED,
)

TENANT = "tenant "
"""The prefix of the tenants' scopes in ``counts``."""

_SERVER = "server"


def count(tx: Transaction, tenant: str, model_id: str | None, jobs: int, size: int) -> None:
    """Add to the counts of unfinished jobs and bytes of the server, the tenant and the model."""
    tx.execute(
        "INSERT INTO counts VALUES (?, ?, ?), (?, ?, ?) ON CONFLICT (scope) DO UPDATE SET "
        "jobs = jobs + excluded.jobs, bytes = bytes + excluded.bytes",
        *(_SERVER, jobs, size),
        *(f"{TENANT}{tenant}", jobs, size),
    )
    if model_id is not None:
        tx.execute(
            "UPDATE lanes SET jobs = jobs + ?, bytes = bytes + ? WHERE model_id = ?",
            jobs,
            size,
            model_id,
        )


def check_jobs(tx: Transaction, job: Job, policy: StorePolicy) -> None:
    """Raise ``LimitReached`` if a limit leaves no room for the job.

    A tenant's or a model's limit does not apply to a job that the model's other jobs wait for.
    """
    own = records.get_record(tx, TenantRecord, job.tenant)
    own_jobs = None if own is None else own.max_jobs
    tenant_jobs = policy.tenant_jobs if own_jobs is None else own_jobs
    held = "SELECT jobs, bytes FROM counts WHERE scope = ?"
    of_server = tx.execute(held, _SERVER).fetchone()
    of_tenant = tx.execute(held, f"{TENANT}{job.tenant}").fetchone()
    scopes = [
        ("the server", of_server, policy.server_jobs, policy.server_bytes, 10),
        ("your key", of_tenant, tenant_jobs, policy.tenant_bytes, 5),
    ]
    if job.model_id is not None:
        held = "SELECT jobs, bytes FROM lanes WHERE model_id = ?"
        of_model = tx.execute(held, job.model_id).fetchone()
        model = f"model {job.model_id}"
        scopes.append((model, of_model, policy.model_jobs, policy.model_bytes, 2))

    size = len(job.payload)
    for whose, counted, most_jobs, most_bytes, retry_after_s in scopes:
        held_jobs, held_bytes = counted or (0, 0)
        if held_jobs >= most_jobs:
            full = refusals.too_many_jobs(whose, most_jobs, retry_after_s)
        elif held_jobs and held_bytes + size > most_bytes:
            full = refusals.too_many_bytes(whose, size, held_bytes, most_bytes, retry_after_s)
        else:
            continue
        if whose == "the server" or not _is_awaited(tx, job):
            raise full
        return


def count_refusal(tx: Transaction, job: Job, why: Rejection, policy: StorePolicy) -> None:
    """Count a job that ends at once. Raises ``LimitReached`` if its tenant had too many."""
    scope = f"refusals {job.tenant}"
    row = tx.execute("SELECT bytes FROM counts WHERE scope = ?", scope).fetchone()
    level_s, wait_s = refusals.level_of_refusals(0.0 if row is None else row[0], tx.now_s, policy)
    if wait_s > 0 and not _is_awaited(tx, job):
        raise refusals.too_many_refusals(why, policy.tenant_refusals, wait_s)
    tx.execute(
        "INSERT INTO counts VALUES (?, 0, ?) ON CONFLICT (scope) DO UPDATE SET "
        "bytes = excluded.bytes",
        scope,
        level_s,
    )


def _is_awaited(tx: Transaction, job: Job) -> bool:
    """Return whether all unfinished jobs of the model wait for this one.

    Without this job, none of them would ever end.
    """
    if job.model_id is None or job.position is None:
        return False
    of_model = "AND model_id = :model_id"
    row = tx.execute(
        f"SELECT EXISTS (SELECT 1 FROM jobs WHERE {UNFINISHED} AND state = 'held' {of_model}), "
        f"EXISTS (SELECT 1 FROM jobs WHERE {UNFINISHED} AND state = 'ready' {of_model}), "
        "(SELECT next FROM lanes WHERE model_id = :model_id)",
        model_id=job.model_id,
    ).fetchone()
    return bool(row == (1, 0, job.position))


def no_room_to_keep(
    tx: Transaction, tenant: str, key: str, policy: StorePolicy
) -> Rejection | None:
    """Return why the tenant has no room for a save with this key; None if it has."""
    own = records.get_record(tx, TenantRecord, tenant)
    most = refusals.most_kept(own, policy)
    return refusals.keeps_too_much(kept(tx, tenant, key), most)


def kept(tx: Transaction, tenant: str, key: str) -> CheckpointUsage:
    """Return what the tenant keeps or is about to keep, except the record of this key."""
    rows = [
        tx.execute(
            f"SELECT COUNT(*), TOTAL({size}) FROM {table} WHERE {where}", tenant, *values
        ).fetchone()
        for size, table, where, values in (
            (
                SIZE,
                "records",
                f"{_KEPT} AND key != ? AND IFNULL({EXPIRES} > ?, 1)",
                (key, tx.now_s),
            ),
            (SIZE, SAVES, f"tenant = ? AND {IS_SAVE} AND key != ?", (key,)),
            ("saves", "jobs", f"tenant = ? AND {SAVING}", ()),
        )
    ]
    counts, sizes = zip(*filter(None, rows), strict=True)
    return CheckpointUsage(sum(counts), int(sum(sizes)), counts[-1])


_KEPT = "tenant = ? AND type = 'checkpoint'"


def must_wait(tx: Transaction, job: Job, policy: StorePolicy) -> bool:
    """Return whether the new model of this job has to wait for room.

    Raises ``LimitReached`` if as many of the tenant's models wait as may.
    """
    waiting = len(tx.execute(_WAITING, job.tenant).fetchall())
    if not waiting and make_room(tx, job.tenant, policy):
        return False
    if waiting >= policy.waiting_models or job.position is None:
        raise refusals.too_many_models(_most_models(tx, job.tenant, policy), waiting)
    return True


def make_room(tx: Transaction, tenant: str, policy: StorePolicy) -> bool:
    """Return whether the tenant may have one more model in use.

    If the tenant has as many as it may, marks the longest idle ones to be parked. Returns False and
    marks none if too few are idle.
    """
    surplus = len(tx.execute(_IN_USE, tenant).fetchall()) - _most_models(tx, tenant, policy) + 1
    if surplus <= 0:
        return True
    idle = tx.execute(
        f"{_IN_USE} AND jobs = 0 ORDER BY requested_s LIMIT ?", tenant, surplus
    ).fetchall()
    if len(idle) < surplus:
        return False
    for (model_id,) in idle:
        tx.execute("UPDATE lanes SET park = 1 WHERE model_id = ?", model_id)
    return True


def waiting_models(tx: Transaction) -> list[Row]:
    """Return tenant, id and first position of the models that wait for room, oldest first."""
    found = tx.execute(
        "SELECT n, jobs.tenant, model_id, position FROM jobs INDEXED BY jobs_unfinished "
        f"JOIN lanes USING (model_id) WHERE {UNFINISHED} AND {_WAITS}"
    ).fetchall()
    return [row[1:] for row in sorted(found)]


def _most_models(tx: Transaction, tenant: str, policy: StorePolicy) -> int:
    own = records.get_record(tx, TenantRecord, tenant)
    models = own.max_models if own is not None else None
    return policy.tenant_models if models is None else models


_WAITS = "state = 'held' AND position = lanes.next"
"""The condition for a job that is held although no position before it is missing."""

_LANE_WAITS = f"EXISTS (SELECT 1 FROM jobs WHERE jobs.model_id = lanes.model_id AND {_WAITS})"

_WAITING = (
    "SELECT model_id FROM lanes WHERE tenant = ? AND (worker IS NOT NULL OR jobs > 0) "
    f"AND {_LANE_WAITS}"
)
"""The models of a tenant that wait for room."""

_IN_USE = (
    "SELECT model_id FROM lanes CROSS JOIN records ON type = 'model' AND key = model_id "
    "WHERE lanes.tenant = ? AND (worker IS NOT NULL OR jobs > 0) AND park = 0 "
    f"AND json_extract(body, '$.status') IN ('creating', 'ready') AND NOT {_LANE_WAITS}"
)
"""The models of a tenant in use: not ended, not parked or about to be, and not waiting."""


def put_new(tx: Transaction, policy: StorePolicy, new: R) -> R:
    """Insert the record if its key is new; return the stored record.

    Raises ``LimitReached`` if the tenant may not create one more now.
    """
    stored = records.get_record(tx, type(new), new.key)
    if stored is not None:
        return stored
    _check_record(tx, new, policy)
    records.put_record(tx, new)
    return new


def _check_record(tx: Transaction, new: Record, policy: StorePolicy) -> None:
    if isinstance(new, SessionRecord):
        of_all = f"SELECT COUNT(*) FROM records WHERE type = 'session' AND {IS_OPEN} = 1"
        row = tx.execute(f"SELECT ({of_all}), ({of_all} AND tenant = ?)", new.tenant).fetchone()
        assert row is not None
        refusals.check_sessions(row[0], row[1], policy)
    if isinstance(new, SamplerRecord):
        of = "SELECT COUNT(*) FROM records WHERE type = 'sampler' AND"
        row = tx.execute(
            f"SELECT ({of} parent = ?), ({of} tenant = ?)", new.parent, new.tenant
        ).fetchone()
        assert row is not None
        refusals.check_samplers(new.parent, row[0], row[1], policy)
    if rate := refusals.rate_of(new, policy):
        row = tx.execute(
            "SELECT json_extract(body, '$.created_s') FROM records WHERE type = ? AND tenant = ? "
            "ORDER BY n DESC LIMIT 1 OFFSET ?",
            RECORD_NAME[type(new)],
            new.tenant,
            rate - 1,
        ).fetchone()
        if row is not None:
            refusals.check_rate(new, policy, tx.now_s - row[0])
