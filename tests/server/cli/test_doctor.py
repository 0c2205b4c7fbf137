"""``tuneserve doctor`` finds what would stop a start, and changes nothing."""

import asyncio
import contextlib
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.redis_server import RedisServer
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_engine.store.bucket import Bucket
from tuneserve_engine.store.sqlite.store import SqliteStore
from tuneserve_server.cli import doctor
from tuneserve_server.cli import main as cli
from tuneserve_server.cli.finding import Level
from tuneserve_server.cli.local_server import free_port
from tuneserve_server.settings import ApiSettings

HOLD = """
import sys, time
from pathlib import Path
from tuneserve_engine.store.sqlite.database import open_database
database = open_database(Path(sys.argv[1]))
print("open", flush=True)
time.sleep(60)
"""
AS_NOBODY = """
import os, sys
from pathlib import Path
from tuneserve_server.cli import doctor as checks
from tuneserve_server.settings import ApiSettings
settings = ApiSettings(data_dir=Path(sys.argv[1]), min_free_bytes=1)
if os.getuid() == 0:
    os.setgroups([])
    os.setuid(65534)
for found in (
    checks._directory("data dir", settings.data_dir, settings),
    checks._disk(settings),
    checks._store(settings, {}),
):
    print(found.level, found.text)
"""
WHOLE: dict[str, Any] = {
    "folder": "/models/it",
    "problem": None,
    "bytes": 3 * 2**30,
    "is_to_download": False,
    "to_download_bytes": None,
    "free_bytes": 0,
    "tokenizer_problem": None,
}
"""The facts found of a valid model."""


@pytest.fixture
def place(tmp_path: Path) -> ApiSettings:
    return ApiSettings(data_dir=tmp_path / "data", port=free_port(), min_free_bytes=1)


def changed(settings: ApiSettings, **fields: Any) -> ApiSettings:
    return settings.model_copy(update=fields)


def online(**variables: str) -> dict[str, str]:
    """The environment of this process, with downloads allowed."""
    return {k: v for k, v in os.environ.items() if "OFFLINE" not in k} | variables


def test_an_empty_usable_place_is_found_healthy_and_left_empty(
    place: ApiSettings, tmp_path: Path
) -> None:
    found = [
        doctor._directory("data dir", place.data_dir, place),
        doctor._disk(place),
        doctor._port(place, {}),
        doctor._store(place, {}),
        *doctor._ask_engine(place, dict(os.environ))[1:],
    ]
    assert [each.level for each in found] == ["OK"] * 7
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_directory_fails(place: ApiSettings, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = changed(place, data_dir=tmp_path / "file" / "data")
    found = doctor._directory("data dir", settings.data_dir, settings)
    assert found.level == "FAIL" and "choose another directory with --data-dir" in found.text


def test_a_files_directory_open_to_others_is_a_warning(place: ApiSettings) -> None:
    place.files_dir.mkdir(parents=True)
    place.files_dir.chmod(0o755)
    found = doctor._directory("files dir", place.files_dir, place)
    assert found.level == "WARN" and "permissions 0755): chmod it to 700" in found.text
    shared = changed(place, group_access=True)
    assert doctor._directory("files dir", shared.files_dir, shared).level == "OK"
    place.files_dir.chmod(0o700)
    assert doctor._directory("files dir", place.files_dir, place).level == "OK"


def test_a_directory_behind_an_inaccessible_one_fails(tmp_path: Path) -> None:
    (locked := tmp_path / "locked").mkdir(mode=0)
    command = [sys.executable, "-c", AS_NOBODY, str(locked / "data")]
    ran = subprocess.run(command, capture_output=True, text=True)
    locked.chmod(0o700)
    assert ran.stderr == ""
    directory, disk, store = ran.stdout.splitlines()
    assert directory.startswith(f"FAIL {locked}/data cannot be written: Permission denied")
    assert disk.startswith("OK ")
    assert store.startswith(f"FAIL cannot open the store {locked}/data/store.db: Permission")


def test_on_a_network_file_system_sqlite_fails_and_files_do_not(
    place: ApiSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"host:/export {tmp_path.resolve()} nfs4 rw 0 0\n")
    monkeypatch.setattr(doctor, "_MOUNTS", mounts)
    found = doctor._directory("data dir", place.data_dir, place)
    assert found.level == "FAIL" and "network file system (nfs4)" in found.text
    assert doctor._directory("files dir", place.files_dir, place).level == "OK"


def test_little_disk_space_fails(place: ApiSettings) -> None:
    found = doctor._disk(changed(place, min_free_bytes=2**60))
    assert found.level == "FAIL" and "make room" in found.text


def test_an_address_that_others_reach_without_keys_is_a_warning(place: ApiSettings) -> None:
    reached = changed(place, host="0.0.0.0")
    found = doctor._port(reached, {})
    assert found.level == "WARN" and "--require-keys" in found.text
    for choice in ("require_keys", "trusted_network"):
        assert doctor._port(changed(reached, **{choice: True}), {}).level == "OK"


def test_a_port_in_use_fails(place: ApiSettings) -> None:
    with socket.socket() as other:
        other.bind((place.host, place.port))
        other.listen()
        found = doctor._port(place, {})
    assert found.level == "FAIL" and "--port" in found.text


def test_an_absent_worker_or_an_asserted_durability_is_a_warning(
    place: ApiSettings,
) -> None:
    health = {"worker": "absent", "store": "redis", "durability": "asserted"}
    assert doctor._port(place, health).level == "WARN"
    assert doctor._store(place, health).level == "WARN"


def test_an_unreachable_redis_fails(place: ApiSettings) -> None:
    settings = changed(place, store=f"redis://:secret@127.0.0.1:{free_port()}/0")
    found = doctor._store(settings, {})
    assert found.level == "FAIL" and "secret" not in found.text


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import time; time.sleep(60)", "within 0 s"),
        ("raise SystemExit('no driver')", "no driver"),
        ("import os; os.kill(os.getpid(), 9)", "it printed no error"),
    ],
)
def test_a_device_that_hangs_or_fails_is_reported(program: str, words: str) -> None:
    found = doctor._device({}, program, 0.4 if "sleep" in program else 20)
    assert found.level == "FAIL" and words in found.text


def test_the_device_is_named_with_its_memory() -> None:
    told = {"platform": "gpu", "kind": "H100", "count": 2, "bytes": 80 * 2**30}
    found = doctor._device({}, f"print('noise'); print('''{json.dumps(told)}''')")
    assert found == doctor.Finding("device", "OK", "2 x H100 (gpu), 80.0 GiB")


def test_a_gpu_that_jax_does_not_see_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_NVIDIA", tmp_path)
    told = {"platform": "cpu", "kind": "cpu", "count": 1, "bytes": 2**30}
    found = doctor._device({}, f"print('''{json.dumps(told)}''')")
    assert found.level == "WARN" and ".[cuda]" in found.text


# --- the store ----------------------------------------------------------------------------------


def made_store(settings: ApiSettings) -> Path:
    async def main() -> None:
        settings.data_dir.mkdir()
        await (await SqliteStore.open(settings.store_file)).close()

    asyncio.run(main())
    return settings.store_file


def test_a_store_of_a_newer_release_or_a_file_that_is_not_a_database_fails(
    place: ApiSettings,
) -> None:
    file = made_store(place)
    assert doctor._store(place, {}).text.endswith("; schema version 4, sound")
    with contextlib.closing(sqlite3.connect(file)) as store, store:
        store.execute("UPDATE meta SET value = 9 WHERE name = 'version'")
    found = doctor._store(place, {})
    assert found.level == "FAIL" and "version 9, this release reads version 4" in found.text
    file.write_text("no database")
    found = doctor._store(place, {})
    assert found.level == "FAIL" and "file is not a database; restore a backup" in found.text


def test_a_store_that_another_process_has_open_fails(place: ApiSettings) -> None:
    command = [sys.executable, "-c", HOLD, str(made_store(place))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"open\n"
        found = doctor._store(place, {})
        other.kill()
    assert found.level == "FAIL" and "in use by another process; stop that" in found.text


def said(server: RedisServer, command: str) -> bytes:
    """The answer of the server to a command."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as redis:
        redis.sendall(f"{command}\r\n".encode())
        return redis.recv(100)


def test_a_durable_redis_is_fine_and_left_empty(place: ApiSettings, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        found = doctor._store(changed(place, store=server.url), {})
        assert said(server, "DBSIZE") == b":0\r\n"
    told = f"{server.url}, on disk before requests are accepted: always"
    assert found == doctor.Finding("store", "OK", told)


def test_a_redis_that_may_lose_requests_fails(place: ApiSettings, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", appendfsync="everysec") as server:
        found = doctor._store(changed(place, store=server.url), {})
    assert found.level == "FAIL"
    assert "appendfsync is 'everysec'" in found.text
    assert found.text.endswith("set in its configuration: appendfsync always")


def test_a_redis_with_asserted_durability_is_a_warning(place: ApiSettings, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        assert said(server, "ACL SETUSER default -config") == b"+OK\r\n"
        settings = changed(place, store=server.url)
        refused = doctor._store(settings, {})
        vouched = doctor._store(changed(settings, store_durability_asserted=True), {})
    assert refused.level == "FAIL" and "store_durability_asserted = true" in refused.text
    assert vouched.level == "WARN" and "according to store_durability_asserted" in vouched.text


# --- the model ----------------------------------------------------------------------------------


def test_a_model_that_a_worker_would_refuse_fails(tmp_path: Path) -> None:
    config = json.loads((TINY_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    found = doctor._look_at_model(str(tmp_path), dict(os.environ))
    settings = ApiSettings(base_model=str(tmp_path))
    told = doctor._model(settings, found)
    assert told.level == "FAIL" and "model.safetensors is damaged" in told.text
    assert found["folder"] == str(tmp_path)


def test_a_model_whose_config_alone_is_in_the_hub_cache_is_a_warning(tmp_path: Path) -> None:
    """``tuneserve plan`` leaves the cache in this state."""
    repo = tmp_path / "hub" / "models--someone--model"
    (snapshot := repo / "snapshots" / "abc").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_bytes((TINY_MODEL / "config.json").read_bytes())
    settings = ApiSettings(base_model="someone/model")
    found = doctor._look_at_model("someone/model", online(HF_HOME=str(tmp_path)))
    told = doctor._model(settings, found)
    assert told.level == "WARN"
    assert told.text.startswith("someone/model is only partly here: the rest, about ")


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        ({}, "OK", "3.0 GiB of weights in /models/it"),
        ({"problem": "one\n  two"}, "FAIL", "one two"),
        ({"tokenizer_problem": "garbage"}, "WARN", "tokenizer cannot be read (garbage)"),
        ({"is_to_download": True}, "WARN", "the rest will be downloaded"),
        (
            {"is_to_download": True, "folder": None},
            "WARN",
            "someone/it is not a directory here: it",
        ),
        (
            {"is_to_download": True, "to_download_bytes": 2**31, "free_bytes": 2**32},
            "WARN",
            "about 2.0 GiB, will be downloaded from the hub at the first start, which needs the "
            "network; its disk has 4.0 GiB free",
        ),
        (
            {"is_to_download": True, "to_download_bytes": 2**32, "free_bytes": 2**31},
            "FAIL",
            "its disk has 2.0 GiB free: make room, or set HF_HOME",
        ),
    ],
)
def test_the_facts_of_a_model_are_reported(found: dict[str, Any], level: str, words: str) -> None:
    told = doctor._model(ApiSettings(base_model="someone/it"), WHOLE | found)
    assert told.level == level and words in told.text


def test_a_tokenizer_that_remote_clients_cannot_load_is_a_warning() -> None:
    assert doctor._model(ApiSettings(), WHOLE).level == "OK"
    told = doctor._model(ApiSettings(host="0.0.0.0"), WHOLE)
    assert told.level == "WARN" and "set base_model_tokenizer" in told.text
    mended = ApiSettings(host="0.0.0.0", base_model_tokenizer="someone/it")
    assert doctor._model(mended, WHOLE).level == "OK"


def test_a_model_whose_check_crashes_or_hangs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict(os.environ) | {"PYTHONPATH": "/nowhere", "PYTHONSAFEPATH": "1"}
    crashed = doctor._look_at_model("it", environment | {"PYTHONHOME": "/nowhere"})
    assert crashed["problem"].startswith("it cannot be read: ")
    monkeypatch.setattr(doctor, "_MODEL_S", 0.01)
    assert "within 0 s" in doctor._look_at_model("it", environment)["problem"]


# --- the memory ---------------------------------------------------------------------------------


def test_a_model_that_fits_leaves_room_for_adapters() -> None:
    environment = {**os.environ, "TUNESERVE_DEVICE_MEMORY_BYTES": str(2**30)}
    found = doctor._memory(str(TINY_MODEL), environment)
    assert found.level == "OK"  # 3,680,512 bytes of float32 in the file
    assert found.text.startswith("1.0 GiB to use: 4 MiB for the base model, ")
    assert found.text.endswith(" left for adapters; see tuneserve plan")


def test_a_model_that_does_not_fit_fails_with_the_arithmetic(tmp_path: Path) -> None:
    hf = json.loads((TINY_MODEL / "config.json").read_text()) | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(hf))
    environment = {**os.environ, "TUNESERVE_DEVICE_MEMORY_BYTES": str(24 * 2**30)}
    found = doctor._memory(str(tmp_path), environment)
    assert found.level == "FAIL" and "\n" not in found.text
    needed = re.match(r"the base model needs at least (\d+)\.\d\d GiB of the cpu's", found.text)
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    assert needed is not None and int(needed[1]) * 2**30 > 80 * layer * 4
    assert "24.00 GiB is available (tuneserve plan shows the parts). Choose" in found.text


@pytest.mark.parametrize(
    ("device", "found", "words"),
    [
        ("FAIL", {}, "before the device is in order"),
        ("OK", {"folder": None, "problem": "gemma3"}, "before the model is in order"),
        ("OK", {"folder": None, "is_to_download": True}, "tuneserve plan downloads only that"),
    ],
)
def test_without_a_device_or_a_model_memory_is_not_checked(
    device: Level,
    found: dict[str, Any],
    words: str,
    place: ApiSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_device", lambda _: doctor.Finding("device", device, ""))
    monkeypatch.setattr(doctor, "check_compute", lambda _: doctor.Finding("compute", "OK", ""))
    monkeypatch.setattr(doctor, "_look_at_model", lambda *_: WHOLE | found)
    memory = doctor._ask_engine(place, {})[-1]
    assert memory.level == "WARN" and words in memory.text


def test_without_a_device_nothing_is_computed(
    place: ApiSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_device", lambda _: doctor.Finding("device", "FAIL", ""))
    monkeypatch.setattr(doctor, "_look_at_model", lambda *_: WHOLE)
    _, compute, *_ = doctor._ask_engine(place, {})
    assert compute.level == "WARN" and "before the device is in order" in compute.text


# --- the whole command --------------------------------------------------------------------------


def test_a_missing_package_is_named_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_ENGINE", ("jax", "no_such_package"))
    found = doctor._engine()
    assert found.level == "FAIL"
    assert "not installed: no_such_package" in found.text and ".[engine]" in found.text


def test_the_exit_status_is_1_if_a_check_fails(
    place: ApiSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ["--data-dir", str(tmp_path / "data"), "--port", str(place.port)]
    monkeypatch.setattr(doctor, "_device", lambda _: doctor.Finding("device", "FAIL", "none"))
    monkeypatch.setattr(doctor, "_look_at_model", lambda *_: WHOLE)
    ran = CliRunner().invoke(cli.app, ["doctor", *where])
    assert ran.exit_code == 1
    assert "FAIL  device     none" in ran.stdout.splitlines()
    told = json.loads(CliRunner().invoke(cli.app, ["doctor", *where, "--json"]).stdout)
    assert not told["healthy"]
    assert [each["name"] for each in told["checks"] if each["level"] == "FAIL"] == ["device"]


def test_a_bucket_is_checked_as_by_a_start(place: ApiSettings, s3_url: str) -> None:
    assert doctor._bucket(place) == []
    (usable,) = doctor._bucket(changed(place, files_url=s3_url))
    assert (usable.level, usable.name) == ("OK", "bucket") and s3_url in usable.text
    assert Bucket(s3_url).objects("proofs/") == []
    (missing,) = doctor._bucket(changed(place, files_url="s3://none-here/x"))
    assert missing.level == "FAIL"
    assert "NoSuchBucket" in missing.text and "--files-url" in missing.text
