"""The dashboard's data, as a stream of server-sent events.

Each event is the whole current state, but holds only the new rows of each curve. A stream lasts as
long as a poll (``poll_s``); then the viewer reconnects with the id of its last event and its key.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import StreamingResponse

from tuneserve_engine.core.records import Scope
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_server.dashboard.curves import CurveRow
from tuneserve_server.dashboard.state import DashboardState
from tuneserve_server.dashboard.views import TICK_S
from tuneserve_server.dependencies import Caller, CallerDep
from tuneserve_server.errors import TooManyRequests
from tuneserve_server.http.openapi import Declared, fails

router = APIRouter()

_STREAM = "text/event-stream"
_TELLS: Declared = {200: {"content": {_STREAM: {"schema": {}}}}, **fails(TooManyRequests)}
_OVERLAP_S = 10.0
"""The age, before the viewer's newest row, of rows that are sent again.

Rows may have been read out of order; a viewer ignores rows that it has.
"""
_MOST_ERRORS = 30
_LATE_S = 60.0  # far above a tick, because the process may be busy

Since = Annotated[
    float,
    Query(
        ge=0,
        le=2**40,
        description="The id of the last event that the viewer has: curves continue from there.",
    ),
]


async def _counted(caller: CallerDep) -> AsyncIterator[None]:
    """Count the caller as a viewer from before its first event until its stream ends."""
    with caller.live.viewed(caller.tenant):
        yield


@router.get(
    "/live",
    response_class=StreamingResponse,
    responses=_TELLS,
    dependencies=[Depends(_counted)],  # ends when the stream has been sent
)
async def live(caller: CallerDep, since: Since = 0.0) -> Response:
    """Stream the dashboard's state every second: all tenants for an admin key, else the caller."""
    viewer = _Viewer(caller, since)
    return StreamingResponse(
        viewer.events(await viewer.event()),
        media_type=_STREAM,
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


class _Viewer:
    """A viewer of the dashboard, and the curve rows that it has been sent."""

    def __init__(self, caller: Caller, since_s: float) -> None:
        self.caller = caller
        self._is_admin = Scope.ADMIN in caller.scopes
        self._since_s = max(since_s - _OVERLAP_S, 0.0)
        self._newest_s = since_s
        self._sent: dict[str, int] = {}  # the place of the last row, by model

    async def events(self, first: str) -> AsyncIterator[str]:
        polls, until_s = self.caller.polls, time.monotonic() + self.caller.settings.poll_s
        yield first
        while (left_s := until_s - time.monotonic()) > 0:
            if not await polls.hold(asyncio.sleep(min(TICK_S, left_s), True), _LATE_S):
                return  # the process stops
            try:
                yield await self.event()
            except (StoreFailed, ConnectionError):
                return  # the viewer reconnects, and gets the error then

    async def event(self) -> str:
        look = await self.caller.live.look(None if self._is_admin else self.caller.tenant)
        told = msgspec.json.encode(self._told(look)).decode()
        return f"event: look\nid: {self._newest_s:.3f}\ndata: {told}\n\n"

    def _told(self, look: DashboardState) -> dict[str, Any]:
        caller = self.caller
        whose = None if self._is_admin else caller.tenant
        told = {
            "now_s": time.time(),
            "tenant": caller.tenant,
            "scopes": sorted(caller.scopes),
            "runs": look.runs,
            "curves": self._rows(look),
            "tenants": look.tenants,
            "errors": caller.recent.newest(whose, _MOST_ERRORS),
        }
        if look.store is not None:
            told["workers"] = look.workers
            told["store"] = {
                "kind": caller.settings.store_kind,
                "durability": caller.store.durability,
                "disk": caller.disk.refusal() or "ok",
                "unfinished": sum(look.store.unfinished.values()),
                "logged": look.store.logged,
                "recovery_points": look.store.points,
            }
        return told

    def _rows(self, look: DashboardState) -> dict[str, list[CurveRow]]:
        """Return the new rows of each curve. A viewer forgets curves that an event leaves out."""
        found: dict[str, list[CurveRow]] = {}
        for model_id, curve in look.curves.items():
            # A viewer whose last event is older than the run's appearance here has no row of it.
            is_known = look.shown_s[model_id] < self._since_s
            since_s = self._since_s if is_known else 0.0
            if rows := curve.after(self._sent.get(model_id, -1), since_s):
                found[model_id] = list(rows)
                self._newest_s = max(self._newest_s, rows[-1].time_s)
        self._sent = {key: each.rows[-1].x for key, each in look.curves.items() if each.rows}
        self._since_s = 0.0  # it is only about the rows from before this stream
        return found
