"""Usage and storage in the form of the SDK's billing calls. Nothing has a price here.

The store has sums of usage by day (UTC), so the buckets are days. A bucket belongs to the window
that its start is in: windows that do not overlap never count a token twice.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query, Response

from tuneserve_client.wire import account_types as types
from tuneserve_engine.core.records import CheckpointRecord, SessionRecord
from tuneserve_engine.core.usage import DAY_S, TenantUsage, Totals
from tuneserve_server.dependencies import Caller, CallerDep, reply
from tuneserve_server.errors import BadRequest
from tuneserve_server.http.openapi import fails
from tuneserve_server.projects import ProjectNames, all_records
from tuneserve_server.routes.listings import live

router = APIRouter()

LONGEST = timedelta(days=14)
_GIGABYTE = 1e9
_HOUR_S = 3600

Start = Annotated[
    datetime, Query(description="The start of the window: a full hour (UTC), not in the future.")
]
End = Annotated[
    datetime, Query(description="The end of the window: a full hour, at most 14 days later.")
]
Project = Annotated[str | None, Query(max_length=256)]


@router.get(
    "/billing/usage/events",
    response_model=types.BillingUsageResponse,
    responses=fails(BadRequest),
)
async def usage_events(caller: CallerDep, starting_on: Start, ending_before: End) -> Response:
    """Return the tokens of each day that starts in the window, by model and kind.

    Covers the caller's requests, or those of all tenants for an admin key. Costs are absent.
    """
    start_s, end_s = _checked_window(starting_on, ending_before)
    attribution = _Attribution(caller, ProjectNames(caller.store), {})
    events: list[types.BillingUsageEvent] = []
    for day in range(math.ceil(start_s / DAY_S), math.ceil(end_s / DAY_S)):
        used = await caller.store.usage(caller.watched, day * DAY_S, (day + 1) * DAY_S)
        of_day = [
            event
            for of_tenant in used
            for name, totals in of_tenant.by_model.items()
            for event in await attribution.events(day, of_tenant, name, totals)
        ]
        events += sorted(of_day, key=lambda each: -each.event_info.token_count)
    sessions = {
        key: types.BillingUsageSession(user_metadata=session.user_metadata)
        for key, session in attribution.sessions.items()
        if session is not None
    }
    return reply(types.BillingUsageResponse(data=events, sessions=sessions))


def _checked_window(starting_on: datetime, ending_before: datetime) -> tuple[float, float]:
    """Return both ends in unix seconds; an end without a time zone is in UTC."""
    ends = [
        each if each.tzinfo is not None else each.replace(tzinfo=UTC)
        for each in (starting_on, ending_before)
    ]
    start_s, end_s = (each.timestamp() for each in ends)
    if start_s % _HOUR_S or end_s % _HOUR_S:
        raise BadRequest("starting_on and ending_before must be full hours in UTC; round them")
    if not 0 < end_s - start_s <= LONGEST.total_seconds():
        raise BadRequest(
            "ending_before must be after starting_on, and at most 14 days after it; ask for a "
            "longer time in parts"
        )
    if ends[0] > datetime.now(UTC):
        raise BadRequest("starting_on is in the future; the newest usage is of the current hour")
    return start_s, end_s


@dataclass(frozen=True)
class _Attribution:
    """The models and sessions that usage belongs to, each read once."""

    caller: Caller
    names: ProjectNames
    sessions: dict[str, SessionRecord | None]

    async def events(
        self, day: int, used: TenantUsage, name: str, totals: Totals
    ) -> list[types.BillingUsageEvent]:
        """Return the events of a day's usage of a model, or of samples from a base model."""
        start = datetime.fromtimestamp(day * DAY_S, UTC)
        key, is_model, _ = name.partition(":train:")
        model = await self.names.model(name) if is_model else None
        if is_model and key not in self.sessions:
            self.sessions[key] = await self.caller.store.get_record(SessionRecord, key)
        base_model = None if model is None else model.base_model
        return [
            types.BillingUsageEvent(
                bucket_start=start,
                bucket_end=start + timedelta(days=1),
                base_model=base_model if is_model else name,
                user_id=used.tenant,
                session_id=key if is_model else None,
                project_id=None if model is None else model.project_id,
                event_info=info,
            )
            for info in _infos(totals)
        ]


def _infos(totals: Totals) -> Iterator[types.BillingInfo]:
    """Yield the kinds of tokens that were used."""
    if totals.trained_tokens:
        yield types.BillingInfo(type="training", token_count=totals.trained_tokens)
    if totals.prompt_tokens:
        yield types.BillingInfo(
            type="sampling_prefill", token_count=totals.prompt_tokens, cached=False
        )
    if totals.sampled_tokens:
        yield types.BillingInfo(type="sampling_sample", token_count=totals.sampled_tokens)


@router.get("/billing/usage/checkpoints/current", response_model=types.CheckpointStorageResponse)
async def checkpoint_storage(caller: CallerDep, project_id: Project = None) -> Response:
    """Return the number and size of the kept checkpoints, by project and tenant.

    Covers the caller's checkpoints, or those of all tenants for an admin key.
    """
    names = ProjectNames(caller.store)
    kept: dict[tuple[str, str | None], list[int]] = {}
    async for checkpoint in all_records(caller.store, CheckpointRecord, caller.watched):
        project = await names.project_of(checkpoint)
        if live([checkpoint]) and project_id in (None, project):
            kept.setdefault((checkpoint.tenant, project), []).append(checkpoint.size_bytes)
    data = [
        types.CheckpointStorage(
            project_id=project,
            org_user_urn=tenant,
            checkpoint_count=len(sizes),
            size_bytes=sum(sizes),
            size_gigabytes=sum(sizes) / _GIGABYTE,
        )
        for (tenant, project), sizes in sorted(kept.items(), key=lambda item: str(item[0]))
    ]
    return reply(types.CheckpointStorageResponse(data=data))
