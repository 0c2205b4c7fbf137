"""The preparation of what a job needs, beside the device, before the job runs.

It is what adapters of a kind share, before the first of these adapters, which may take minutes, or
the grammar of a sample. Only the job that needs it waits for it.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any

import msgspec

from tuneserve_engine.backend.base import Backend
from tuneserve_engine.core import jobs
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import EngineError
from tuneserve_engine.core.grammar import Grammar
from tuneserve_engine.core.jobs import Job, JobKind

logger = logging.getLogger(__name__)

Preparation = Callable[[], object]
"""A preparation, which may run in any thread."""


def pending_preparation(backend: Backend, of: Job | AdapterConfig) -> Preparation | None:
    """Return the work to do before a job can create a model or begin to sample, or before an
    adapter of this configuration.

    None if there is none, or if the job is invalid: then the job itself fails with the reason.
    """
    if isinstance(of, Job) and of.kind == JobKind.SAMPLE:
        grammar = jobs.grammar_of(of.payload)
        return None if grammar is None else backend.pending_grammar(grammar)
    try:
        config = _created(of) if isinstance(of, Job) else of
        if config is None or backend.is_prepared(config):
            return None
    except (EngineError, msgspec.MsgspecError):
        return None
    return partial(backend.prepare, config)


async def run_preparation(prepare: Preparation | None) -> None:
    """Run the preparation in a thread of its own, and wait for it.

    Never raises: if the preparation fails, the job that needs it fails with the reason.
    """
    if prepare is None:
        return
    made: Future[object] = Future()

    def make() -> None:
        made.set_running_or_notify_cancel()
        try:
            made.set_result(prepare())
        except BaseException as error:
            made.set_exception(error)

    # Not a pool's thread: at its end the process would wait minutes for it.
    Thread(target=make, name="prepare").start()
    try:
        await asyncio.wrap_future(made)
    except EngineError as error:
        logger.error("what a job needs cannot be made: %s", error)
    except Exception:
        logger.exception("what a job needs cannot be made")


def _created(job: Job) -> AdapterConfig | None:
    """Return the configuration of the model that the job creates; None if it creates none."""
    if job.kind == JobKind.CREATE_MODEL:
        return jobs.decode(job.payload, jobs.CreateModel).config
    if job.kind == JobKind.LOAD_WEIGHTS:
        return jobs.decode(job.payload, jobs.LoadWeights).config
    return None


class SamplePreparer:
    """A preparer that keeps samples from the device while their grammars are compiled.

    Samples whose grammars are here pass at once. The compilations of a tenant run one after the
    other, so that a tenant with many grammars does not keep the host busy. Call the methods on the
    event loop. ``spawn`` runs a task beside everything else; ``pass_on`` takes the samples.
    """

    def __init__(
        self,
        pending: Callable[[Job], Preparation | None],
        pass_on: Callable[[Job], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._pending = pending
        self._pass_on = pass_on
        self._spawn = spawn
        self._waiting: dict[str, dict[Grammar, list[Job]]] = {}  # by tenant, in order

    def route(self, job: Job) -> None:
        """Pass the job on, once its grammar is compiled.

        Raises nothing: a sample whose grammar cannot be compiled fails when it runs.
        """
        grammar = jobs.grammar_of(job.payload) if job.kind == JobKind.SAMPLE else None
        if grammar is None or self._pending(job) is None:
            self._pass_on(job)
        elif job.tenant in self._waiting:
            self._waiting[job.tenant].setdefault(grammar, []).append(job)
        else:
            self._waiting[job.tenant] = {grammar: [job]}
            self._spawn(self._prepare(job.tenant))

    def drop_requests(self, request_ids: Collection[str]) -> None:
        """Forget the waiting samples of these requests."""
        ended = set(request_ids)
        for waiting in self._waiting.values():
            for grammar, samples in waiting.items():
                waiting[grammar] = [job for job in samples if job.request_id not in ended]

    async def _prepare(self, tenant: str) -> None:
        waiting = self._waiting[tenant]
        while waiting:
            grammar, samples = next(iter(waiting.items()))
            if samples:
                await run_preparation(self._pending(samples[0]))
            for job in waiting.pop(grammar):
                self._pass_on(job)
        del self._waiting[tenant]
