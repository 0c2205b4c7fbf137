"""The preparation of state that adapters of a kind share, before the first of these adapters.

A preparation may take minutes; only the job that needs it waits for it.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread

import msgspec

from tuneserve_engine.backend.base import Backend
from tuneserve_engine.core import jobs
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import EngineError
from tuneserve_engine.core.jobs import Job, JobKind

logger = logging.getLogger(__name__)

Preparation = Callable[[], object]
"""A preparation, which may run in any thread."""


def pending_preparation(backend: Backend, of: Job | AdapterConfig) -> Preparation | None:
    """Return the work to do before a job can create a model, or an adapter of this configuration.

    None if there is none, or if the job is invalid: then the job itself fails with the reason.
    """
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
        logger.error("what a new adapter shares with others cannot be made: %s", error)
    except Exception:
        logger.exception("what a new adapter shares with others cannot be made")


def _created(job: Job) -> AdapterConfig | None:
    """Return the configuration of the model that the job creates; None if it creates none."""
    if job.kind == JobKind.CREATE_MODEL:
        return jobs.decode(job.payload, jobs.CreateModel).config
    if job.kind == JobKind.LOAD_WEIGHTS:
        return jobs.decode(job.payload, jobs.LoadWeights).config
    return None
