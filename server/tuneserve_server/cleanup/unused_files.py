"""The clean-up of files that nothing in the store names any more.

A file is deleted if the store has released it, moved into quarantine if it is not known why nothing
names it, and kept if it is not certain that this store owns the directory.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any

from tuneserve_engine.core.policies import UnusedPolicy
from tuneserve_engine.store.base import Store
from tuneserve_engine.store.files import QUARANTINE
from tuneserve_engine.store.files_base import Files
from tuneserve_engine.store.ownership import Adopted, Ownership, Problem, moved
from tuneserve_engine.store.served_time import forget, served_s

logger = logging.getLogger(__name__)

UNNAMED_S = 900.0
"""The age below which an unnamed file is left alone.

A recovery point's file exists before the store names it, and a backup of a running store lists the
files some minutes before or after it copies the store.
"""
FEW = 16
"""The number of files that may be set aside even if there are few files in all.

A process that was killed while it wrote leaves one file behind.
"""
_STAMP = "%Y%m%dT%H%M%SZ"
_ALLOWED = "-allowed"
_OF_CLEANING = ("share", "moved")
"""The kinds of problems that only a clean-up can find or resolve."""


DEFAULT_POLICY = UnusedPolicy()


class UnusedFiles:
    """The clean-up of one directory of files, for as long as its store owns the directory."""

    def __init__(
        self,
        store: Store,
        files: Files,
        policy: UnusedPolicy = DEFAULT_POLICY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._files = files
        self._policy = policy
        self._clock = clock
        self._ownership = Ownership(files, store)
        self._cleaning = asyncio.Lock()
        self.problem: Problem | None = None  # why unused files are kept, as of the last look

    async def prove(self) -> bool:
        """Return whether the store owns the directory, and renew the lease if it does.

        A change is logged. In either case, quarantined files that the store names are restored.
        """
        try:
            present = await asyncio.to_thread(self._files.ids)
            problem = await self._ownership.prove(present)
            await self._bring_back()
        except OSError as error:
            if isinstance(error, ConnectionError):  # the store's, not the directory's
                raise
            problem = Problem("unreadable", f"the {self._files.place} cannot be used: {error}")
        if problem is not None or (
            self.problem is not None and self.problem.kind not in _OF_CLEANING
        ):
            self._note(problem)
        return problem is None

    async def clean(
        self,
        older_than_s: float = UNNAMED_S,
        *,
        now_s: float | None = None,
        allowed: bool = False,
    ) -> None:
        """Remove unused files older than ``older_than_s``, and the partial files of killed writers.

        A file is unused if no checkpoint, sampler, recovery point or request that may run again
        names it. On a full disk, files that the store has released are removed at any age. Ages are
        as of ``now_s``: a pause since then makes no file older. With ``allowed``, files are set
        aside even if they exceed ``max_share``.

        Files are listed before the store is asked, so a file that appears in between is left
        alone: it belongs to a job that is not known here.
        """
        async with self._cleaning:
            if not await self.prove():
                return
            present = await asyncio.to_thread(self._files.ids)
            old = await asyncio.to_thread(self._files.ids, older_than_s, now_s)
            in_use = await self._store.files_in_use()
            released = await self._store.released_files() - in_use
            spared = await self._ownership.spared(self._policy.quarantine_s)
            await asyncio.to_thread(self._files.discard_partial)
            is_full = await asyncio.to_thread(self._files.is_short_of_room)
            free = present if is_full else old
            gone = await self._delete(free & released - spared) | (released - present)
            if gone:
                await self._store.forget_released(gone)
            unnamed = old - in_use - released - spared
            problem = await self._set_aside(unnamed, len(present), allowed)
            kept = old - in_use & spared
            self._note(problem or (moved(len(kept)) if kept else None))
            await asyncio.to_thread(self._end_quarantines)

    async def adopt(self) -> Adopted:
        """Adopt the directory as ``Ownership.adopt`` does."""
        async with self._cleaning:
            adopted = await self._ownership.adopt()
            await self.prove()
            return adopted

    async def status(self) -> dict[str, Any]:
        """Return the numbers of files and of quarantined files, and why unused files are kept."""
        present = await asyncio.to_thread(self._files.ids)
        groups = await asyncio.to_thread(self._files.set_aside_groups)
        return {
            "files": len(present),
            "quarantine": {group: len(ids) for group, ids in sorted(groups.items())},
            "kept": None if self.problem is None else self.problem.text,
        }

    async def _bring_back(self) -> None:
        groups = await asyncio.to_thread(self._files.set_aside_groups)
        if not any(groups.values()):
            return
        in_use = await self._store.files_in_use()
        for group, file_ids in groups.items():
            for file_id in in_use.intersection(file_ids):
                await asyncio.to_thread(self._files.bring_back, file_id, group)
                logger.warning(
                    "restored file %s from %s/%s: the store names it", file_id, QUARANTINE, group
                )

    async def _delete(self, file_ids: Collection[str]) -> set[str]:
        """Delete the files and return the ids of those that are gone now."""
        gone = set()
        for file_id in file_ids:
            try:
                await asyncio.to_thread(self._files.delete, file_id)
            except OSError as error:  # one failure does not stop the others
                logger.warning(
                    "file %s was not deleted; the next clean-up tries again: %s", file_id, error
                )
            else:
                logger.info("deleted file %s: it is no longer in use", file_id)
                gone.add(file_id)
        return gone

    async def _set_aside(
        self, file_ids: Collection[str], present: int, allowed: bool
    ) -> Problem | None:
        """Move files into quarantine, or return the problem if there would be too many."""
        groups = await asyncio.to_thread(self._files.set_aside_groups)
        before = sum(len(ids) for group, ids in groups.items() if not group.endswith(_ALLOWED))
        most = max(FEW, int(self._policy.max_share * (present + before)))
        if file_ids and before + len(file_ids) > most and not allowed:
            return self._too_many(len(file_ids), before, present, most)
        group = datetime.fromtimestamp(self._clock(), UTC).strftime(_STAMP)
        group += _ALLOWED if allowed else ""
        for file_id in file_ids:
            try:
                await asyncio.to_thread(self._files.set_aside, file_id, group)
            except OSError as error:
                logger.warning(
                    "file %s was not moved; the next clean-up tries again: %s", file_id, error
                )
            else:
                logger.warning(
                    "moved file %s to %s/%s: nothing in the store names it, and there is no record "
                    "of its release; it is deleted after %.0f s (quarantine_s)",
                    *(file_id, QUARANTINE, group, self._policy.quarantine_s),
                )
        return None

    def _too_many(self, found: int, before: int, present: int, most: int) -> Problem:
        return Problem(
            "share",
            f"nothing in the store names {found} of {present} files, and there is no record of "
            f"their release; with {before} in quarantine they are more than the {most} that a "
            "clean-up may set aside (max_unused_share), so they are kept. Check whether the store "
            "has lost data. If the files are superfluous, run: tuneserve files clean",
        )

    def _end_quarantines(self) -> None:
        groups = self._files.set_aside_groups()
        for group in filter(_is_ours, tuple(groups)):
            if served_s(self._files, f"{QUARANTINE}-{group}") >= self._policy.quarantine_s:
                self._files.delete_group(group)
                logger.info(
                    "deleted %d files of %s/%s: their time in quarantine is over",
                    *(len(groups.pop(group)), QUARANTINE, group),
                )
        forget(self._files, f"{QUARANTINE}-", but={f"{QUARANTINE}-{each}" for each in groups})

    def _note(self, problem: Problem | None) -> None:
        before, self.problem = self.problem, problem
        if problem is not None and (before is None or before.kind != problem.kind):
            logger.warning("unused files are kept: %s", problem.text)
        if problem is None and before is not None:
            logger.info("unused files are cleaned up again")


def _is_ours(group: str) -> bool:
    try:
        datetime.strptime(group.removesuffix(_ALLOWED), _STAMP)
    except ValueError:
        return False
    return True
