"""Requests to a bucket end in time, are repeated where that is safe, and say why they failed."""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.s3_proxy import Plan, S3Proxy, some
from tests.s3_server import BUCKET, S3Server, environment
from tuneserve_engine.store.bucket import Bucket, Creation, Limits

QUICK = Limits(request_s=2.0, retry_s=3.0)


@pytest.fixture
def proxied(
    s3_server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., object]:
    """Opens a bucket behind a proxy with this plan of faults."""

    @contextmanager
    def opened(plan: Plan, limits: Limits = QUICK) -> Iterator[tuple[Bucket, S3Proxy]]:
        with S3Proxy(s3_server.port, plan) as proxy:
            for name, value in environment(proxy.port).items():
                monkeypatch.setenv(name, value)
            yield Bucket(s3_url, limits), proxy
            assert proxy.disagreements == []

    return opened


def test_objects_are_read_listed_dated_and_deleted(s3_url: str) -> None:
    bucket = Bucket(s3_url)
    began_s = time.time()
    bucket.put_object("a/x", b"0123456789")
    bucket.put_object("a/y", b"")
    assert bucket.get("a/x") == b"0123456789"
    assert bucket.get("a/y") == b""
    assert bucket.get_range("a/x", 2, 5) == b"234"
    assert {(each.key, each.size) for each in bucket.objects("a/")} == {("a/x", 10), ("a/y", 0)}
    assert abs(bucket.modified_s("a/x") - began_s) < 5
    bucket.delete(["a/x", "a/none"])
    bucket.delete([])
    assert [each.key for each in bucket.objects("a/")] == ["a/y"]
    assert bucket.objects("none/") == []


def test_a_file_on_disk_is_uploaded_in_parts(s3_url: str, tmp_path: Path) -> None:
    data = bytes(range(256)) * (12 * 2**20 // 256)
    (tmp_path / "file").write_bytes(data)
    bucket = Bucket(s3_url)
    bucket.put_object("large", tmp_path / "file")
    assert bucket.get("large") == data


def test_more_objects_than_a_page_of_a_listing_are_listed(s3_server: S3Server, s3_url: str) -> None:
    client = s3_server.client(s3_url.rpartition("/")[2])
    for n in range(1001):
        client.put(f"many/{n}", b"")
    bucket = Bucket(s3_url)
    found = [each.key for each in bucket.objects("many/")]
    assert len(found) == 1001
    bucket.delete(found)
    assert bucket.objects("many/") == []


def test_a_store_without_bulk_deletions_can_be_used(
    proxied: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DISABLE_BULK_DELETE", "true")
    with proxied(lambda *_: "") as (bucket, proxy):  # type: ignore[attr-defined]
        bucket.put_object("a/x", b"")
        bucket.delete(["a/x", "a/none"])
        assert bucket.objects("a/") == []
        assert [each.split(" ")[0] for each in proxy.requests] == ["PUT", "DELETE", "DELETE", "GET"]


def test_prefixes_are_apart(s3_url: str) -> None:
    one, other = Bucket(f"{s3_url}/a"), Bucket(f"{s3_url}/ab")
    one.put_object("x/1", b"")
    assert other.objects("x/") == []
    assert [each.key for each in Bucket(s3_url).objects("a/")] == ["a/x/1"]


def test_only_the_first_conditional_write_counts(s3_url: str) -> None:
    bucket = Bucket(s3_url)
    assert bucket.create("x", b"first") == Creation(b"first", False)
    assert bucket.create("x", b"second") == Creation(b"first", False)
    assert bucket.get("x") == b"first"


def test_a_writable_bucket_passes_and_keeps_nothing(s3_url: str) -> None:
    bucket = Bucket(s3_url)
    bucket.prove_writable()
    assert bucket.objects("proofs/") == []


def test_a_store_without_conditional_writes_is_refused(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(s3_url)

    def ignore(key: str, data: bytes, **_: object) -> None:
        bucket.put_object(key, data)

    class Old:
        put = staticmethod(ignore)

    monkeypatch.setattr(bucket, "_unrepeated", Old())
    with pytest.raises(OSError, match=r"ignores If-None-Match.*use one with conditional"):
        bucket.prove_writable()


# --- faults --------------------------------------------------------------------------------------


def test_every_request_survives_faults(proxied: Callable[..., object]) -> None:
    with proxied(some(0.3, seed=1)) as (bucket, proxy):  # type: ignore[attr-defined]
        for n in range(20):
            key = f"x/{n}"
            bucket.put_object(key, b"0123456789" * n)
            assert bucket.get(key) == b"0123456789" * n
            assert bucket.create(f"{key}-new", b"%d" % n).content == b"%d" % n
            assert bucket.modified_s(key) > 0
            assert bucket.get_range(f"{key}-new", 0, 1) == (b"%d" % n)[:1]
        assert len(bucket.objects("x/")) == 40
        bucket.delete([each.key for each in bucket.objects("x/")])
        assert bucket.objects("x/") == []
        assert sum(proxy.counts[kind] for kind in ("500", "cut", "unanswered", "reset")) > 20


def test_a_conditional_write_knows_its_own_object_after_a_lost_answer(
    proxied: Callable[..., object],
) -> None:
    def lost(method: str, path: str, before: int) -> str:
        return "unanswered" if method == "PUT" and before == 0 else ""

    with proxied(lost) as (bucket, _):  # type: ignore[attr-defined]
        assert bucket.create("x", b"mine") == Creation(b"mine", True)
        assert bucket.create("x", b"other").content == b"mine"


@pytest.mark.parametrize("verb", ["get", "put_object", "create", "objects", "delete", "modified_s"])
def test_a_refusal_says_so_at_once_and_holds_no_secret(
    proxied: Callable[..., object], verb: str
) -> None:
    with proxied(lambda *_: "403") as (bucket, _):  # type: ignore[attr-defined]
        call = getattr(bucket, verb)
        given = {"put_object": ("x", b""), "create": ("x", b""), "delete": (["x"],)}.get(
            verb, ("x",)
        )
        began_s = time.monotonic()
        with pytest.raises(PermissionError, match=r"cannot .* an object: 403") as caught:
            call(*given)
        assert time.monotonic() - began_s < 1
        assert "secret" not in str(caught.value)
        assert str(caught.value.filename).startswith("s3://bucket/")
        assert "s3://" not in str(caught.value.strerror)  # clients may read it


def test_a_missing_object_is_told_from_a_missing_bucket(s3_url: str) -> None:
    with pytest.raises(FileNotFoundError):
        Bucket(s3_url, QUICK).get("x")
    with pytest.raises(FileNotFoundError):
        Bucket(s3_url, QUICK).modified_s("x")
    missing = Bucket("s3://no-such-bucket/prefix", QUICK)
    calls: list[Callable[[], object]] = [
        lambda: missing.get("x"),
        lambda: missing.put_object("x", b""),
        lambda: missing.create("x", b""),
        lambda: missing.objects("x/"),
        missing.prove_writable,
    ]
    for call in calls:
        began_s = time.monotonic()
        with pytest.raises(OSError, match=r"404 Not Found \(NoSuchBucket\)") as caught:
            call()
        assert caught.value.errno == errno.EINVAL
        assert time.monotonic() - began_s < 1


def test_an_endpoint_without_tls_needs_a_word(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(OSError, match="AWS_ALLOW_HTTP=true") as caught:
        Bucket(s3_url, QUICK).get("x")
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize("both", [True, False])
def test_missing_credentials_are_named(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, both: bool
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    if both:
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    # The metadata service of a cloud, which is asked last. Here, nothing listens at its address.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OSError, match="no credentials were found: set AWS_ACCESS_KEY_ID") as caught:
        Bucket(s3_url, QUICK).get("x")
    assert caught.value.errno == errno.EINVAL


def test_a_full_store_is_told_as_a_full_disk(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.exceptions import GenericError

    def full(*_: object, **__: object) -> None:
        raise GenericError("status code: 507 Insufficient: <Error><Code>XMinioStorageFull</Code>")

    bucket = Bucket(s3_url, QUICK)

    class Full:
        put = staticmethod(full)

    monkeypatch.setattr(bucket, "_store", Full())
    with pytest.raises(OSError, match="XMinioStorageFull") as caught:
        bucket.put_object("x", b"")
    assert caught.value.errno == errno.ENOSPC
    bucket.prove_writable()  # as with a full disk: making room needs the running service


def test_a_stopped_server_ends_every_request_within_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(request_s=0.5, retry_s=1.0)
    with S3Server(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        bucket = Bucket(f"s3://{BUCKET}/x", limits)
        bucket.put_object("x", b"")
        server.stop()
        for call in (lambda: bucket.get("x"), lambda: bucket.create("y", b"")):
            began_s = time.monotonic()
            with pytest.raises(OSError, match="refused") as caught:
                call()
            assert caught.value.errno == errno.EIO
            assert 0.5 < time.monotonic() - began_s < 4
