"""Settings that the API process and the worker share: their sources and what follows from them."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from tuneserve_engine.settings.common import (
    TINY_MODEL,
    CommonSettings,
    from_json,
    without_password,
)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DATA_DIR", "LOG_LEVEL", "STORE", "BASE_MODEL", "OTEL"):
        monkeypatch.delenv(f"TUNESERVE_{name}", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("tuneserve.toml").write_text('data_dir = "of-file"\nlog_level = "error"\nnew = 1\n')
    assert CommonSettings().data_dir == Path("of-file")
    monkeypatch.setenv("TUNESERVE_DATA_DIR", "of-environment")
    found = CommonSettings()
    assert (found.data_dir, found.log_level) == (Path("of-environment"), "error")
    assert CommonSettings(data_dir=Path("of-flag")).data_dir == Path("of-flag")


def test_paths_are_in_the_data_directory_unless_they_are_set() -> None:
    settings = CommonSettings(data_dir=Path("d"))
    assert [str(each) for each in (settings.files_dir, settings.store_file)] == [
        "d/files",
        "d/store.db",
    ]
    assert (settings.store_socket, settings.admin_socket) == (
        Path("d/store.sock"),
        Path("d/admin.sock"),
    )
    assert CommonSettings(data_dir=Path("d"), files_dir=Path("f")).files_dir == Path("f")


def test_the_address_of_a_store_is_redis_or_nothing() -> None:
    plain = CommonSettings(data_dir=Path("d"))
    assert (plain.store_kind, plain.store_shown) == ("sqlite", "d/store.db")
    redis = CommonSettings(store="redis://:secret@host:6379/0")
    assert (redis.store_kind, redis.store_shown) == ("redis", "redis://***@host:6379/0")
    assert "secret" not in repr(redis)
    with pytest.raises(ValidationError, match="must be empty, for SQLite") as refused:
        CommonSettings(store="postgres://user:secret@host")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("rediss://user:pass@host/0", "rediss://***@host/0"),
        ("redis://user:p@ss@host/0", "redis://***@host/0"),
        ("user:pass@host", "***@host"),
        ("unix:///run/redis.sock?password=secret&db=1", "unix:///run/redis.sock?password=***&db=1"),
    ],
)
def test_a_password_is_never_shown(address: str, shown: str) -> None:
    assert without_password(address) == shown


def test_a_base_model_has_a_name_and_a_tokenizer(tmp_path: Path) -> None:
    tiny = CommonSettings()
    assert (tiny.served_name, tiny.tokenizer_id) == ("tuneserve/tiny", str(TINY_MODEL.resolve()))
    hub = CommonSettings(base_model="someone/model")
    assert (hub.served_name, hub.tokenizer_id, hub.client_tokenizer_id) == ("someone/model",) * 3
    folder = tmp_path / "models--Org--Name" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    cached = CommonSettings(base_model=str(folder))
    assert (cached.served_name, cached.client_tokenizer_id) == ("abc", "Org/Name")
    assert cached.tokenizer_id == str(folder.resolve())
    named = CommonSettings(base_model="someone/model", base_model_name="mine")
    assert named.served_name == "mine"


def test_a_tokenizer_on_this_machine_alone_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    local = CommonSettings(base_model=str(tmp_path / "model"))
    assert str(tmp_path / "model") in str(local.local_tokenizer)
    assert CommonSettings(base_model="someone/model").local_tokenizer is None
    chosen = CommonSettings(base_model=str(tmp_path / "model"), base_model_tokenizer="/there")
    assert (chosen.local_tokenizer, chosen.client_tokenizer_id) == (None, "/there")


def test_a_collector_is_an_address_of_http(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match="http://host:4318"):
        CommonSettings(otel="host:4318")
    assert CommonSettings().otel == ""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert CommonSettings().otel == "http://collector:4318"


def test_the_stores_policy_has_the_lease_and_the_attempts() -> None:
    policy = CommonSettings(lease_ttl_s=9.0, job_attempts=5).store_policy
    assert (policy.lease_ttl_s, policy.job_attempts) == (9.0, 5)


def test_a_table_is_read_from_json() -> None:
    assert from_json('{"a": 2}') == {"a": 2}
    assert from_json("") == {}
    assert from_json({"a": 2}) == {"a": 2}
    with pytest.raises(ValueError, match="it is not a JSON object"):
        from_json("a=2")


def test_files_are_in_a_bucket_of_s3_or_in_the_directory() -> None:
    plain = CommonSettings(data_dir=Path("d"))
    assert (plain.files_url, plain.files_shown) == ("", "d/files")
    for given, url in (
        ("s3://my-bucket", "s3://my-bucket"),
        ("s3://my.bucket-1/a/b_c/", "s3://my.bucket-1/a/b_c"),
    ):
        found = CommonSettings(files_url=given)
        assert (found.files_url, found.files_shown) == (url, url)


@pytest.mark.parametrize(
    "url",
    [
        "bucket",
        "/files",
        "gs://bucket/prefix",
        "https://secret@host/bucket",
        "s3://",
        "s3://x",
        "s3://key:secret@bucket/prefix",
        "s3://bucket?secret=1",
        "s3://bucket//prefix",
        "s3://Bucket",
        "s3://bucket/pre fix",
    ],
)
def test_other_addresses_of_files_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValidationError, match=r"s3://bucket/prefix, without credentials") as caught:
        CommonSettings(files_url=url)
    assert "secret" not in str(caught.value)
