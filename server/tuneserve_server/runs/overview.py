"""Runs with their states and figures: one page of them, or those that a search finds."""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from tuneserve_client.runs import RunOrder, RunState
from tuneserve_engine.core.records import ModelRecord
from tuneserve_engine.core.usage import TenantUsage, Totals
from tuneserve_engine.store.base import Page, Store, StoreStats
from tuneserve_server.dashboard.curves import CurveReader
from tuneserve_server.dashboard.run_states import RunStates
from tuneserve_server.runs.names import RunNames, is_archived, tags_of
from tuneserve_server.runs.progress import Progress
from tuneserve_server.ttl_cache import CachedQuery

_USAGE_S, _ALL_USAGE_S = 3.0, 30.0  # sums over all days: of one tenant, of all tenants
_READ = 200  # models at once
_KEPT = 65_536  # models, each with some hundred bytes
_TENANTS = 1024


@dataclass(frozen=True)
class RunSummary:
    """A model with what is known about its run. ``name`` may be empty."""

    model: ModelRecord
    name: str
    state: RunState
    duration_s: float
    total: Totals
    progress: Progress


@dataclass(frozen=True)
class _Named:
    """A model with what a search looks at; ``state`` is "running" where a search does not ask."""

    model: ModelRecord
    name: str
    state: RunState


@dataclass(frozen=True)
class RunQuery:
    """The wanted runs. ``text`` is part of a name, an id, a base model, a note or a tag.

    ``archived`` None asks for the others too.
    """

    text: str = ""
    state: RunState | None = None
    tag: str | None = None
    archived: bool | None = False
    sort: RunOrder = "created"
    descending: bool = True
    limit: int = 50
    offset: int = 0


class RunOverview:
    """The runs of a store, with their progress kept from one question to the next."""

    def __init__(
        self,
        store: Store,
        stats: CachedQuery[StoreStats],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._stats = stats
        self._clock = clock
        self._states = RunStates(store, clock)
        self._names = RunNames(store)
        self._usage: OrderedDict[str | None, CachedQuery[Sequence[TenantUsage]]] = OrderedDict()
        self._readers: OrderedDict[str, CurveReader[Progress]] = OrderedDict()
        self._searching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def describe(self, models: Sequence[ModelRecord], tenant: str | None) -> list[RunSummary]:
        """Return the summaries of models of the tenant, or of any tenant for None, in order."""
        totals = await self._totals(tenant)
        states = await self._states.states_of(models, await self._stats.get())
        return [
            RunSummary(
                model,
                await self._names.name_of(model),
                state,
                _duration_s(model, state),
                totals.get((model.tenant, model.key), Totals()),
                await self._progress(model),
            )
            for model, state in zip(models, states, strict=True)
        ]

    async def search(self, query: RunQuery, tenant: str | None) -> tuple[list[RunSummary], int]:
        """Return a page of the runs that the query is about, and the number of all of them.

        Runs without the figure that they are sorted by come last. A tenant's searches run one after
        the other.
        """
        async with self._searching.setdefault(tenant or "", asyncio.Lock()):
            keys = await self._ranked(query, tenant)
        found = [
            await self._store.get_record(ModelRecord, key)
            for key in keys[query.offset : query.offset + query.limit]
        ]
        return await self.describe([each for each in found if each], tenant), len(keys)

    async def _ranked(self, query: RunQuery, tenant: str | None) -> list[str]:
        """Return the ids of the runs that the query is about, in its order."""
        ranked: dict[str, float | str | None] = {}
        totals = await self._totals(tenant) if query.sort in _BY_TOTAL else {}
        read = 0
        while models := (await self._page(tenant, read)).items:
            read += len(models)
            for run in await self._named(models, query):
                if _fits(run, query):
                    total = totals.get((run.model.tenant, run.model.key), Totals())
                    ranked[run.model.key] = await self._rank(run, total, query.sort)
        known = [key for key, rank in ranked.items() if rank is not None]
        if query.sort != "created":  # of equal ones, the newest come first
            known.sort(key=lambda key: _sortable(ranked[key]), reverse=query.descending)
        elif not query.descending:
            known.reverse()
        return known + [key for key, rank in ranked.items() if rank is None]

    async def _named(self, models: Sequence[ModelRecord], query: RunQuery) -> list[_Named]:
        states: Sequence[RunState] = ["running"] * len(models)
        if query.state is not None or query.sort in ("state", "duration"):
            states = await self._states.states_of(models, await self._stats.get())
        return [
            _Named(model, await self._names.name_of(model), state)
            for model, state in zip(models, states, strict=True)
        ]

    async def _page(self, tenant: str | None, offset: int) -> Page[ModelRecord]:
        """Return some models: a few at once, because their metadata may be large."""
        return await self._store.page_of_records(
            ModelRecord, tenant=tenant, limit=_READ, offset=offset
        )

    async def _rank(self, run: _Named, total: Totals, sort: RunOrder) -> float | str | None:
        """Return the value by which the run is sorted; None if it is not known."""
        if sort in _BY_RECORD:
            return _BY_RECORD[sort](run)
        if sort in _BY_TOTAL:
            return _BY_TOTAL[sort](total)
        return _BY_PROGRESS[sort](await self._progress(run.model))

    async def _totals(self, tenant: str | None) -> dict[tuple[str, str], Totals]:
        """Return the usage of each model, by tenant and model."""
        if tenant not in self._usage:
            self._usage[tenant] = CachedQuery(
                lambda: self._store.usage(tenant),
                _ALL_USAGE_S if tenant is None else _USAGE_S,
                self._clock,
            )
            if len(self._usage) > _TENANTS:
                self._usage.popitem(last=False)
        self._usage.move_to_end(tenant)
        return {
            (used.tenant, name): total
            for used in await self._usage[tenant].get()
            for name, total in used.by_model.items()
        }

    async def _progress(self, model: ModelRecord) -> Progress:
        if model.key not in self._readers:
            self._readers[model.key] = CurveReader(Progress(), self._clock)
            if len(self._readers) > _KEPT:
                self._readers.popitem(last=False)
        self._readers.move_to_end(model.key)
        reader = self._readers[model.key]
        asked_s, stats = await self._stats.dated()
        idle_s = -math.inf if stats.unfinished.get(model.tenant) else asked_s
        return await reader.go_on(self._store, model, idle_s)


def _duration_s(model: ModelRecord, state: RunState) -> float:
    end_s = time.time() if state == "running" else model.last_request_s
    return max(end_s - model.created_s, 0.0)


def _fits(run: _Named, query: RunQuery) -> bool:
    model = run.model
    if query.archived is not None and is_archived(model) is not query.archived:
        return False
    if query.state is not None and run.state != query.state:
        return False
    tags = tags_of(model)
    if query.tag is not None and query.tag not in tags:
        return False
    notes = model.user_metadata.get("notes", "")
    texts = (run.name, model.key, model.base_model, model.config.kind, model.tenant, notes, *tags)
    wanted = query.text.casefold().strip()
    return any(wanted in each.casefold() for each in texts)


def _sortable(rank: float | str | None) -> tuple[str, float]:
    return (rank, 0.0) if isinstance(rank, str) else ("", rank or 0.0)


_BY_RECORD: dict[RunOrder, Callable[[_Named], float | str]] = {
    "created": lambda run: run.model.created_s,
    "last_request": lambda run: run.model.last_request_s,
    "name": lambda run: run.name.casefold(),
    "state": lambda run: run.state,
    "duration": lambda run: _duration_s(run.model, run.state),
}
_BY_TOTAL: dict[RunOrder, Callable[[Totals], float]] = {
    "tokens": lambda total: total.trained_tokens,
    "device": lambda total: total.device_s,
}
_BY_PROGRESS: dict[RunOrder, Callable[[Progress], float | None]] = {
    "step": lambda progress: progress.step,
    "loss": lambda progress: progress.loss,
    "held_out_loss": lambda progress: progress.held_out_loss,
}
