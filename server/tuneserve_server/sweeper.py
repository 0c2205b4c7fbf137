"""The clean-up that follows time alone: expired sessions, results and checkpoints, unused files."""

import asyncio
import logging
import time
from dataclasses import replace

from tuneserve_engine.files import FileStore
from tuneserve_engine.queue.base import Store, SweepPolicy

logger = logging.getLogger(__name__)

_GRACE_S = 120.0  # after a start, clients need time to send the heartbeats they could not


async def sweep_forever(
    store: Store, files: FileStore, policy: SweepPolicy, interval_s: float
) -> None:
    """Sweeps every ``interval_s`` until cancelled. A failed sweep is logged and tried again."""
    started_s = time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        try:
            uptime_s = time.monotonic() - started_s
            await store.sweep(time.time(), policy if uptime_s > _GRACE_S else patient(policy))
            await delete_unused(store, files)
        except Exception:
            logger.exception("the clean-up failed; it is tried again in %g s", interval_s)


def patient(policy: SweepPolicy) -> SweepPolicy:
    """The policy while nobody may be held silent for our own absence."""
    never_s = 1e12
    gap_ttl_s = policy.gap_ttl_s + _GRACE_S
    return replace(policy, session_ttl_s=never_s, sample_ttl_s=never_s, gap_ttl_s=gap_ttl_s)


async def delete_unused(store: Store, files: FileStore) -> None:
    """Deletes files that no checkpoint, sampler or unfinished job names.

    Listed before asking: a file that appears in between belongs to a job we do not know of.
    """
    present = await asyncio.to_thread(files.ids)
    for file_id in present - await store.files_in_use():
        await asyncio.to_thread(files.delete, file_id)
        logger.info("deleted file %s: nothing uses it any more", file_id)
