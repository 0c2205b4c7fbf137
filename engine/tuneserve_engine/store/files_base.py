"""The seam to checkpoint files: a directory (``files.py``) or a bucket (``object_files.py``)."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol


class Files(Protocol):
    """A store of sets of files, immutable once they exist, that processes share.

    A set of files has an id, and is complete or absent. All calls may raise ``OSError``, and may
    take as long as the disk or the network does.
    """

    @property
    def place(self) -> str:
        """The kind of place, without an article, for messages that strangers may read."""
        ...

    @property
    def shown(self) -> str:
        """The path or address of the place, for messages to the operator."""
        ...

    @property
    def option(self) -> str:
        """The option that chooses the place."""
        ...

    @property
    def remedy(self) -> str:
        """The advice to a client whose checkpoint was not saved."""
        ...

    def write(
        self, file_id: str, members: Mapping[str, bytes], *, spares_disk: bool = False
    ) -> int:
        """Store the members and return their size in bytes.

        Writing an existing id again changes nothing, because its content is the same. After an
        ``OSError``, the id is absent or complete, and can be written again. With ``spares_disk``,
        also raises ``OSError`` if the write would leave less than ``min_free_bytes`` on a disk.
        """
        ...

    def is_short_of_room(self) -> bool:
        """Return whether less than ``min_free_bytes`` is left."""
        ...

    def staging(self) -> AbstractContextManager[Path]:
        """Yield a local directory for members that are written piece by piece.

        The directory is removed at the end, unless it was published. If the process is killed,
        ``discard_partial`` removes it one hour after the last file was made in it.
        """
        ...

    def publish(self, staged: Path, file_id: str) -> int:
        """Make the staged files appear under a new id, complete and durable; return their size."""
        ...

    def discard_partial(self) -> None:
        """Remove the leftovers of writes and deletes that were killed more than an hour ago."""
        ...

    def path(self, file_id: str) -> Path:
        """Return the path of a local directory with the id's members.

        The directory does not exist if the id is absent. Raises ``ValueError`` for a text that is
        not in the format of ``new_file_id``.
        """
        ...

    def members(self, file_id: str) -> list[str]:
        """Return the names of the files stored under this id; empty if there are none."""
        ...

    def size(self, file_id: str) -> int:
        """Return the bytes of the id's members; 0 if the id is absent."""
        ...

    def ids(self, older_than_s: float = 0.0, now_s: float | None = None) -> set[str]:
        """Return the complete file ids that are at least ``older_than_s`` old.

        The age is as of ``now_s``, or of now.
        """
        ...

    def ids_until(self, note: str) -> set[str]:
        """Return the complete file ids that were written before the note was left.

        Raises ``FileNotFoundError`` if there is no such note.
        """
        ...

    def delete(self, file_id: str) -> None:
        """Remove the id's files, all at once; a no-op if there are none."""
        ...

    def prove_writable(self) -> None:
        """Check that this process can write here. Raises ``OSError`` if it cannot.

        A full disk passes: making room needs the running service.
        """
        ...

    # --- notes that processes leave each other ---------------------------------------------------

    def leave_note(self, name: str) -> None:
        """Leave a note of that name; a no-op if it exists."""
        ...

    def remove_note(self, name: str) -> None: ...

    def now_s(self) -> float:
        """Return the time by the clock that dates the files, which may be another machine's."""
        ...

    def notes(self, prefix: str, now_s: float | None = None) -> dict[str, float]:
        """Return the notes that begin with the prefix, without the prefix, and their ages.

        Ages are in seconds, as of ``now_s`` or of now.
        """
        ...

    # --- quarantine ------------------------------------------------------------------------------

    def set_aside(self, file_id: str, group: str) -> None:
        """Move the id's files, unchanged, to ``quarantine/<group>/``; a no-op if there are none."""
        ...

    def bring_back(self, file_id: str, group: str) -> None:
        """Move the id's files back out of quarantine.

        A no-op if the group has none, or if the id exists again.
        """
        ...

    def set_aside_groups(self) -> dict[str, list[str]]:
        """Return the file ids in quarantine, by group."""
        ...

    def delete_group(self, group: str) -> None:
        """Delete for good the files that were set aside in this group."""
        ...
