"""The timeline of a session, as a trace that https://ui.perfetto.dev reads.

The format is Chrome's JSON: "Trace Event Format", events of the phases b and e (a request and its
stages, which may overlap with others), i (a checkpoint), C (figures of a curve) and M (names). All
of it is stored already. Requests are in the trace until their results are dropped; losses and
checkpoints stay.
"""

import asyncio
import math
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from tuneserve_engine.core.records import (
    CheckpointRecord,
    ModelRecord,
    SamplerRecord,
    SessionRecord,
)
from tuneserve_engine.core.usage import CurvePoint, Usage, loss_count
from tuneserve_engine.store.base import KeptRequest, Store
from tuneserve_server import request_cost
from tuneserve_server.commands.common import sampler_key

NAME = "trace.pftrace"
"""The name in a link; no file of a checkpoint has it."""

MOST_REQUESTS = 5000  # of a session, the models' first
MOST_POINTS = 20_000  # of the curves of all its models, the first model's first
_MOST_TRACKS = 200  # models, and sampling sessions
_US = 1e6

Event = dict[str, Any]


async def trace_of(store: Store, session: SessionRecord) -> bytes:
    """Return the trace of the session's requests, losses and checkpoints as JSON."""
    tracks = [_Track(1, f"session {session.key}", session)]
    left = MOST_REQUESTS
    left -= await tracks[0].read_requests(store, session.key, left)
    points_left = MOST_POINTS
    models = await store.page_of_records(ModelRecord, parent=session.key, limit=_MOST_TRACKS)
    for model in reversed(models.items):
        track = _Track(len(tracks) + 1, f"model {model.key} ({model.base_model})", session)
        tracks.append(track)
        left -= await track.read_requests(store, model.key, left)
        curve = (await store.curve(model.key))[:points_left]
        points_left -= len(curve)
        track.add_curve(curve)
        kept = await store.page_of_records(CheckpointRecord, parent=model.key)
        track.add_checkpoints(kept.items)
    for key, name in await _samplers(store, session):
        track = _Track(len(tracks) + 1, name, session)
        if count := await track.read_requests(store, key, left):
            tracks.append(track)
            left -= count
    return await asyncio.to_thread(_encoded, session, tracks)


async def _samplers(store: Store, session: SessionRecord) -> list[tuple[str, str]]:
    """Return the keys and names of the sampling sessions that may have requests.

    Their records go when the session ends; their requests stay for a while, under numbers from 0.
    """
    if session.ended:
        keys = [sampler_key(session.key, number) for number in range(_MOST_TRACKS)]
        return [(key, f"sampler {key}") for key in keys]
    page = await store.page_of_records(SamplerRecord, parent=session.key, limit=_MOST_TRACKS)
    return [(each.key, f"sampler {each.key} ({each.base_model})") for each in reversed(page.items)]


class _Track:
    """The events of one model, of one sampling session, or of the session itself."""

    def __init__(self, number: int, name: str, session: SessionRecord) -> None:
        self._number = number
        self._began_s = session.created_s
        self._tenant = session.tenant
        self._requests: list[KeptRequest] = []
        named = {"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}}
        self._others: list[Event] = [named]

    async def read_requests(self, store: Store, scope: str, most: int) -> int:
        """Read up to ``most`` requests and return their number."""
        if most > 0:
            self._requests = await store.kept_requests(self._tenant, scope, limit=most)
        return len(self._requests)

    def add_curve(self, points: Iterable[CurvePoint]) -> None:
        for point in points:
            figures = {"learning rate": point.learning_rate, "gradient norm": point.grad_norm}
            count = loss_count(point.loss_sum, point.weight, point.tokens)
            if point.loss_sum is not None and count:
                name = "loss" if point.kind == "forward_backward" else "loss without training"
                figures[name] = point.loss_sum / count
            for name, figure in figures.items():
                if figure is not None and math.isfinite(figure):
                    self._others.append(self._event(name, "C", point.time_s, {name: figure}))

    def add_checkpoints(self, checkpoints: Iterable[CheckpointRecord]) -> None:
        for each in checkpoints:
            told = {"path": each.key, "bytes": each.size_bytes}
            event = self._event(f"{each.kind.value}/{each.name}", "i", each.created_s, told)
            self._others.append({**event, "s": "p", "cat": "checkpoint"})

    def events(self) -> Iterator[Event]:
        yield from self._others
        for request in self._requests:
            yield from self._of_request(request)

    def _event(self, name: str, phase: str, at_s: float, args: Event | None = None) -> Event:
        at_us = round(_US * (at_s - self._began_s), 3)
        event = {"name": name, "ph": phase, "pid": self._number, "tid": 1, "ts": at_us}
        return event if args is None else {**event, "args": args}

    def _of_request(self, request: KeptRequest) -> Iterator[Event]:
        """Yield the beginning and the end of a request and of its stages.

        A request that has not ended has no end.
        """
        mark = {"cat": "request", "id": request.request_id}
        told: Event = {"request_id": request.request_id, "seq_id": str(request.seq)}
        told["state"] = "failed" if request.failed else request.state
        if request.usage is not None:
            told |= request_cost.cost(request.usage).model_dump()
        name = request.kind.value
        yield self._event(name, "b", request.created_s, told) | mark
        if request.finished_s is None:
            return
        if request.usage is not None:
            at_s = request.created_s
            for stage, seconds in _stages(request.usage):
                yield self._event(stage, "b", at_s) | mark
                at_s = min(at_s + seconds, request.finished_s)
                yield self._event(stage, "e", at_s) | mark
        yield self._event(name, "e", request.finished_s) | mark


def _stages(usage: Usage) -> Iterator[tuple[str, float]]:
    """Yield the stages of a request that take time, in order, with their seconds."""
    told = request_cost.timings(usage)
    on_device_ms = max(told.run_ms - told.pack_ms - told.transfer_ms, 0.0)
    for stage, ms in (
        ("held", told.held_ms),
        ("queued", told.queue_ms),
        ("packed", told.pack_ms),
        ("on the device, with others", on_device_ms),
        ("transferred", told.transfer_ms),
    ):
        if ms > 0:
            yield stage, ms / 1000


def _encoded(session: SessionRecord, tracks: Iterable[_Track]) -> bytes:
    events = [event for track in tracks for event in track.events()]
    facts = {"session_id": session.key, "began": session.created_s}
    return msgspec.json.encode({"displayTimeUnit": "ms", "otherData": facts, "traceEvents": events})
