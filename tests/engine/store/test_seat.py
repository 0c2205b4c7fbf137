"""The seat of a store belongs to one file in one place."""

import hashlib
import shutil
from pathlib import Path

from tuneserve_engine.store.seat import seat_named, seat_of


def test_a_seat_is_sixteen_digits_of_a_digest() -> None:
    assert seat_named("redis://host") == hashlib.sha256(b"redis://host").hexdigest()[:16]


def test_a_file_keeps_its_seat_until_it_is_moved_copied_or_restored(tmp_path: Path) -> None:
    file, copy, link = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    file.write_bytes(b"store")
    seat = seat_of(file)
    file.write_bytes(b"more")
    link.symlink_to(file)
    assert seat_of(file) == seat_of(link) == seat
    shutil.copy(file, copy)
    assert seat_of(copy) != seat
    copy.rename(file)
    assert seat_of(file) != seat
