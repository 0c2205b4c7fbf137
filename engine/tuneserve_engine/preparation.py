"""What adapters of a kind share is made before the first of them: it may take minutes, and nobody
else waits for it."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread

import msgspec

from tuneserve_engine import jobs
from tuneserve_engine.adapters import AdapterConfig
from tuneserve_engine.backend.base import Backend
from tuneserve_engine.errors import EngineError
from tuneserve_engine.jobs import Job, JobKind

logger = logging.getLogger(__name__)

Preparation = Callable[[], None]
"""May run in any thread."""


def preparation_of(backend: Backend, of: Job | AdapterConfig) -> Preparation | None:
    """What has to be done before the job that creates a model, or an adapter of this
    configuration, can run. None if there is nothing, or if the job itself will tell what is wrong
    with it."""
    try:
        config = _created(of) if isinstance(of, Job) else of
        if config is None or backend.is_prepared(config):
            return None
    except (EngineError, msgspec.MsgspecError):
        return None
    return partial(backend.prepare, config)


async def prepared(prepare: Preparation | None) -> None:
    """Returns when it is done. Never raises: who finds missing what could not be made tells why."""
    if prepare is None:
        return
    made: Future[None] = Future()

    def make() -> None:
        made.set_running_or_notify_cancel()
        try:
            made.set_result(prepare())
        except BaseException as error:
            made.set_exception(error)

    # No thread of a pool: a process that ends would wait minutes for it.
    Thread(target=make, name="prepare").start()
    try:
        await asyncio.wrap_future(made)
    except EngineError as error:
        logger.error("what a new adapter shares with others cannot be made: %s", error)
    except Exception:
        logger.exception("what a new adapter shares with others cannot be made")


def _created(job: Job) -> AdapterConfig | None:
    """The configuration of the model that the job creates; None if it creates none."""
    if job.kind == JobKind.CREATE_MODEL:
        return jobs.decode(job.payload, jobs.CreateModel).config
    if job.kind == JobKind.LOAD_WEIGHTS:
        return jobs.decode(job.payload, jobs.LoadWeights).config
    return None
