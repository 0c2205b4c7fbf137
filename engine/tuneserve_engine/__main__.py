"""``python -m tuneserve_engine``: one worker process, from settings to work."""

import asyncio
import logging
import signal
import sys

from pydantic_settings import CliApp

from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.config import WorkerSettings
from tuneserve_engine.files import FileStore
from tuneserve_engine.operations import Operations
from tuneserve_engine.queue.base import Fenced, Queue
from tuneserve_engine.queue.remote import RemoteQueue
from tuneserve_engine.worker import LeaseLost, Worker

logger = logging.getLogger(__name__)


def main() -> int:
    """Exit status 0 after SIGTERM or SIGINT, 1 after losing the lease."""
    settings = CliApp.run(WorkerSettings)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s worker %(levelname)s %(message)s"
    )
    backend = JaxBackend.from_settings(settings)
    operations = Operations(backend, FileStore(settings.files_dir))

    async def connect() -> Queue:
        queue = RemoteQueue(settings.store_socket)
        await queue.connect()
        return queue

    try:
        asyncio.run(_until_signalled(Worker(connect, operations, backend.info)))
    except (Fenced, LeaseLost) as error:
        logger.error("stopped: %s", error)
        return 1
    return 0


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
