"""Checkpoint files in a bucket of an S3-compatible object store.

The objects, under the bucket's prefix:

- ``ids/<id>``: the manifest. It makes the id exist, and names its token and members.
- ``files/<id>/<token>/<member>``: a member. Each write has a fresh token, so writes share nothing.
- ``notes/<name>``: a note, empty.
- ``quarantine/<group>/<id>``: the manifest of a file that was set aside; its members stay.
- ``returned/<id>``: an empty object. The id was in quarantine, so its manifest is younger than it.

A write puts members first, the manifest last, and only if there is none: an id is complete or
absent. Members that no manifest names are leftovers, which ``discard_partial`` removes.

The store dates its objects, to the second. So every age here is a lower bound, by its own clock:
a rounded date, or a clock of this machine that is fast, deletes nothing too early.
"""

import errno
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import msgspec

from tuneserve_engine.process.failpoints import failpoint
from tuneserve_engine.store.bucket import PROOFS, Bucket, StoredObject
from tuneserve_engine.store.file_cache import FileCache
from tuneserve_engine.store.files import ABANDONED_S, is_file_id

_ERROR_S = 2.0
"""The most by which the time between two dates may be wrong: each is rounded to a second."""
_ATTEMPTS = 10
"""The number of attempts to copy a file that is deleted and written again all the time."""
_TIDY_S = 600.0
"""The time between two listings of all members: they cost money where there are many."""
_CLOCK_S = 600.0
"""The time for which a look at the store's clock is trusted."""


class Manifest(msgspec.Struct, frozen=True):
    """The content of an id: the token of its write, and the size of each member."""

    token: str
    sizes: dict[str, int]

    def keys(self, file_id: str) -> list[str]:
        return [f"files/{file_id}/{self.token}/{name}" for name in self.sizes]


class ObjectFileStore:
    """A store of sets of files in a bucket; ``cache`` holds copies of those that were read."""

    option = "--files-url"
    place = "bucket of files"
    remedy = "save again"

    def __init__(
        self, bucket: Bucket, cache: FileCache, *, clock: Callable[[], float] | None = None
    ) -> None:
        self._bucket = bucket
        self._cache = cache
        self._clock = clock or _elapsed_s
        self._looked: tuple[float, float] | None = None  # the store's time, and ours by the clock
        self._tidied_s = self._trimmed_s = -float("inf")

    @property
    def shown(self) -> str:
        return self._bucket.url

    # --- writing ---------------------------------------------------------------------------------

    def write(
        self, file_id: str, members: Mapping[str, bytes], *, spares_disk: bool = False
    ) -> int:
        """Store the members and return their size in bytes; see ``Files.write``.

        ``spares_disk`` makes no difference: nothing is written to a disk of ours.
        """
        _check_id(file_id)
        sizes = {name: len(data) for name, data in members.items()}
        if self._manifest(file_id) is None:
            self._upload(file_id, members, sizes)
        return sum(sizes.values())

    def is_short_of_room(self) -> bool:
        return False

    def staging(self) -> AbstractContextManager[Path]:
        return self._cache.staging()

    def publish(self, staged: Path, file_id: str) -> int:
        _check_id(file_id)
        members = {each.name: each for each in sorted(staged.iterdir())}
        sizes = {name: each.stat().st_size for name, each in members.items()}
        self._upload(file_id, members, sizes)
        return sum(sizes.values())

    def _upload(
        self, file_id: str, members: Mapping[str, bytes | Path], sizes: dict[str, int]
    ) -> None:
        started_s = self._clock()
        manifest = Manifest(secrets.token_hex(16), sizes)
        try:
            for key, data in zip(manifest.keys(file_id), members.values(), strict=True):
                self._bucket.put_object(key, data)
            self._check_fresh(started_s)
        except OSError as error:
            if error.errno != errno.EIO:  # then the store answers, so it can delete them too
                self._forget(manifest, file_id)
            raise
        failpoint("file-before-rename")
        content = msgspec.json.encode(manifest)
        # After an error the manifest may exist, and even appear later, so the members stay.
        made = self._bucket.create(f"ids/{file_id}", content)
        failpoint("file-after-rename")
        if made.content != content:  # another write of the same content came first
            self._forget(manifest, file_id)
        elif made.repeated or self._is_late(started_s):
            self._check_whole(file_id, manifest)

    def _is_late(self, started_s: float) -> bool:
        return self._clock() - started_s > ABANDONED_S / 2

    def _check_fresh(self, started_s: float) -> None:
        if self._is_late(started_s):
            raise OSError(
                errno.ETIME,
                f"the upload took longer than {ABANDONED_S / 2:g} s, after which its parts may "
                "have been removed as leftovers",
                self._bucket.url,
            )

    def _check_whole(self, file_id: str, manifest: Manifest) -> None:
        """Withdraw the manifest if members have been deleted since they were written."""
        found = {each.key for each in self._bucket.objects(f"files/{file_id}/{manifest.token}/")}
        if not found >= set(manifest.keys(file_id)):
            self._bucket.delete([f"ids/{file_id}"])
            raise OSError(errno.EIO, "a part of the file was deleted meanwhile", self._bucket.url)

    def _forget(self, manifest: Manifest, file_id: str) -> None:
        """Delete members that no manifest names; ``discard_partial`` does it if this fails."""
        with suppress(OSError):
            self._bucket.delete(manifest.keys(file_id))

    # --- reading ---------------------------------------------------------------------------------

    def path(self, file_id: str) -> Path:
        """Return the local directory with the id's members, after copying them here if need be.

        See ``Files.path``. Raises ``OSError`` while the bucket cannot be reached, even if there is
        a copy: the id may have been deleted.
        """
        for _ in range(_ATTEMPTS):
            manifest = self._manifest(file_id)
            if manifest is None:
                break
            token, sizes = manifest.token, manifest.sizes
            if (found := self._cache.find(file_id, token, sizes)) is not None:
                return found
            self._tidy_cache()
            folder = f"files/{file_id}/{token}"
            try:
                found = self._cache.add(
                    *(file_id, token, sizes),
                    lambda name, *span, folder=folder: self._bucket.get_range(
                        f"{folder}/{name}", *span
                    ),
                )
            except FileNotFoundError:
                continue  # deleted meanwhile, and perhaps written again
            if found is not None:
                return found
        self._cache.delete(file_id)
        return self._cache.path(file_id)

    def members(self, file_id: str) -> list[str]:
        manifest = self._manifest(file_id)
        return [] if manifest is None else sorted(manifest.sizes)

    def size(self, file_id: str) -> int:
        manifest = self._manifest(file_id)
        return 0 if manifest is None else sum(manifest.sizes.values())

    def ids(self, older_than_s: float = 0.0, now_s: float | None = None) -> set[str]:
        """Return the complete file ids, or those that are at least ``older_than_s`` old.

        The age is as of ``now_s`` or of now by the store's clock, whichever is earlier.
        """
        found = _ids_of(self._bucket.objects("ids/"))
        if older_than_s > 0:
            latest_s = self._latest_s(older_than_s, now_s)
            return {file_id for file_id, modified_s in found.items() if modified_s <= latest_s}
        return set(found)

    def ids_until(self, note: str) -> set[str]:
        left_s = self._bucket.modified_s(f"notes/{note}") + _ERROR_S
        found = _ids_of(self._bucket.objects("ids/"))
        returned = _ids_of(self._bucket.objects("returned/"))
        return {each for each, modified_s in found.items() if modified_s <= left_s} | (
            found.keys() & returned.keys()
        )

    def _manifest(self, file_id: str, folder: str = "ids") -> Manifest | None:
        _check_id(file_id)
        try:
            content = self._bucket.get(f"{folder}/{file_id}")
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(content, type=Manifest)
        except msgspec.MsgspecError as error:
            raise OSError(
                errno.EINVAL,
                f"the manifest is damaged: {error}; restore it",
                f"{self._bucket.url}/{folder}/{file_id}",
            ) from error

    # --- deleting --------------------------------------------------------------------------------

    def delete(self, file_id: str) -> None:
        manifest = self._manifest(file_id)
        if manifest is not None:
            self._bucket.delete([f"ids/{file_id}"])  # members are removed one by one
            self._bucket.delete([*manifest.keys(file_id), f"returned/{file_id}"])
        self._cache.delete(file_id)

    def discard_partial(self) -> None:
        """Remove leftovers, here and in the bucket; at most every ten minutes."""
        if self._clock() - self._tidied_s < _TIDY_S:
            return
        self._tidied_s = self._clock()
        old: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        tokens: defaultdict[str, set[str]] = defaultdict(set)
        latest_s = self._latest_s(ABANDONED_S)
        # Members first: a write may publish its manifest meanwhile.
        for each in self._bucket.objects("files/"):
            _, file_id, token, _ = each.key.split("/", 3)
            tokens[file_id].add(token)
            if each.modified_s <= latest_s:
                old[file_id][token].append(each.key)
        manifests = self._all_manifests()
        for file_id, parts in old.items():
            named = self._named(file_id, manifests.get(file_id, ()), tokens[file_id])
            self._bucket.delete([key for token in parts.keys() - named for key in parts[token]])
        proofs = self._bucket.objects(PROOFS)
        self._bucket.delete([each.key for each in proofs if each.modified_s <= latest_s])
        self._cache.trim(_ids_of(self._bucket.objects("ids/")))

    def _all_manifests(self) -> dict[str, list[str]]:
        """Return the keys of all manifests, by id."""
        found = defaultdict(list)
        # Ids twice: a file may be moved to quarantine, or back, between two listings.
        for prefix in ("ids/", "quarantine/", "ids/"):
            for each in self._bucket.objects(prefix):
                found[each.key.rpartition("/")[2]].append(each.key)
        return found

    def _named(self, file_id: str, keys: Iterable[str], tokens: Collection[str]) -> set[str]:
        """Return the tokens of the id that these manifests name."""
        keys = set(keys)
        if len(tokens) == 1 and keys:
            return set(tokens)  # read no manifest: the usual case
        found = [self._manifest(file_id, key.rpartition("/")[0]) for key in keys]
        if None in found:
            return set(tokens)  # it moved meanwhile: leave all of them for the next time
        return {each.token for each in found if each is not None}

    def _tidy_cache(self) -> None:
        """Remove local copies of deleted ids, at most every ten minutes.

        Here, because a worker calls ``discard_partial`` only at its start.
        """
        if self._clock() - self._trimmed_s >= _TIDY_S:
            self._trimmed_s = self._clock()
            self._cache.trim(_ids_of(self._bucket.objects("ids/")))

    def prove_writable(self) -> None:
        """Check the bucket, and that copies can be made here. Raises ``OSError``."""
        self._bucket.prove_writable()
        self._cache.prove_writable()

    # --- notes that processes leave each other ---------------------------------------------------

    def leave_note(self, name: str) -> None:
        self._bucket.create(f"notes/{name}", b"")  # conditional: an existing note keeps its age

    def remove_note(self, name: str) -> None:
        self._bucket.delete([f"notes/{name}"])

    def now_s(self) -> float:
        proof = f"{PROOFS}{secrets.token_hex(8)}"
        self._bucket.put_object(proof, b"")
        now_s = self._bucket.modified_s(proof)
        self._bucket.delete([proof])
        return now_s

    def notes(self, prefix: str, now_s: float | None = None) -> dict[str, float]:
        if now_s is None:
            now_s = self._recent_s()
        found = {}
        for each in self._bucket.objects("notes/"):
            name = each.key.removeprefix("notes/")
            if name.startswith(prefix):
                age_s = now_s - each.modified_s - _ERROR_S
                # No note is from the future: a negative age would say that the clock was set back.
                is_new = -2 * _ERROR_S <= age_s < 0
                found[name.removeprefix(prefix)] = 0.0 if is_new else age_s
        return found

    def _recent_s(self) -> float:
        """Return the time by the store's clock, from a look at it not long ago."""
        now_s = self._clock()
        if self._looked is None or now_s - self._looked[1] > _CLOCK_S:
            self._looked = self.now_s(), self._clock()
        return self._looked[0] + max(now_s - self._looked[1], 0.0)

    def _latest_s(self, age_s: float, now_s: float | None = None) -> float:
        """Return the latest date of an object that is at least this old."""
        recent_s = self._recent_s()
        return (recent_s if now_s is None else min(recent_s, now_s)) - age_s - _ERROR_S

    # --- quarantine ------------------------------------------------------------------------------

    def set_aside(self, file_id: str, group: str) -> None:
        _check_id(file_id)
        with suppress(FileNotFoundError):
            content = self._bucket.get(f"ids/{file_id}")
            self._bucket.put_object(f"quarantine/{group}/{file_id}", content)
            self._bucket.delete([f"ids/{file_id}"])

    def bring_back(self, file_id: str, group: str) -> None:
        _check_id(file_id)
        aside = f"quarantine/{group}/{file_id}"
        with suppress(FileNotFoundError):
            content = self._bucket.get(aside)
            self._bucket.put_object(f"returned/{file_id}", b"")
            if self._bucket.create(f"ids/{file_id}", content).content == content:
                self._bucket.delete([aside])

    def set_aside_groups(self) -> dict[str, list[str]]:
        found: defaultdict[str, list[str]] = defaultdict(list)
        for each in self._bucket.objects("quarantine/"):
            group, _, file_id = each.key.removeprefix("quarantine/").partition("/")
            if is_file_id(file_id):
                found[group].append(file_id)
        return {group: sorted(file_ids) for group, file_ids in found.items()}

    def delete_group(self, group: str) -> None:
        for file_id in self.set_aside_groups().get(group, ()):
            manifest = self._manifest(file_id, f"quarantine/{group}")
            self._bucket.delete([f"quarantine/{group}/{file_id}"])
            # The same if a process was killed while it set the file aside or brought it back.
            if manifest is not None and self._manifest(file_id) != manifest:
                self._bucket.delete([*manifest.keys(file_id), f"returned/{file_id}"])


def _elapsed_s() -> float:
    """Return the seconds since some time, those of a suspended machine included."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def _check_id(file_id: str) -> None:
    if not is_file_id(file_id):
        raise ValueError(f"{file_id!r} is no file id; expected 32 hexadecimal digits")


def _ids_of(objects: Iterable[StoredObject]) -> dict[str, float]:
    """Return the file ids that these objects are named after, and the date of each."""
    found = {each.key.rpartition("/")[2]: each.modified_s for each in objects}
    return {name: modified_s for name, modified_s in found.items() if is_file_id(name)}
