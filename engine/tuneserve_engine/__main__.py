"""``python -m tuneserve_engine``: one worker process, from settings to work."""

import asyncio
import logging
import os
import signal
import sys
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext

from pydantic_settings import CliApp

from tuneserve_engine import logs, pauses
from tuneserve_engine.backend.base import DeviceFailed
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.config import REFUSED, WorkerSettings
from tuneserve_engine.costs import Costs
from tuneserve_engine.files import FileStore
from tuneserve_engine.health import Pulse
from tuneserve_engine.link import LeaseLost
from tuneserve_engine.lock import lock_name
from tuneserve_engine.operations import Operations
from tuneserve_engine.queue.base import Fenced, StoreUnusable
from tuneserve_engine.queue.opening import check_store, open_queue
from tuneserve_engine.residents import PointPolicy
from tuneserve_engine.scheduler import Scheduler
from tuneserve_engine.shared_files import open_files
from tuneserve_engine.traces import NoTraces, WorkerTraces
from tuneserve_engine.tracing import open_tracer
from tuneserve_engine.worker import Worker, WorkerPolicy

logger = logging.getLogger(__name__)

_LOCK_S = 5.0


def main() -> int:
    """Exit status 0 after SIGTERM or SIGINT, 1 after losing the lease or the device or by a bug, 2
    if it cannot start."""
    try:
        settings = CliApp.run(WorkerSettings)
        logs.start("worker", settings)
        logging.getLogger("jax").setLevel(logging.WARNING)
        settings.settle_permissions()
        lock = _lock(settings)
        pulse = Pulse(settings.alive_file)
        files = open_files(settings.files_dir, min_free_bytes=settings.min_free_bytes)
        asyncio.run(check_store(settings))
        backend = JaxBackend.from_settings(settings)
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
        # Not out of here, where the interpreter would wait for the device, which may be stuck.
        logger.exception("stopped by an error that should not be")
        return 1
    return 0


def _lock(settings: WorkerSettings) -> AbstractContextManager[object]:
    """Keeps others from the name; one made of the process id is nobody else's."""
    if settings.worker_name is None:
        return nullcontext()
    return lock_name(settings.data_dir, settings.worker_name, timeout_s=_LOCK_S)


def _refuse(error: Exception) -> int:
    logs.last_word("worker", error)
    return REFUSED


async def _work(
    settings: WorkerSettings, backend: JaxBackend, files: FileStore, pulse: Pulse
) -> None:
    costs = Costs(backend.lattice, context=backend.info.context_length, lanes=backend.sample_rows)
    tracer = open_tracer("worker", settings)
    settling = pauses.Settling(lambda: backend.figures["programs_compiled"])

    def renewed() -> None:
        pulse.beat()
        settling.look()

    async with AsyncExitStack() as stack:
        if tracer is not None:
            stack.callback(tracer.close)
        connect = await stack.enter_async_context(open_queue(settings))
        worker = Worker(
            connect,
            Operations(
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
                figures=lambda: backend.figures,
                peak_flops=settings.device_peak_flops or 0.0,
                traces=WorkerTraces(tracer) if tracer else NoTraces(),
            ),
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.stop)
        pauses.shorten()
        await worker.run()
        logger.info("stopped")


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    # Not sys.exit, which would wait for a unit that was abandoned.
    os._exit(status)
