"""``python -m tuneserve_engine.worker``: one worker process, from settings to work."""

import asyncio
import logging
import os
import signal
import sys
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext

from pydantic_settings import CliApp

from tuneserve_engine.backend.base import DeviceFailed
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.errors import REFUSED
from tuneserve_engine.process import pauses
from tuneserve_engine.process.lock import lock_name
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.store.errors import Fenced, StoreUnusable
from tuneserve_engine.store.files import FileStore
from tuneserve_engine.store.files_mount import open_files
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
from tuneserve_engine.worker.worker import Worker, WorkerPolicy

logger = logging.getLogger(__name__)

_LOCK_S = 5.0


def main() -> int:
    """Run a worker and return the exit status of the process.

    The status is 0 after SIGTERM or SIGINT, 1 after the loss of the lease or the device or after a
    bug, and 2 if the worker cannot start.
    """
    try:
        settings = CliApp.run(WorkerSettings)
        logs.start("worker", settings)
        logging.getLogger("jax").setLevel(logging.WARNING)
        settle_permissions(settings)
        lock = _lock(settings)
        pulse = LivenessFile(settings.alive_file)
        files = open_files(settings.files_dir, min_free_bytes=settings.min_free_bytes)
        asyncio.run(check_store(settings))
        backend = JaxBackend.from_options(settings.backend_options)
        files.discard_partial()
    except (ValueError, OSError, StoreUnusable) as error:
        return _refuse(error)
    try:
        with lock:
            asyncio.run(_work(settings, backend, files, pulse))
    except (Fenced, LeaseLost, DeviceFailed) as error:
        logger.error("stopped: %s", error)
        return 1
    except StoreUnusable as error:
        return _refuse(error)
    except Exception:
        # Caught, because on its way out the interpreter would wait for the device, perhaps stuck.
        logger.exception("stopped by an error that should not be")
        return 1
    return 0


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


async def _work(
    settings: WorkerSettings, backend: JaxBackend, files: FileStore, pulse: LivenessFile
) -> None:
    costs = CostModel(
        backend.static_shapes, context=backend.info.context_length, decode_slots=backend.sample_rows
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
            ),
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.stop)
        pauses.shorten()
        await worker.run_until_stopped()
        logger.info("stopped")


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    # ``sys.exit`` would wait for an abandoned batch.
    os._exit(status)
