"""The check of ``tuneserve doctor`` that the files directory belongs to the store."""

import asyncio
from typing import Any, Literal

from tuneserve_engine.core.records import DirectoryRecord
from tuneserve_engine.store import ownership
from tuneserve_engine.store.errors import StoreFailed, StoreUnusable
from tuneserve_engine.store.files_mount import check_unused, new_files, open_files
from tuneserve_engine.store.ownership import (
    Facts,
    Ownership,
    Problem,
    facts_of,
    found_in,
    moved,
    problem_of,
)
from tuneserve_engine.store.seat import seat_of
from tuneserve_engine.store.sqlite.inspect import directories_of
from tuneserve_server.settings import ApiSettings

_STORE_S = 10.0


class _New(Exception):
    """The store does not exist yet, or has no files directory."""


def look_at_owner(
    settings: ApiSettings, health: dict[str, Any]
) -> tuple[Literal["OK", "WARN", "FAIL"], str]:
    """Return whether the store may clean up its files directory. Changes nothing."""
    place = "bucket of files" if settings.files_url else "files directory"
    if health:
        kept = health.get("files_kept")
        return ("WARN", kept) if kept else ("OK", f"the {place} belongs to the store")
    try:
        if not settings.files_url and not settings.files_dir.is_dir():
            return "OK", "the first start creates the files directory"
        problem = asyncio.run(_problem(settings))
    except _New:
        try:
            check_unused(open_files(settings), settings.store_shown)
        except (StoreUnusable, OSError) as error:
            return "FAIL", str(error)
        return "OK", f"no store uses the {place} yet"
    except (StoreUnusable, StoreFailed, OSError):
        return "WARN", "the owner of the files cannot be checked before the store is in order"
    if problem is None:
        groups = new_files(settings).set_aside_groups()
        count = sum(map(len, groups.values()))
        return "OK", f"the {place} belongs to the store; {count} files are in quarantine"
    return "FAIL" if problem.kind == "unmarked" else "WARN", problem.text


async def _problem(settings: ApiSettings) -> Problem | None:
    """Return the first ownership problem that a start would report, or None.

    Raises ``_New``, and the errors of opening the store.
    """
    files = new_files(settings)
    if settings.store_kind == "sqlite":
        known = directories_of(settings.store_file)
        if known is None or ownership.FILES not in {each.key for each in known[1]}:
            raise _New
        secret, directories = known
        seat = seat_of(settings.store_file)
        return _first_of(facts_of(found_in(files), secret, seat, directories))
    from tuneserve_engine.store.redis.store import RedisStore

    def refuse() -> None:
        raise _New

    async with asyncio.timeout(_STORE_S):
        store = await RedisStore.open(
            settings.store,
            durability_asserted=settings.store_durability_asserted,
            before_new=refuse,
        )
        try:
            if await store.get_record(DirectoryRecord, ownership.FILES) is None:
                raise _New
            facts, problem = await Ownership(files, store).look()
            return problem or _first_of(facts)
        finally:
            await store.close()


def _first_of(facts: Facts) -> Problem | None:
    """Return the problem that a start would report first, or None."""
    return problem_of(facts) or (moved() if facts.has_moved else None)
