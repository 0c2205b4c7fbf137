"""The decoding of usage in Redis: sums by day, curves, and single requests with their costs."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tuneserve_engine.core.jobs import JobKind
from tuneserve_engine.core.usage import CurvePoint, TenantUsage, Totals, Usage
from tuneserve_engine.store.base import KeptRequest, RequestState


def read_usage(text: bytes | None, created: bytes | None, finished: bytes | None) -> Usage | None:
    if not text:
        return None
    total_s = float(finished or 0) - float(created or finished or 0)
    usage = msgspec.json.decode(text, type=Usage)
    return dataclasses.replace(usage, total_s=max(total_s, 0.0))


def read_request(row: Sequence[Any]) -> RequestState | None:
    tenant, kind, scope, state, category, *cost = row
    if tenant is None:
        return None
    found = RequestState(tenant.decode(), JobKind(kind.decode()), scope.decode(), state.decode())
    if found.state == "expired":
        return found
    return dataclasses.replace(found, failed=category is not None, usage=read_usage(*cost))


def read_kept_request(key: tuple[int, str], row: Sequence[Any]) -> KeptRequest | None:
    """Decode the request with this number and id; None if it is forgotten or its result dropped."""
    kind, state, category, *cost = row
    if state is None or state == b"expired":
        return None
    seq, request_id = key
    _, created, finished = cost
    began_s = float(created or finished)  # a request that was rejected at once has its end only
    return KeptRequest(
        *(request_id, JobKind(kind.decode()), seq, state.decode(), began_s),
        finished_s=None if finished is None else float(finished),
        failed=category is not None,
        usage=read_usage(*cost),
    )


def read_sums(tenant: bytes, days: Iterable[Sequence[bytes]]) -> TenantUsage:
    """Add up the sums of each day, in ``"what name", number, …``, by name."""
    sums: dict[str, dict[str, float]] = {}
    for rows in days:
        for key, number in zip(rows[::2], rows[1::2], strict=True):
            what, name = key.decode().split(" ", 1)
            of_name = sums.setdefault(name, {})
            of_name[what] = of_name.get(what, 0.0) + float(number)
    found = {name: _totals(sums[name]) for name in sorted(sums)}
    return TenantUsage(tenant.decode(), found)


def _totals(sums: dict[str, float]) -> Totals:
    whole = {name: int(value) for name, value in sums.items() if name not in ("device_s", "flops")}
    return Totals(**(sums | whole))  # type: ignore[arg-type]


def read_curve_point(stored: bytes) -> CurvePoint:
    _, time_s, text = stored.split(b" ", 2)
    point = msgspec.json.decode(text, type=CurvePoint)
    return dataclasses.replace(point, time_s=float(time_s))
