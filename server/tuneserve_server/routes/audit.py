"""The route of the audit log."""

from datetime import UTC, date, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Response

from tuneserve_client.wire import account_types as types
from tuneserve_engine.core.records import AuditRecord
from tuneserve_server.access.audit_log import AuditKind
from tuneserve_server.dependencies import CallerDep, reply

router = APIRouter()

MOST_ENTRIES = 5000

Day = Annotated[date | None, Query(description="A day in UTC; without it, today.")]


@router.get("/audit", response_model=types.AuditLogResponse)
async def audit(caller: CallerDep, event_type: AuditKind = "all", day: Day = None) -> Response:
    """Return the events of a day: of all tenants for an admin key, of the caller in open mode.

    They are about keys and tenants (`organizations`), checkpoints and projects; there are no teams.
    """
    events = await caller.audit.events_of_day(
        *(caller.watched, day or caller.audit.today, event_type, MOST_ENTRIES)
    )
    return reply(types.AuditLogResponse(entries=[_entry(each) for each in events]))


def _entry(event: AuditRecord) -> types.AuditLogEntry:
    path = event.details.get("tinker_path")
    return types.AuditLogEntry(
        timestamp=datetime.fromtimestamp(event.created_s, UTC),
        event=event.event,
        event_details=event.details,
        model_id=path.removeprefix("tinker://").partition("/")[0] if path else None,
        tinker_path=path,
        purpose=event.details.get("purpose"),
    )
