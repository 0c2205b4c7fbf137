"""``python -m tuneserve_engine``: one worker process, from settings to work."""

import asyncio
import logging
import math
import signal
import sys

from pydantic_settings import CliApp

from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.config import REFUSED, WorkerSettings
from tuneserve_engine.files import FileStore
from tuneserve_engine.lock import lock_directory
from tuneserve_engine.operations import Operations
from tuneserve_engine.queue.base import Fenced, Queue
from tuneserve_engine.queue.remote import RemoteQueue
from tuneserve_engine.worker import LeaseLost, Worker

logger = logging.getLogger(__name__)

_LOCK_S = 5.0


def main() -> int:
    """Exit status 0 after SIGTERM or SIGINT, 1 after losing the lease, 2 if it cannot start."""
    try:
        settings = CliApp.run(WorkerSettings)
        _log_to_stderr(settings)
        lock = lock_directory(settings.data_dir, timeout_s=_LOCK_S)
        backend = JaxBackend.from_settings(settings)
        files = FileStore(settings.files_dir)
        files.discard_partial()
        operations = Operations(backend, files)
        queue = RemoteQueue(settings.store_socket)
    except (ValueError, OSError) as error:
        print(f"tuneserve worker: {error}", file=sys.stderr)
        return REFUSED

    async def connect() -> Queue:
        # For ever: as long as this process lives, so do its models.
        logger.info("waiting for the API process at %s", settings.store_socket)
        await queue.connect(timeout_s=math.inf)
        return queue

    status = 0
    with lock:
        try:
            asyncio.run(_until_signalled(Worker(connect, operations, backend.info)))
        except* (Fenced, LeaseLost) as group:
            logger.error("stopped: %s", group.exceptions[0])
            status = 1
    return status


def _log_to_stderr(settings: WorkerSettings) -> None:
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s worker %(levelname)s %(message)s"
    )
    logging.getLogger("jax").setLevel(logging.WARNING)


async def _until_signalled(worker: Worker) -> None:
    task = asyncio.ensure_future(worker.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        logger.info("stopping")


if __name__ == "__main__":
    sys.exit(main())
