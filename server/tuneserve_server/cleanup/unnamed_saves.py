"""The unnamed sampler saves, which stay as long as the tenant has room for checkpoints.

A client may sample from such a save for as long as its session lives.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress

from tuneserve_engine.core.records import SamplerRecord, Update
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import CheckpointUsage, Store
from tuneserve_engine.store.files_base import Files
from tuneserve_server.access.limits import most_kept
from tuneserve_server.settings import ApiSettings

_PAGE = 500


async def delete_saves(store: Store, saves: Iterable[SamplerRecord]) -> None:
    """Delete the records; the clean-up deletes the files. A waiting sample keeps its own file."""
    for each in saves:
        await store.delete_record(SamplerRecord, each.key)


async def in_the_way(  # noqa: PLR0913 - two of six by name
    store: Store,
    settings: ApiSettings,
    tenant: str,
    key: str,
    *,
    unnamed: SamplerRecord | None = None,
    needed_bytes: int = 0,
) -> list[SamplerRecord]:
    """Return the unnamed saves whose deletion makes room for the checkpoint ``key``.

    They are the tenant's least recently used ones, as many as needed. A save that is in use or
    among the newest of its model is never one of them. The list is empty if there is room, and also
    if all of them together would not make enough: then the checkpoint is refused elsewhere.
    ``unnamed`` is the record of the checkpoint if it is such a save itself, ``needed_bytes`` its
    known size.
    """
    most = await most_kept(store, settings.store_policy, tenant)
    kept = await store.checkpoint_usage(tenant, key)
    if refusals.keeps_too_much(kept, most, needed_bytes) is None:
        return []
    saves = [each for each in await store.unnamed_saves(tenant) if each.key != key]
    if unnamed is not None:
        saves.append(unnamed)  # not stored yet, but among the newest of its model
    now_s = time.time()
    found = []
    for each in sorted(_older(saves, settings.unnamed_saves), key=lambda it: it.used_s):
        if 0 <= now_s - each.used_s < settings.unnamed_save_s:
            continue  # in use; a time in the future was stored before the clock was set back
        found.append(each)
        kept = CheckpointUsage(kept.count - 1, kept.size_bytes - each.size_bytes)
        if refusals.keeps_too_much(kept, most, needed_bytes) is None:
            return found
    return []


async def adopt(store: Store, files: Files) -> None:
    """Set the file size and the time of use (now) of saves that an earlier release made.

    Earlier releases stored neither value.
    """
    offset, total = 0, 1
    while offset < total:
        page = await store.page_of_records(SamplerRecord, limit=_PAGE, offset=offset)
        offset, total = offset + _PAGE, page.total
        for each in page.items:
            if each.is_save and not each.used_s:
                found: dict[str, float] = {"used_s": time.time()}
                with suppress(OSError):
                    found["size_bytes"] = await asyncio.to_thread(files.size, each.file_id or "")
                await store.update_record(Update("sampler", each.key, found))


def _older(saves: Iterable[SamplerRecord], newest: int) -> list[SamplerRecord]:
    """Return all saves but the ``newest`` newest of each model."""
    of_model: defaultdict[tuple[str, str], list[SamplerRecord]] = defaultdict(list)
    for each in saves:
        of_model[each.parent, each.model_id].append(each)
    return [
        each
        for group in of_model.values()
        for each in sorted(group, key=lambda it: it.created_s)[:-newest]
    ]
