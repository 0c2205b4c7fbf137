"""The report to the store that a worker was killed from outside, which only its supervisor sees."""

import asyncio
import logging

from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store.errors import StoreFailed, StoreUnusable
from tuneserve_engine.store.open import open_queue

logger = logging.getLogger(__name__)

_TELL_S = 3.0


async def tell_killed(settings: CommonSettings, worker_name: str) -> None:
    """Tell the store that the worker was killed. Never raises.

    If the store is unreachable, the death counts as one that a request caused.
    """
    try:
        async with asyncio.timeout(_TELL_S), open_queue(settings) as connect:
            queue = await connect()
            await queue.killed(worker_name)
    except (ConnectionError, TimeoutError, OSError, StoreFailed, StoreUnusable) as error:
        logger.warning("cannot report to the store that %s was killed: %s", worker_name, error)
