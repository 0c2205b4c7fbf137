"""``python -m tuneserve_engine.worker``: one worker process, from settings to work."""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from functools import partial
from typing import NoReturn

from pydantic_settings import CliApp

from tuneserve_engine.backend.base import DeviceFailed, OutOfMemory
from tuneserve_engine.backend.hosts.leader import LeaderBackend
from tuneserve_engine.backend.hosts.link import Link, MemberLost
from tuneserve_engine.backend.hosts.meeting import Hosts, NotMet
from tuneserve_engine.backend.hosts.messages import StopAsked
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.hosts import follow, lead
from tuneserve_engine.core.errors import REFUSED
from tuneserve_engine.process import pauses
from tuneserve_engine.process.lock import lock_name
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.store.errors import Fenced, StoreUnusable
from tuneserve_engine.store.files_base import Files
from tuneserve_engine.store.files_mount import wait_for_files
from tuneserve_engine.store.open import check_store, open_queue, settle_permissions
from tuneserve_engine.telemetry import logs
from tuneserve_engine.telemetry.tracing import open_tracer
from tuneserve_engine.worker.accounting.traces import WorkerTraces
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.health import LivenessFile
from tuneserve_engine.worker.lease import LeaseLost
from tuneserve_engine.worker.models.recovery_points import PointPolicy
from tuneserve_engine.worker.scheduling.cost_model import CostModel
from tuneserve_engine.worker.scheduling.scheduler import Scheduler
from tuneserve_engine.worker.worker import STOP_S, Worker, WorkerPolicy

logger = logging.getLogger(__name__)

_LOCK_S = 5.0
_STOP_S = STOP_S + 5.0
"""The seconds in which the leader stops, once it is asked to."""


def main() -> int:
    """Run a worker and return the exit status of the process.

    The status is 0 after SIGTERM or SIGINT, 1 after the loss of the lease, the device or another
    host of the worker or after a bug, and 2 if the worker cannot start.
    """
    try:
        settings = CliApp.run(WorkerSettings)
        logs.start("worker", settings)
        logging.getLogger("jax").setLevel(logging.WARNING)
        settle_permissions(settings)
        pulse = LivenessFile(settings.alive_file)
        if settings.own_host_number:
            return _follow(settings, pulse)
        lock = _lock(settings)
        files = wait_for_files(settings, spares_disk=False)
        asyncio.run(check_store(settings))
        backend, own = _backend(settings)
        _discard_partial(files)
    except (ValueError, OSError, StoreUnusable) as error:
        return _refuse(error)
    except (NotMet, MemberLost) as error:
        logger.error("stopped: %s", error)
        return 1
    except Exception:
        # Caught, because on its way out the interpreter would wait for JAX's other processes.
        logger.exception("stopped by an error that should not be")
        return 1
    try:
        with lock:
            asyncio.run(_work(settings, backend, own, files, pulse))
    except (Fenced, LeaseLost, DeviceFailed) as error:
        logger.error("stopped: %s", error)
        return 1
    except StoreUnusable as error:
        return _refuse(error)
    except Exception:
        # Caught, because on its way out the interpreter would wait for the device, perhaps stuck.
        logger.exception("stopped by an error that should not be")
        return 1
    if isinstance(backend, LeaderBackend):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # a follower may still ask to stop
        backend.end()
    return 0


def _discard_partial(files: Files) -> None:
    try:
        files.discard_partial()
    except OSError as error:  # the API process tries it again
        logger.warning("the leftovers of killed writers stay for now: %s", error)


def _lock(settings: WorkerSettings) -> AbstractContextManager[object]:
    """Lock the worker's name against other processes.

    A default name needs no lock: it contains the process id.
    """
    if settings.worker_name is None:
        return nullcontext()
    return lock_name(settings.data_dir, settings.worker_name, timeout_s=_LOCK_S)


def _refuse(error: Exception) -> int:
    logs.last_word("worker", error)
    return REFUSED


def _backend(settings: WorkerSettings) -> tuple[JaxBackend | LeaderBackend, JaxBackend]:
    """Return the worker's backend, and this process's part of it."""
    if not settings.hosts:
        backend = JaxBackend.from_options(settings.backend_options)
        return backend, backend
    return lead(
        _hosts(settings),
        settings.backend_options,
        on_stop=partial(os.kill, os.getpid(), signal.SIGTERM),
        on_lost=_end_at_once,
    )


def _hosts(settings: WorkerSettings) -> Hosts:
    number, key = settings.own_host_number, settings.hosts_key.encode()
    return Hosts(settings.hosts, number, settings.hosts_port, key)


def _end_at_once(reason: str) -> NoReturn:
    """End this process, whatever its threads wait for."""
    logger.error("stopped: %s; the worker starts again once all its hosts do", reason)
    os._exit(1)


def _follow(settings: WorkerSettings, pulse: LivenessFile) -> int:
    """Follow the leader. Only a failure returns."""

    def end() -> NoReturn:
        logger.info("stopped")
        os._exit(0)

    def start(link: Link) -> None:
        def ask() -> None:
            logger.info("asked to stop: the leader saves everything first")
            link.send(StopAsked())
            time.sleep(_STOP_S)
            _end_at_once("the leader has not stopped")

        def live() -> None:
            while True:  # the process ends with the link
                pulse.touch()
                time.sleep(settings.lease_ttl_s / 3)

        threading.Thread(target=live, daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            # A thread, because the signal may interrupt a call that holds the link.
            signal.signal(number, lambda *_: threading.Thread(target=ask, daemon=True).start())

    try:
        follow(
            _hosts(settings),
            settings.backend_options,
            on_start=start,
            on_end=end,
            on_lost=_end_at_once,
        )
    except (NotMet, DeviceFailed, OutOfMemory) as error:
        logger.error("stopped: %s", error, exc_info=error.__cause__)
    return 1


async def _work(
    settings: WorkerSettings,
    backend: JaxBackend | LeaderBackend,
    own: JaxBackend,
    files: Files,
    pulse: LivenessFile,
) -> None:
    costs = CostModel(
        backend.static_shapes, context=backend.info.context_length, decode_slots=own.sample_rows
    )
    tracer = open_tracer("worker", settings)
    settling = pauses.Settling(lambda: backend.metrics["programs_compiled"])

    def renewed() -> None:
        pulse.touch()
        settling.look()

    async with AsyncExitStack() as stack:
        if tracer is not None:
            stack.callback(tracer.close)
        connect = await stack.enter_async_context(open_queue(settings))
        worker = Worker(
            connect,
            JobExecutor(
                backend,
                files,
                rescore_samples=settings.rescore_samples,
                slice_s=settings.slice_s,
            ),
            backend.info,
            name=settings.lease_name,
            scheduler=Scheduler(settings.tenant_weights, slice_s=settings.slice_s, costs=costs),
            policy=WorkerPolicy(
                points=PointPolicy(interval_s=settings.point_s, steps=settings.point_steps),
                renew_s=settings.lease_ttl_s / 3,
                renewed=renewed,
                metrics=lambda: backend.metrics,
                peak_flops=settings.device_peak_flops or 0.0,
                observers=[WorkerTraces(tracer)] if tracer else [],
                speed=0.0 if settings.sample_only else settings.relative_speed,
            ),
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.stop)
        pauses.shorten()
        if settings.sample_only and settings.compile_ahead:
            # Otherwise all samples would come at once, and wait for programs.
            while not own.programs.ready.is_set() and not worker.is_stopping:
                pulse.touch()
                await asyncio.to_thread(own.programs.wait, min(1.0, settings.lease_ttl_s / 3))
        await worker.run_until_stopped()
        logger.info("stopped")


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    # ``sys.exit`` would wait for an abandoned batch.
    os._exit(status)
