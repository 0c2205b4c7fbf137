"""Files in a bucket are whole or absent, wherever a process dies or a request fails."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.store.bucket_case import (
    ID,
    MEMBERS,
    OTHER,
    QUICK,
    ClockedBucket,
    HookedBucket,
    Killed,
    raising,
    read,
    store_of,
)
from tests.s3_server import S3Server
from tests.support.nightly import at_night
from tuneserve_engine.store.bucket import Bucket, Limits
from tuneserve_engine.store.object_files import ObjectFileStore
from tuneserve_engine.store.ownership import OWNER, claims
from tuneserve_engine.store.served_time import served_s

HOUR_S = 3600.0


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def keys(bucket: Bucket, prefix: str) -> set[str]:
    return {each.key for each in bucket.objects(prefix)}


def without_leftovers(url: str, cache: Path) -> ObjectFileStore:
    """The store a day later, after its clean-up: no member is left without a manifest."""
    bucket = HookedBucket(url)
    bucket.dated = lambda each: each.modified_s - 24 * HOUR_S
    # ``now_s`` is of a fresh object, whose date is a day old too: so all objects get older.
    late = {"s": 0.0}
    files = store_of(bucket, cache, clock=lambda: late["s"])
    files.ids(1)
    late["s"] = 500.0
    files._looked = (time.time(), late["s"])
    files.discard_partial()
    plain = Bucket(url, QUICK)
    named = set()
    for prefix in ("ids/", "quarantine/"):
        for each in plain.objects(prefix):
            manifest = json.loads(plain.get(each.key))
            file_id = each.key.rpartition("/")[2]
            named |= {f"files/{file_id}/{manifest['token']}/{name}" for name in manifest["sizes"]}
    assert keys(plain, "files/") == named
    assert keys(plain, "proofs/") == set()
    return store_of(plain, cache)


# --- processes that die, requests that fail ------------------------------------------------------

Steps = Callable[[ObjectFileStore, Path], object]


def publish(files: ObjectFileStore, folder: Path) -> None:
    staged = folder.parent / "staged"
    staged.mkdir(exist_ok=True)
    for name, data in MEMBERS.items():
        (staged / name).write_bytes(data)
    files.publish(staged, ID)


def written(files: ObjectFileStore) -> None:
    files.write(ID, MEMBERS)


def set_aside(files: ObjectFileStore) -> None:
    files.write(ID, MEMBERS)
    files.set_aside(ID, "group")


def nothing(files: ObjectFileStore) -> None:
    pass


OPERATIONS: dict[str, tuple[Callable[[ObjectFileStore], None], Steps, bool]] = {
    "write": (nothing, lambda files, _: files.write(ID, MEMBERS), True),
    "publish": (nothing, publish, True),
    "delete": (written, lambda files, _: files.delete(ID), True),
    "set aside": (written, lambda files, _: files.set_aside(ID, "group"), False),
    "bring back": (set_aside, lambda files, _: files.bring_back(ID, "group"), False),
    "delete group": (set_aside, lambda files, _: files.delete_group("group"), True),
}
"""Each with its preparation, and whether the file may be gone afterwards."""
EIO = OSError(5, "Input/output error")


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    ("operation", "error"),
    [
        *((operation, Killed()) for operation in OPERATIONS),
        ("write", EIO),
        *(at_night(operation, EIO) for operation in list(OPERATIONS)[1:]),
    ],
    ids=str,
)
def test_a_file_is_whole_or_absent_if_any_request_is_the_last(
    s3_url: str,
    tmp_path: Path,
    operation: str,
    error: BaseException,
    moment: str,
) -> None:
    prepare, steps, may_vanish = OPERATIONS[operation]
    for call in range(20):
        url, cache = f"{s3_url}/{call}", tmp_path / str(call)
        bucket = HookedBucket(url)
        files = store_of(bucket, cache)
        files.write(OTHER, {"a": b"other"})
        prepare(files)
        bucket.calls.clear()
        setattr(bucket, moment, raising(error, {call}))
        try:
            steps(files, cache)
            survived = True
        except (Killed, OSError):
            survived = False
        again = without_leftovers(url, cache)
        assert read(again, OTHER) == {"a": b"other"}
        aside = [each for ids in again.set_aside_groups().values() for each in ids]
        assert may_vanish or again.ids() | set(aside) == {ID, OTHER}
        if ID in again.ids():
            assert read(again, ID) == MEMBERS
        for group in again.set_aside_groups():
            again.bring_back(ID, group)
            assert read(again, ID) == MEMBERS
            assert again.set_aside_groups() == {}
        again.delete(ID)
        again.write(ID, MEMBERS)
        assert read(again, ID) == MEMBERS
        if call >= len(bucket.calls):
            assert survived and call >= 3
            return
    pytest.fail("more requests than the test expects")


def test_a_group_that_was_half_set_aside_takes_no_file_with_it(s3_url: str, cache: Path) -> None:
    bucket = HookedBucket(s3_url)
    files = store_of(bucket, cache)
    files.write(ID, MEMBERS)
    bucket.before = lambda number, what: (
        raising(Killed(), {number})(number, what) if (what == f"delete ids/{ID}") else None
    )
    with pytest.raises(Killed):
        files.set_aside(ID, "group")
    again = store_of(Bucket(s3_url, QUICK), cache)
    assert (again.ids(), again.set_aside_groups()) == ({ID}, {"group": [ID]})
    again.delete_group("group")
    assert again.set_aside_groups() == {}
    assert read(again, ID) == MEMBERS


def test_a_lost_answer_to_the_manifest_costs_no_member(s3_url: str, cache: Path) -> None:
    """The second attempt finds the manifest of the first, which is its own."""
    bucket = HookedBucket(s3_url)
    sent = hide_first_answer(bucket)
    files = store_of(bucket, cache)
    files.write(ID, MEMBERS)
    assert len(sent) == 2
    assert read(files, ID) == MEMBERS


def test_a_manifest_that_appears_after_its_members_went_is_withdrawn(
    s3_url: str, cache: Path
) -> None:
    """The first attempt is carried out unheard, the id is deleted, the second makes it again."""
    bucket = HookedBucket(s3_url)
    hide_first_answer(bucket, lambda: store_of(Bucket(s3_url, QUICK), cache).delete(ID))
    files = store_of(bucket, cache)
    with pytest.raises(OSError, match="a part of the file was deleted"):
        files.write(ID, MEMBERS)
    assert files.ids() == set()


def hide_first_answer(bucket: Bucket, then: Callable[[], None] = lambda: None) -> list[object]:
    """Lose the answer to the first conditional write, then call ``then``; return all answers."""
    put, answers = bucket._unrepeated.put, list[object]()

    class Deaf:
        def put(self, *given: object, **named: object) -> object:
            try:
                answers.append(put(*given, **named))  # type: ignore[arg-type]
            except Exception as error:
                answers.append(error)
                raise
            if len(answers) == 1:
                then()
                raise ValueError("the answer was lost")
            return answers[-1]

    bucket._unrepeated = Deaf()  # type: ignore[assignment]
    return answers


# --- several writers -----------------------------------------------------------------------------


def together(calls: list[Callable[[], object]]) -> None:
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert errors == []


def test_writers_at_once_all_succeed_and_leave_one_set_of_members(
    s3_url: str, tmp_path: Path
) -> None:
    for index in range(5):
        barrier = threading.Barrier(4)
        url = f"{s3_url}/{index}"

        def meet(number: int, what: str, barrier: threading.Barrier = barrier) -> None:
            if what.startswith("create ids/"):
                barrier.wait(timeout=10)

        buckets = [HookedBucket(url) for _ in range(4)]
        for bucket in buckets:
            bucket.before = meet
        stores = [store_of(each, tmp_path / "cache" / str(index)) for each in buckets]
        together([lambda files=files: files.write(ID, MEMBERS) for files in stores])
        assert len(keys(Bucket(url), "files/")) == len(MEMBERS)
        assert read(stores[0], ID) == MEMBERS


def test_a_writer_a_deleter_and_readers_never_see_a_torn_file(s3_url: str, tmp_path: Path) -> None:
    until_s = time.monotonic() + 2.0
    seen = {"whole": 0, "absent": 0}

    def again(call: Callable[[], object]) -> Callable[[], None]:
        def loop() -> None:
            while time.monotonic() < until_s:
                call()

        return loop

    def look(files: ObjectFileStore) -> None:
        folder = files.path(ID)
        try:
            found = {name: (folder / name).read_bytes() for name in MEMBERS}
        except FileNotFoundError:
            seen["absent"] += 1
        else:
            assert found == MEMBERS
            seen["whole"] += 1

    stores = [store_of(Bucket(s3_url), tmp_path / "cache") for _ in range(4)]
    together(
        [
            again(lambda: stores[0].write(ID, MEMBERS)),
            again(lambda: (stores[1].delete(ID), time.sleep(0.02))),
            again(lambda: look(stores[2])),
            again(lambda: look(stores[3])),
        ]
    )
    assert seen["whole"] > 5 and seen["absent"] > 5
    stores[0].write(ID, MEMBERS)
    assert read(stores[3], ID) == MEMBERS
    without_leftovers(s3_url, tmp_path / "cache")


# --- leftovers -----------------------------------------------------------------------------------


def test_a_write_that_took_too_long_is_not_published(s3_url: str, cache: Path) -> None:
    bucket = HookedBucket(s3_url)
    now = {"s": 0.0}

    def pass_time(number: int, what: str) -> None:
        if what.endswith("/adapter_config.json"):
            now["s"] += 1801

    bucket.after = pass_time
    files = store_of(bucket, cache, clock=lambda: now["s"])
    with pytest.raises(OSError, match="longer than 1800 s"):
        files.write(ID, MEMBERS)
    assert files.ids() == set() and keys(bucket, "files/") == set()


def test_members_removed_while_a_process_was_suspended_end_the_write(
    s3_url: str, cache: Path
) -> None:
    """It was suspended between its look at the clock and its manifest."""
    bucket = HookedBucket(s3_url)
    now = {"s": 0.0}

    def suspend(number: int, what: str) -> None:
        if what.startswith("create ids/"):
            now["s"] += 2 * HOUR_S
            Bucket(s3_url).delete(sorted(keys(Bucket(s3_url), "files/")))

    bucket.before = suspend
    files = store_of(bucket, cache, clock=lambda: now["s"])
    with pytest.raises(OSError, match="a part of the file was deleted"):
        files.write(ID, MEMBERS)
    assert files.ids() == set()


def leave(bucket: Bucket, token: str, file_id: str = ID) -> str:
    """A member of a writer that was killed."""
    key = f"files/{file_id}/{token}/adapter.safetensors"
    bucket.put_object(key, b"half")
    return key


def test_only_old_members_without_a_manifest_are_leftovers(s3_url: str, cache: Path) -> None:
    bucket = ClockedBucket(s3_url)
    files = store_of(bucket, cache, clock=lambda: bucket.now_s)
    files.write(ID, MEMBERS)
    files.write(OTHER, MEMBERS)
    files.set_aside(OTHER, "group")
    old = {
        leave(bucket, "1" * 32),
        leave(bucket, "2" * 32, OTHER),
        leave(bucket, "3" * 32, "a" * 32),
    }
    bucket.now_s += HOUR_S - 100
    young = {leave(bucket, "4" * 32), leave(bucket, "5" * 32, "b" * 32)}
    bucket.now_s += 104
    files.discard_partial()
    left = keys(bucket, "files/")
    assert not left & old and left >= young
    assert len(left) == len(young) + 2 * len(MEMBERS)
    assert read(files, ID) == MEMBERS
    files.bring_back(OTHER, "group")
    assert read(files, OTHER) == MEMBERS


@pytest.mark.parametrize("moved", ["published", "set aside", "brought back"])
def test_a_manifest_that_moves_during_the_clean_up_keeps_its_members(
    s3_url: str, cache: Path, moved: str
) -> None:
    """Before whichever request of the clean-up it moves."""
    for call in range(20):
        bucket = ClockedBucket(f"{s3_url}/{call}")
        files = store_of(bucket, cache, clock=lambda bucket=bucket: bucket.now_s)
        leave(bucket, "1" * 32)  # so that manifests are read, and not only listed
        if moved != "published":
            files.write(ID, MEMBERS)
        if moved == "brought back":
            files.set_aside(ID, "group")
        bucket.now_s += 2 * HOUR_S
        step = {
            "published": lambda files=files: files.write(ID, MEMBERS),
            "set aside": lambda files=files: files.set_aside(ID, "group"),
            "brought back": lambda files=files: files.bring_back(ID, "group"),
        }[moved]
        bucket.calls.clear()
        is_done = False

        def before(
            number: int,
            what: str,
            call: int = call,
            bucket: ClockedBucket = bucket,
            step: Callable[[], object] = step,
        ) -> None:
            nonlocal is_done
            if number == call:
                is_done = True
                bucket.before = lambda number, what: None
                step()

        bucket.before = before
        files.discard_partial()
        if not is_done:
            assert call >= 6
            return
        files.bring_back(ID, "group")
        assert read(files, ID) == MEMBERS
    pytest.fail("more requests than the test expects")


def test_leftovers_are_looked_for_every_ten_minutes(s3_url: str, cache: Path) -> None:
    bucket = ClockedBucket(s3_url)
    files = store_of(bucket, cache, clock=lambda: bucket.now_s)
    counts = []
    for _ in range(3):
        bucket.calls.clear()
        files.discard_partial()
        counts.append(bucket.calls.count("list files/"))
        bucket.now_s += 400
    assert counts == [1, 0, 1]


# --- dates ---------------------------------------------------------------------------------------

ROUNDED = {
    "down": lambda s: float(int(s)),
    "up": lambda s: float(int(s) + (s > int(s))),
    "near": lambda s: float(round(s)),
    "exact": lambda s: s,
}


@pytest.fixture(params=ROUNDED)
def clocked(request: pytest.FixtureRequest, s3_url: str) -> ClockedBucket:
    return ClockedBucket(s3_url, ROUNDED[request.param])


@pytest.mark.parametrize("second", [0.0, 0.01, 0.5, 0.99])
def test_no_rounded_date_makes_a_file_too_old(
    clocked: ClockedBucket, cache: Path, second: float
) -> None:
    clocked.now_s += second
    files = store_of(clocked, cache, clock=lambda: clocked.now_s)
    files.write(ID, MEMBERS)
    for age_s, expected in ((899.0, set()), (899.99, set()), (905.0, {ID})):
        late = store_of(clocked, cache, clock=lambda: clocked.now_s)
        clocked.now_s += age_s
        assert late.ids(older_than_s=900) == expected, age_s
        clocked.now_s -= age_s


def test_a_fast_clock_of_this_machine_makes_no_file_older(s3_url: str, cache: Path) -> None:
    bucket = ClockedBucket(s3_url)
    files = store_of(bucket, cache, clock=lambda: bucket.now_s)
    files.write(ID, MEMBERS)
    assert files.ids(older_than_s=900, now_s=bucket.now_s + 10_000) == set()
    bucket.now_s += 1000
    assert files.ids(older_than_s=900, now_s=bucket.now_s - 500) == set()  # nor does a slow one
    assert files.ids(older_than_s=900, now_s=bucket.now_s) == {ID}


@pytest.mark.parametrize("second", [0.0, 0.01, 0.5, 0.99])
def test_every_file_from_before_a_note_counts_as_such(
    clocked: ClockedBucket, cache: Path, second: float
) -> None:
    clocked.now_s += second
    files = store_of(clocked, cache)
    files.write(ID, MEMBERS)
    clocked.now_s += 0.001
    files.leave_note(".moved-a")
    clocked.now_s += 5
    files.write(OTHER, MEMBERS)
    assert files.ids_until(".moved-a") == {ID}


def test_a_file_that_was_in_quarantine_counts_as_from_before_any_note(
    s3_url: str, cache: Path
) -> None:
    """Its manifest is younger than the file."""
    bucket = ClockedBucket(s3_url)
    files = store_of(bucket, cache)
    files.write(ID, MEMBERS)
    files.set_aside(ID, "group")
    files.leave_note(".moved-a")
    bucket.now_s += 100
    files.bring_back(ID, "group")
    assert files.ids_until(".moved-a") == {ID}
    files.delete(ID)
    assert files.ids_until(".moved-a") == set()
    files.write(ID, MEMBERS)
    assert files.ids_until(".moved-a") == set()


@pytest.mark.parametrize("second", [0.0, 0.01, 0.5, 0.99])
def test_no_note_looks_older_than_it_is(clocked: ClockedBucket, cache: Path, second: float) -> None:
    """An owner's newest note is its lease."""
    clocked.now_s += second
    files = store_of(clocked, cache, clock=lambda: clocked.now_s)
    files.leave_note(f"{OWNER}{'a' * 32}-1-nonce")
    for age_s in (0.0, 0.3, 1.0, 119.0, 119.9):
        clocked.now_s += age_s
        for now_s in (files.now_s(), None):
            (found_s,) = claims(files, now_s).values()
            assert 0 <= found_s <= age_s and found_s >= age_s - 5
        clocked.now_s -= age_s


@pytest.mark.parametrize("step_s", [0.3, 1.0, 7.0])
def test_the_time_served_never_runs_ahead(
    clocked: ClockedBucket, cache: Path, step_s: float
) -> None:
    files = store_of(clocked, cache, clock=lambda: clocked.now_s)
    began_s = clocked.now_s
    while clocked.now_s < began_s + 20:
        assert served_s(files, "quarantine-x") <= clocked.now_s - began_s
        clocked.now_s += step_s
    clocked.now_s = began_s + 3599.5
    assert served_s(files, "quarantine-x") <= 3599.5
    clocked.now_s = began_s + 3610
    assert served_s(files, "quarantine-x") == 3600  # an hour is noted
    clocked.now_s += 100
    assert 3600 + 90 < served_s(files, "quarantine-x") <= 3610 + 100


# --- copies --------------------------------------------------------------------------------------


def test_a_large_member_comes_in_parts(s3_url: str, cache: Path) -> None:
    files = store_of(Bucket(s3_url), cache)
    data = bytes(range(256)) * (20 * 2**20 // 256) + b"end"
    assert files.write(ID, {"a": data}) == len(data)
    assert read(files, ID) == {"a": data}


def test_a_copy_is_read_once(s3_url: str, cache: Path) -> None:
    bucket = HookedBucket(s3_url)
    files = store_of(bucket, cache)
    files.write(ID, MEMBERS)
    read(files, ID)
    bucket.calls.clear()
    files.path(ID)
    store_of(bucket, cache).path(ID)  # another process on this machine
    assert bucket.calls == [f"get ids/{ID}"] * 2


def test_a_copy_of_a_deleted_file_is_not_served(s3_url: str, tmp_path: Path) -> None:
    files = store_of(Bucket(s3_url), tmp_path / "one")
    files.write(ID, MEMBERS)
    read(files, ID)
    elsewhere = store_of(Bucket(s3_url), tmp_path / "two")
    elsewhere.delete(ID)
    assert not files.path(ID).exists()
    files.write(OTHER, MEMBERS)
    read(files, OTHER)
    elsewhere.delete(OTHER)
    newer = {name: data.swapcase() for name, data in MEMBERS.items()}  # of the same sizes
    elsewhere.write(OTHER, newer)
    assert read(files, OTHER) == newer


@pytest.mark.parametrize("harm", ["shortened", "incomplete", "all lost"])
def test_a_damaged_copy_is_replaced(s3_url: str, cache: Path, harm: str) -> None:
    files = store_of(Bucket(s3_url), cache)
    files.write(ID, MEMBERS)
    folder = files.path(ID)
    if harm == "shortened":
        (folder / "adapter.safetensors").write_bytes(b"wei")
    elif harm == "incomplete":
        (folder / "adapter_config.json").unlink()
    else:
        for path in sorted(cache.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        cache.rmdir()
    assert read(files, ID) == MEMBERS


def test_a_member_that_is_shorter_than_its_manifest_says_is_not_copied(
    s3_url: str, cache: Path
) -> None:
    bucket = Bucket(s3_url, QUICK)
    files = store_of(bucket, cache)
    files.write(ID, {"a": b"0123456789"})
    (key,) = keys(bucket, "files/")
    bucket.put_object(key, b"01234")
    with pytest.raises(OSError, match="cut short"):
        files.path(ID)
    assert list(cache.iterdir()) == []


def test_a_manifest_without_its_members_is_absent_to_readers(s3_url: str, cache: Path) -> None:
    bucket = Bucket(s3_url, QUICK)
    files = store_of(bucket, cache)
    files.write(ID, MEMBERS)
    bucket.delete(sorted(keys(bucket, "files/")))
    assert not files.path(ID).exists()


def test_a_damaged_manifest_is_named(s3_url: str, cache: Path) -> None:
    bucket = Bucket(s3_url, QUICK)
    bucket.put_object(f"ids/{ID}", b"{}")
    with pytest.raises(
        OSError, match=rf"the manifest is damaged: .*; restore it: .{s3_url}/ids/{ID}"
    ):
        store_of(bucket, cache).path(ID)


def test_nothing_is_served_while_the_server_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a copy: its file may have been deleted meanwhile."""
    with S3Server(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        files = store_of(Bucket(server.url, Limits(0.3, 0.3)), tmp_path / "cache")
        files.write(ID, MEMBERS)
        read(files, ID)
        server.pause()
        calls: list[Callable[[], object]] = [
            lambda: files.path(ID),
            lambda: files.members(ID),
            lambda: files.write(OTHER, MEMBERS),
            lambda: files.delete(ID),
            files.ids,
            lambda: files.leave_note("x"),
            files.now_s,
        ]
        for call in calls:
            began_s = time.monotonic()
            with pytest.raises(OSError, match="no answer in time"):
                call()
            assert time.monotonic() - began_s < 8
        server.go_on()
        assert read(files, ID) == MEMBERS
        server.stop()
        for call in calls:
            with pytest.raises(OSError) as caught:
                call()
            assert not isinstance(caught.value, ConnectionError)
            assert "refused" in str(caught.value)
        assert (tmp_path / "cache" / ID).exists()  # it will be served again
