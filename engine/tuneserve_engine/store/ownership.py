"""The ownership of a directory of files, proved before every clean-up.

A clean-up deletes the files that its store does not name. It must be sure that the directory is
this store's: otherwise it deletes the files of another store.

The directory has two kinds of notes: empty subdirectories, or empty objects where the files are in
a bucket. ``.of-<mark>`` says which store the directory belongs to. ``.owner-<claim>``, with a claim
of ``<identity>-<generation>-<nonce>``, says how far that store had come: the identity is a hash of
its secret, and the generation grows for as long as the store is in use. The store records its
newest generations too, each before the directory gets it. So a store that is older than the
directory (restored from a copy) does not know the directory's generation; nor does a store that
went on from the same copy elsewhere. The age of the newest generation is the owner's lease.

Generations cannot tell a copy from its original if the copy starts first: then the original looks
older. Two more kinds of notes cover this case. A store that finds itself in another place
than it has recorded leaves ``.moved-<seat>``: for some days it spares every file that was there
before, because its original may name it. A store that is older than the directory, or has parted
from it, leaves ``.disputed-<claim>-<nonce>``: from then on neither store removes anything.
"""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tuneserve_engine.core.records import DirectoryRecord
from tuneserve_engine.store.base import Store
from tuneserve_engine.store.errors import StoreFailed, StoreReplaced, StoreUnusable
from tuneserve_engine.store.files import FULL
from tuneserve_engine.store.files_base import Files
from tuneserve_engine.store.served_time import forget, served_s

MARK = ".of-"
OWNER = ".owner-"
DISPUTE = ".disputed-"
MOVED = ".moved-"
FILES = "files"
SEAT = "seat"
LEASE_S = 120.0
"""Seconds of silence after which an owner counts as gone, and another store may adopt the files."""
_RENEW_S = 30.0
_LOOKS = 5
_ADOPT = "stop the service that owns it, if there is one, and run: tuneserve files adopt"


class Claim(NamedTuple):
    identity: str
    generation: int
    nonce: str

    @property
    def note(self) -> str:
        return f"{OWNER}{self.identity}-{self.generation}-{self.nonce}"


class Problem(NamedTuple):
    """The reason why unused files are kept. ``kind`` is stable; numbers in ``text`` may change."""

    kind: str
    text: str


@dataclass(frozen=True)
class Found:
    """The notes in the directory."""

    marks: Collection[str]
    claims: Mapping[Claim, float]  # with the age of each in seconds
    disputes: Mapping[str, float]  # with the age of each in seconds
    place: str  # what messages call the directory
    option: str  # the option that chooses it


@dataclass(frozen=True)
class Facts(Found):
    """The notes in the directory, and the store's own records."""

    identity: str
    mark: str | None
    generations: Mapping[int, str]  # with the nonce of each
    seat: str
    """The store's place now."""
    known_seat: str | None
    """The store's last recorded place: there, no other store could name its files."""

    @property
    def has_moved(self) -> bool:
        return self.known_seat not in (None, self.seat)

    @property
    def dispute(self) -> str:
        """The prefix of this store's disputes; it is unique because the newest claim is."""
        known = max(self.generations, default=0)
        return f"{known}-{self.generations.get(known, '')}-"


class Adopted(NamedTuple):
    """The number of files in an adopted directory, and of those that the new owner names."""

    files: int
    named: int


def identity_of(secret: bytes) -> str:
    """Return a hash of the store's secret that may be shown."""
    return hmac.new(secret, b"owner of files", hashlib.sha256).hexdigest()[:32]


def marks(files: Files) -> set[str]:
    return set(files.notes(MARK))


def claims(files: Files, now_s: float | None = None) -> dict[Claim, float]:
    found = {}
    for text, age_s in files.notes(OWNER, now_s).items():
        identity, _, rest = text.partition("-")
        generation, _, nonce = rest.partition("-")
        if generation.isdecimal():
            found[Claim(identity, int(generation), nonce)] = age_s
    return found


def found_in(files: Files, now_s: float | None = None) -> Found:
    """Return the directory's notes; ages are as of ``now_s``, or by the clock of this machine."""
    disputes = files.notes(DISPUTE, now_s)
    return Found(marks(files), claims(files, now_s), disputes, files.place, files.option)


def facts_of(
    found: Found, secret: bytes, seat: str, directories: Collection[DirectoryRecord]
) -> Facts:
    """Combine the directory's notes with all ``DirectoryRecord``s of the store."""
    known = {each.key: each.mark for each in directories}
    mark, known_seat = known.pop(FILES, None), known.pop(SEAT, None)
    generations = {int(key.removeprefix(f"{FILES}@")): nonce for key, nonce in known.items()}
    identity = identity_of(secret)
    return Facts(
        **vars(found),
        identity=identity,
        mark=mark,
        generations=generations,
        seat=seat,
        known_seat=known_seat,
    )


def problem_of(facts: Facts) -> Problem | None:
    """Return why the store may not remove files from the directory.

    Returns None if the store owns the directory, or may be the first to claim it.
    """
    strangers = [each for each in facts.claims if each.identity != facts.identity]
    if strangers or set(facts.marks) - {facts.mark, facts.identity}:
        return Problem(
            "foreign",
            f"the {facts.place} is another store's, or was (two services with one {facts.option}, "
            "or a store that was replaced); nothing in it is deleted. To make it this store's, "
            f"{_ADOPT}",
        )
    if facts.mark not in facts.marks:
        return Problem(
            "unmarked",
            f"the {facts.place} lacks the mark of this store, {MARK}{facts.mark}: it is another, "
            "is not mounted, or lost it; nothing in it is deleted. Put back what belongs there, or "
            "run: tuneserve files adopt",
        )
    reached = max((each.generation for each in facts.claims), default=0)
    known = max(facts.generations, default=0)
    if reached > known:
        return Problem(
            "older",
            f"the store is older than its {facts.place} (generation {known}, where that is at "
            f"{reached}): it was restored from a copy, and does not name what was saved since; "
            f"nothing is deleted. If the service is to go on with this store, {_ADOPT}",
        )
    nonces = {each.nonce for each in facts.claims if each.generation == reached}
    is_known = nonces == {facts.generations.get(reached)} and reached >= known - 1
    if not is_known and (reached or known > 1):  # otherwise it is claimed for the first time
        return Problem(
            "parted",
            f"the store and its {facts.place} have gone different ways (one of them was restored "
            "from a copy, or a copy of the store uses the files too); nothing is deleted. To go on "
            f"with this store, {_ADOPT}",
        )
    if facts.disputes:
        return Problem(
            "disputed",
            "a copy of this store, or the store that this one is a copy of, was started with the "
            f"same {facts.place}, and names others of them; neither deletes anything. Stop "
            "that one, wait for two minutes, and run here: tuneserve files adopt",
        )
    return None


def moved(kept: int | None = None) -> Problem:
    """Return the problem of a store that has changed its place.

    ``kept`` is the number of unused files that the store keeps for this reason.
    """
    return Problem(
        "moved",
        "the store was copied, restored or moved, or its Redis was started again: another store "
        "may name the files that were there before, and unused ones among them"
        + ("" if kept is None else f", {kept} now,")
        + " are kept for quarantine_s. If this is the only store that goes on, run: tuneserve "
        "files adopt",
    )


class Ownership:
    """The ownership of one directory by one store. Any number of processes may share both."""

    def __init__(
        self, files: Files, store: Store, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._files = files
        self._store = store
        self._clock = clock
        self._present: frozenset[str] | None = None  # files at this process's last proof
        self._claimed_s = clock()
        self._disputed_s: float | None = None

    async def look(self) -> tuple[Facts, Problem | None]:
        """Return the facts and their ``problem_of``. Changes nothing."""
        facts = await self._facts()
        problem = problem_of(facts)
        for _ in range(_LOOKS):  # another process may be renewing the lease
            if problem is None:
                break
            before = set(facts.claims)
            facts = await self._facts()
            problem = problem_of(facts)
            if set(facts.claims) == before:
                break
        return facts, problem

    async def prove(self, present: Collection[str]) -> Problem | None:
        """Return the ``problem_of`` this store, and renew the lease if it is the owner.

        Claims a new generation every ``_RENEW_S``, and whenever ``present`` has files that it did
        not have before, so that a store older than these files is detected. A store that finds
        itself older than the directory, or parted from it, disputes the directory.
        """
        facts, problem = await self.look()
        try:
            if problem is None or problem.kind == "disputed":
                await self._take_seat(facts)
                await self._renew(facts, frozenset(present))
            elif problem.kind in ("older", "parted"):
                await self._dispute(facts)
        except StoreReplaced:
            raise
        except StoreFailed:
            pass  # a full disk: the proof holds all the same, and deleting files makes room
        except OSError as error:
            if error.errno not in FULL:
                raise
        return problem

    async def spared(self, enough_s: float) -> set[str]:
        """Return the files that another store may name.

        These are the files that were there when this store came to its place. Returns an empty set
        if the store has not moved, or has been in its place for ``enough_s``.
        """
        facts = await self._facts()
        if not facts.has_moved:
            return set()
        if await asyncio.to_thread(served_s, self._files, f"moved-{facts.seat}") >= enough_s:
            await self._settle(facts.seat)
            return set()
        try:
            return await asyncio.to_thread(self._files.ids_until, f"{MOVED}{facts.seat}")
        except FileNotFoundError:  # a full disk had no room for that note
            return await asyncio.to_thread(self._files.ids)

    async def adopt(self) -> Adopted:
        """Make this store the owner. Raises ``StoreUnusable`` while another owner is alive."""
        now_s = await asyncio.to_thread(self._files.now_s)
        facts = await self._facts(now_s)
        known = {(facts.identity, *each) for each in facts.generations.items()}
        alive_s = [age_s for claim, age_s in facts.claims.items() if claim not in known]
        alive_s += [
            age_s for name, age_s in facts.disputes.items() if not name.startswith(facts.dispute)
        ]
        if min(alive_s, default=LEASE_S) < LEASE_S:
            raise StoreUnusable(
                f"the {facts.place} has an owner that was alive {min(alive_s):.0f} s ago; stop "
                f"that service, wait until it was silent for {LEASE_S:.0f} s, and try again; or "
                f"give this one a {facts.option} of its own"
            )
        mark = facts.mark or facts.identity
        await asyncio.to_thread(self._files.leave_note, f"{MARK}{mark}")
        await self._store.put_new_record(DirectoryRecord(FILES, mark))
        reached = max((each.generation for each in facts.claims), default=0)
        await self._claim(facts, max(reached, *facts.generations, 0) + 1)
        others = [f"{MARK}{other}" for other in set(facts.marks) - {mark}]
        await self._remove(others + [f"{DISPUTE}{name}" for name in facts.disputes])
        await self._settle(facts.seat)
        present = await asyncio.to_thread(self._files.ids)
        return Adopted(len(present), len(present & await self._store.files_in_use()))

    async def _facts(self, now_s: float | None = None) -> Facts:
        # The directory is read first: the store learns of each claim before the directory does.
        found = await asyncio.to_thread(found_in, self._files, now_s)
        secret, seat = await self._store.secret(), await self._store.seat()
        return facts_of(
            found, secret, seat, (await self._store.page_of_records(DirectoryRecord)).items
        )

    # --- the seat ---------------------------------------------------------------------------------

    async def _take_seat(self, facts: Facts) -> None:
        if facts.known_seat is None:
            await self._store.put_new_record(DirectoryRecord(SEAT, facts.seat, parent=FILES))
        elif facts.has_moved and facts.seat not in await asyncio.to_thread(
            self._files.notes, MOVED
        ):
            await asyncio.to_thread(self._files.leave_note, f"{MOVED}{facts.seat}")

    async def _settle(self, seat: str) -> None:
        """Record the store's place as settled: from now on no other store can name its files."""
        await self._store.put_record(DirectoryRecord(SEAT, seat, parent=FILES))
        found = await asyncio.to_thread(self._files.notes, MOVED)
        await self._remove(f"{MOVED}{each}" for each in found)
        await asyncio.to_thread(forget, self._files, "moved-")

    async def _remove(self, notes: Iterable[str]) -> None:
        for each in notes:
            await asyncio.to_thread(self._files.remove_note, each)

    # --- the lease --------------------------------------------------------------------------------

    async def _renew(self, facts: Facts, present: frozenset[str]) -> None:
        reached = {each.generation for each in facts.claims}
        known = max(facts.generations, default=0)
        if known and known not in reached:  # its process died, or has yet to leave the note
            await self._claim(facts, known)
        elif (
            self._present is None
            or present - self._present
            or self._clock() - self._claimed_s >= _RENEW_S
        ):
            await self._claim(facts, known + 1)
        self._present = present

    async def _claim(self, facts: Facts, generation: int) -> None:
        nonce = secrets.token_hex(4)
        stored = await self._store.put_new_record(
            DirectoryRecord(f"{FILES}@{generation}", nonce, parent=FILES)
        )
        claim = Claim(facts.identity, generation, stored.mark)
        await asyncio.to_thread(self._files.leave_note, claim.note)
        self._claimed_s = self._clock()
        for old in facts.claims:
            if old != claim:
                await asyncio.to_thread(self._files.remove_note, old.note)
        for each in facts.generations:
            if each < generation - 1:  # keep the last but one: another process may have read it
                await self._store.delete_record(DirectoryRecord, f"{FILES}@{each}")

    async def _dispute(self, facts: Facts) -> None:
        """Leave or renew a note that this store, which is not the owner, is alive."""
        now_s = self._clock()
        if self._disputed_s is not None and now_s - self._disputed_s < _RENEW_S:
            return
        name = f"{facts.dispute}{secrets.token_hex(4)}"
        await asyncio.to_thread(self._files.leave_note, f"{DISPUTE}{name}")
        self._disputed_s = now_s
        for old in facts.disputes:
            if old.startswith(facts.dispute):
                await asyncio.to_thread(self._files.remove_note, f"{DISPUTE}{old}")
