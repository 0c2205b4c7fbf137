"""The search of sessions, newest first."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from fastapi import APIRouter, Response

from tuneserve_client.wire import account_types as types
from tuneserve_engine.core.records import CheckpointRecord, SessionRecord
from tuneserve_server.dependencies import Caller, CallerDep, SentJsonDep, reply
from tuneserve_server.errors import BadRequest
from tuneserve_server.http.openapi import fails, takes
from tuneserve_server.projects import all_records
from tuneserve_server.routes.listings import live

router = APIRouter()

_SKEW_S = 60.0
"""Sessions are read in the order in which they were stored: at most so much from that of their
times, which several processes give."""

Place = tuple[datetime, str]
"""The place of a session in the results: its creation and its id."""


@router.post(
    "/sessions/search",
    response_model=types.SessionSearchResponse,
    openapi_extra=takes(types.SessionSearchRequest),
    responses=fails(BadRequest),
)
async def search_sessions(caller: CallerDep, sent: SentJsonDep) -> Response:
    """Search sessions by id, project, metadata, name, owner and status.

    An admin key finds those of all tenants, if it asks for another owner than itself.
    """
    request = await sent.parsed(types.SessionSearchRequest)
    found = await _found(caller, request)
    shown = found[: request.limit]
    summaries = await _summaries(caller, shown)
    following = None
    if len(found) > request.limit:
        created_at, session_id = _place(shown[-1])
        following = types.SearchCursorResponse(
            last_created_at=created_at, last_session_id=session_id
        )
    return reply(types.SessionSearchResponse(sessions=summaries, next_cursor=following))


async def _found(caller: Caller, request: types.SessionSearchRequest) -> list[SessionRecord]:
    """Return the sessions of a page in order, and one more if there are more."""
    before: Place | None = None
    if (cursor := request.cursor) is not None:
        before = _utc(cursor.last_created_at), cursor.last_session_id
    is_wanted = _condition(request)
    owners = set(request.owner.owner_urns) if request.owner.type == "user" else None
    tenant = caller.seen("owned" if request.owner.type == "own" else "accessible")
    found: list[SessionRecord] = []
    end_s = float("-inf")
    async for session in all_records(caller.store, SessionRecord, tenant):
        if session.created_s < end_s:
            break
        is_behind = before is None or _place(session) < before
        if is_behind and (owners is None or session.tenant in owners) and is_wanted(session):
            found.append(session)
            if len(found) == request.limit + 1:
                end_s = session.created_s - _SKEW_S
    found.sort(key=_place, reverse=True)
    return found[: request.limit + 1]


def _condition(request: types.SessionSearchRequest) -> Callable[[SessionRecord], bool]:
    """Return the test of all conditions but the owner and the cursor."""
    words = (request.display_name or "").casefold().split()
    projects = None if request.project_ids is None else set(request.project_ids)
    wanted = request.user_metadata.items()

    def is_named(session: SessionRecord) -> bool:
        if request.session_id is None and request.display_name is None:
            return True
        name = (session.display_name or "").casefold()
        has_words = request.display_name is not None and all(word in name for word in words)
        return session.key == request.session_id or has_words

    def is_wanted(session: SessionRecord) -> bool:
        return (
            is_named(session)
            and (projects is None or session.project_id in projects)
            and wanted <= session.user_metadata.items()
            and (request.statuses is None or _has_status(session, request.statuses))
        )

    return is_wanted


def _has_status(session: SessionRecord, queries: Sequence[types.SessionStatusQuery]) -> bool:
    status = _status(session)
    if status is None:
        return False
    for query in queries:
        reasons = query.reasons or (["success", "errored", "interrupted"])
        fits = status.reason is None or status.reason.type in reasons
        if status.type == query.type and fits:
            return True
    return False


def _status(session: SessionRecord) -> types.SessionStatus | None:
    """Return the status; None for a session that ended because its client fell silent."""
    if not session.ended:
        return types.SessionStatus(type="active")
    if session.ended not in ("success", "errored", "interrupted"):
        return None
    reason = types.ClientFinishReason(type=session.ended)
    return types.SessionStatus(type="client_finished", reason=reason)


async def _summaries(
    caller: Caller, sessions: Sequence[SessionRecord]
) -> list[types.SessionSummary]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tenant in {each.tenant for each in sessions}:
        async for checkpoint in all_records(caller.store, CheckpointRecord, tenant):
            if live([checkpoint]):
                session_id = checkpoint.parent.rpartition(":train:")[0]
                counts[session_id] += 1
                sizes[session_id] += checkpoint.size_bytes
    return [
        types.SessionSummary(
            session_id=each.key,
            created_at=_place(each)[0],
            owner=each.tenant,
            project_id=each.project_id or "",
            status=_status(each),
            checkpoints_count=counts[each.key],
            display_name=each.display_name,
            user_metadata=each.user_metadata,
            checkpoint_storage_bytes=sizes[each.key],
        )
        for each in sessions
    ]


def _place(session: SessionRecord) -> Place:
    return datetime.fromtimestamp(session.created_s, UTC), session.key


def _utc(given: datetime) -> datetime:
    return given if given.tzinfo is not None else given.replace(tzinfo=UTC)
