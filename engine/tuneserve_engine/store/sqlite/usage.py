"""Usage in SQLite: the cost of each request, sums by day, and the points of curves."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add

import msgspec

from tuneserve_engine.core.jobs import JobKind, Outcome
from tuneserve_engine.core.usage import (
    DAY_S,
    MOST_POINTS,
    TOTALLED,
    CurvePoint,
    TenantUsage,
    Totals,
    Usage,
    day_of,
    stride,
)
from tuneserve_engine.store.base import KeptRequest, RequestState, StoreStats
from tuneserve_engine.store.sqlite.group_commit import Transaction
from tuneserve_engine.store.sqlite.limits import TENANT
from tuneserve_engine.store.sqlite.schema import UNFINISHED

_SUMS = ", ".join(TOTALLED)
_ADDED = ", ".join(f"{name} = {name} + excluded.{name}" for name in TOTALLED)


def decoded(text: str | None, created_s: float, finished_s: float | None) -> Usage | None:
    if text is None:
        return None
    usage = msgspec.json.decode(text, type=Usage)
    return replace(usage, total_s=max((finished_s or created_s) - created_s, 0.0))


def comes_late(tx: Transaction, outcome: Outcome) -> bool:
    """Note the usage of a job that ended without its worker, for example a cancelled sample.

    Returns whether the usage was new: a worker reports it again if a connection breaks.
    """
    if outcome.usage is None:
        return False
    noted = tx.execute(
        f"UPDATE jobs SET usage = ? WHERE request_id = ? AND usage IS NULL AND NOT {UNFINISHED}",
        msgspec.json.encode(outcome.usage).decode(),
        outcome.request_id,
    ).rowcount
    return noted > 0


def add_usage(tx: Transaction, spent: Mapping[tuple[str, str], Sequence[Usage]]) -> None:
    """Add usage to today's sums, by tenant and name of the model (or base model)."""
    day = day_of(tx.now_s)
    marks = ", ".join("?" * (3 + len(TOTALLED)))
    for (tenant, name), costs in spent.items():
        # ``sum`` rounds in another way since Python 3.12.
        sums = [reduce(add, (getattr(each, of) for each in costs)) for of in TOTALLED[1:]]
        tx.execute(
            f"INSERT INTO usage (tenant, day, name, {_SUMS}) VALUES ({marks}) "
            f"ON CONFLICT (tenant, day, name) DO UPDATE SET {_ADDED}",
            *(tenant, day, name, len(costs), *sums),
        )


def usage(
    tx: Transaction, tenant: str | None, since_s: float, before_s: float
) -> list[TenantUsage]:
    of_tenant, values = ("", []) if tenant is None else ("AND tenant = ?", [tenant])
    sums = ", ".join(f"SUM({each})" for each in TOTALLED)
    found: dict[str, TenantUsage] = {}
    for name, model, *numbers in tx.execute(
        f"SELECT tenant, name, {sums} FROM usage WHERE day >= ? AND day * {DAY_S} < ? "
        f"{of_tenant} GROUP BY tenant, name ORDER BY tenant, name",
        day_of(since_s),
        before_s,
        *values,
    ).fetchall():
        found.setdefault(name, TenantUsage(name)).by_model[model] = Totals(*numbers)
    return list(found.values())


def draw(tx: Transaction, model_id: str, point: CurvePoint) -> None:
    """Add the point to the model's curve, and drop every second point when the curve is full.

    The newest point is kept, whatever its number, until the next one comes.
    """
    row = tx.execute(
        "INSERT INTO curves VALUES (?, ?, 1) "
        "ON CONFLICT (model_id, kind) DO UPDATE SET points = points + 1 RETURNING points",
        model_id,
        point.kind,
    ).fetchone()
    assert row is not None
    n = row[0] - 1
    if n and (n - 1) % stride(n):
        tx.execute(
            "DELETE FROM curve_points WHERE model_id = ? AND kind = ? AND n = ?",
            *(model_id, point.kind, n - 1),
        )
    text = msgspec.json.encode(replace(point, time_s=tx.now_s)).decode()
    tx.execute(
        "INSERT INTO curve_points VALUES (?, ?, ?, ?, ?)",
        *(model_id, point.kind, n, point.position, text),
    )
    if n >= MOST_POINTS and stride(n) != stride(n - 1):
        tx.execute(
            "DELETE FROM curve_points WHERE model_id = ? AND kind = ? AND n % ?",
            *(model_id, point.kind, stride(n)),
        )


def curve(tx: Transaction, model_id: str, after: int) -> list[CurvePoint]:
    rows = tx.execute(
        "SELECT point FROM curve_points WHERE model_id = ? AND position > ? ORDER BY position",
        model_id,
        after,
    ).fetchall()
    return [msgspec.json.decode(text, type=CurvePoint) for (text,) in rows]


def request(tx: Transaction, request_id: str) -> RequestState | None:
    row = tx.execute(
        "SELECT tenant, kind, scope, state, error IS NOT NULL, created_s, finished_s, usage "
        "FROM jobs WHERE request_id = ?",
        request_id,
    ).fetchone()
    if row is None:
        return None
    tenant, kind, scope, state, failed, created_s, finished_s, text = row
    found = RequestState(tenant, JobKind(kind), scope, state)
    if state == "expired":
        return found
    usage = decoded(text, created_s, finished_s)
    return replace(found, failed=bool(failed), usage=usage)


def kept_requests(tx: Transaction, tenant: str, scope: str, limit: int) -> list[KeptRequest]:
    """Return as ``Store.kept_requests`` does; reads ``limit`` rows, in the order of an index."""
    rows = tx.execute(
        "SELECT request_id, kind, seq, state, created_s, finished_s, error IS NOT NULL, usage "
        "FROM jobs WHERE tenant = ? AND scope = ? ORDER BY seq DESC LIMIT ?",
        *(tenant, scope, limit),
    ).fetchall()
    return [
        KeptRequest(
            *(request_id, JobKind(kind), seq, state, created_s, finished_s, bool(failed)),
            usage=decoded(usage, created_s, finished_s),
        )
        for request_id, kind, seq, state, created_s, finished_s, failed, usage in reversed(rows)
        if state != "expired"
    ]


def store_stats(tx: Transaction) -> StoreStats:
    tenants: Counter[str] = Counter()
    for scope, jobs in tx.execute("SELECT scope, jobs FROM counts WHERE jobs > 0").fetchall():
        if scope.startswith(TENANT):
            tenants[scope.removeprefix(TENANT)] = jobs
    row = tx.execute(
        "SELECT (SELECT COUNT(*) FROM jobs WHERE digest IS NOT NULL), (SELECT COUNT(*) FROM points)"
    ).fetchone()
    assert row is not None
    logged, points = row
    busy = tx.execute("SELECT model_id FROM lanes INDEXED BY lanes_in_use WHERE jobs > 0")
    return StoreStats(dict(tenants), logged, points, frozenset(each for (each,) in busy.fetchall()))
