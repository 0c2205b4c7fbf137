"""``POST /checkpoints/import``: accepted archives, refused ones, and the files that remain."""

import asyncio
import errno
import io
import json
import os
import tarfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save
from starlette.requests import ClientDisconnect

from tests.server.test_errors import assert_failure
from tests.support.fake_backend import FAKE_INFO, LAYERS, WIDTH
from tuneserve_engine.adapters.peft_import import PeftAdapter
from tuneserve_engine.store.files import FileStore
from tuneserve_server.settings import ApiSettings
from tuneserve_server.transfer import peft_upload

pytestmark = pytest.mark.anyio

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
A, B = 0.25, 0.5
MODULES = [f"base_model.model.model.layers.{n}.mlp.up_proj" for n in range(LAYERS)]
TENSORS = {f"{each}.lora_A.weight": np.full((2, WIDTH), A, np.float32) for each in MODULES} | {
    f"{each}.lora_B.weight": np.full((WIDTH, 2), B, np.float32) for each in MODULES
}
SETTINGS = {
    "peft_type": "LORA",
    "base_model_name_or_path": "tuneserve/fake",
    "r": 2,
    "lora_alpha": 3,
    "target_modules": ["up_proj"],
}
FILES = {CONFIG: json.dumps(SETTINGS).encode(), WEIGHTS: save(TENSORS)}


def archive(
    files: dict[str, bytes] | None = None, *, kind: int = tarfile.USTAR_FORMAT, **fields: Any
) -> bytes:
    """A tar of these files. ``fields`` are set on each member."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=kind) as opened:
        for name, data in (files or FILES).items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            opened.addfile(info, io.BytesIO(data))
    return packed.getvalue()


async def send(api: Any, content: Any = None, query: str = "", **options: Any) -> httpx.Response:
    content = archive() if content is None else content
    answer = await api.call("POST", f"/checkpoints/import{query}", content=content, **options)
    assert isinstance(answer, httpx.Response)
    return answer


async def path_of(api: Any, *given: Any, **options: Any) -> str:
    answer = await send(api, *given, **options)
    assert answer.status_code == 200, answer.text
    path: str = answer.json()["path"]
    return path


def left(api: Any) -> set[str]:
    """Everything in the files directory except its marks."""
    return {
        p.name
        for p in api.services.settings.files_dir.iterdir()
        if not p.name.startswith((".of-", ".owner-"))
    }


# --- taken in -------------------------------------------------------------------------------------


async def test_training_continues_from_an_import_with_its_numbers_and_scale(service: Any) -> None:
    answer = (await send(service)).json()
    path = answer.pop("path")
    assert answer == {
        "base_model": "tuneserve/fake",
        "is_lora": True,
        "lora_rank": 2,
        "adapter": "lora",
        "train_attn": False,
        "train_mlp": True,
        "train_unembed": False,
        "optimizer_config": answer["optimizer_config"],
    }
    session = await service.session()
    load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    loaded = await service.result(await service.post("/load_weights", load))
    output = await service.output(await service.forward_backward(loaded["model_id"], 1))
    # By hand: scale 3/2, and for each of 2 layers and 2 ranks the sums of 4 As and of 4 Bs.
    shift = 1.5 * 2 * 2 * (4 * A) * (4 * B)
    assert output.metrics["loss:sum"] == pytest.approx((1 + 3) / 8 + (1 + 5) / 8 - 2 * shift)
    step = {"model_id": loaded["model_id"], "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
    assert "metrics" in await service.result(await service.post("/optim_step", step))


async def test_an_import_is_an_ordinary_checkpoint_of_its_tenant_only(service: Any) -> None:
    path = await path_of(service, query="?name=mine&ttl_seconds=3600")
    origin = path.split("/")[2]
    for listing in ("/checkpoints", f"/training_runs/{origin}/checkpoints"):
        (listed,) = (await service.get(listing))["checkpoints"]
        assert (listed["tinker_path"], listed["checkpoint_type"]) == (path, "training")
        assert listed["size_bytes"] > 2 * LAYERS * WIDTH * 2 * 4 and listed["expires_at"]
        answer = await service.call("GET", listing, key="tml-b")
        assert "tinker://" not in answer.text
    info = {"tinker_path": path}
    assert (await service.post("/weights_info", info))["lora_rank"] == 2
    assert_failure(await service.call("POST", "/weights_info", json=info, key="tml-b"), 404)
    ours = f"/training_runs/{origin}/checkpoints/weights/mine"
    assert_failure(await service.call("DELETE", ours, key="tml-b"), 404)
    await service.ok("PUT", f"{ours}/ttl", {"ttl_seconds": None})
    await service.ok("DELETE", ours)
    assert (await service.get("/checkpoints"))["checkpoints"] == []
    await service.services.unused.clean(older_than_s=0)
    assert left(service) == set()


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
async def test_archives_of_every_tar_format_are_read(service: Any, kind: int) -> None:
    backwards = {f"./{name}": FILES[name] for name in (WEIGHTS, CONFIG)}
    for content in (archive(kind=kind, mtime=1.5), archive(backwards, kind=kind)):
        await path_of(service, content)
        await path_of(service, content[: -2 * 512])  # some programs leave out the end


async def test_a_retry_is_answered_with_the_same_checkpoint(service: Any) -> None:
    retry = {"headers": {"X-Idempotency-Key": "k"}}
    first = await path_of(service, **retry)
    assert await path_of(service, b"not looked at", **retry) == first
    assert await path_of(service, query="?name=other", **retry) != first
    assert await path_of(service, key="tml-b", **retry) != first
    assert await path_of(service) != first
    assert len(left(service)) == 4


async def test_an_upload_sent_twice_at_once_leaves_one_file(service: Any) -> None:
    retry = {"headers": {"X-Idempotency-Key": "k"}}
    paths = await asyncio.gather(*(path_of(service, **retry) for _ in range(2)))
    assert len(set(paths)) == 1 and len(left(service)) == 1


async def test_the_base_model_may_be_given_another_name(service: Any) -> None:
    elsewhere = {
        **FILES,
        CONFIG: json.dumps({**SETTINGS, "base_model_name_or_path": "/a"}).encode(),
    }
    said = assert_refused(await send(service, archive(elsewhere)), 400)
    assert "'/a' is not served here; this server has 'tuneserve/fake'" in said
    assert said.endswith("name it in base_model")
    await path_of(service, archive(elsewhere), query="?base_model=tuneserve/fake")


# --- as it comes ----------------------------------------------------------------------------------


async def test_the_body_is_written_to_disk_as_it_arrives(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The piece in the writer's hands and the last one sent may be missing."""
    monkeypatch.setattr(peft_upload, "_PIECE_BYTES", 2**20)
    on_disk = []
    whole = archive() + bytes(4 * 2**20)

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(whole), 2**18):
            found = service.services.settings.files_dir.glob(".partial-*/*")
            on_disk.append(sum(path.stat().st_size for path in found) - at)
            yield whole[at : at + 2**18]

    await path_of(service, pieces())
    assert len(on_disk) == 17 and min(on_disk) > -(2**20) - 2**18
    assert len(left(service)) == 1, "of the upload nothing is left"


async def test_an_adapter_over_the_limit_is_refused_before_it_has_arrived(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.services.imports, "_limit_bytes", 3000)
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1000
            yield bytes(1000)

    said = assert_refused(await send(service, endless()), 413)
    assert sent <= 5000 and "has 4000 bytes or more; the limit is 3000" in said
    said = assert_refused(await send(service, bytes(9000)), 413)  # by its Content-Length
    assert "has 9000 bytes or more" in said
    assert left(service) == set()


async def test_an_unknown_base_model_is_refused_before_the_upload(service: Any) -> None:
    for query, words in (
        ("?base_model=no/such", "'no/such' is not served here"),
        ("?name=../x", "name is not a checkpoint name"),
        ("?ttl_seconds=5", "ttl_seconds is 5; it must be 3600"),
    ):
        assert words in assert_refused(await send(service, never(), query), 400)


async def test_a_tenant_sends_up_to_two_at_once(service: Any) -> None:
    go_on = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield archive()
        await go_on.wait()

    tasks = [asyncio.create_task(send(service, slow())) for _ in range(2)]
    while sum(1 for name in left(service) if "partial" in name) < 2:
        await asyncio.sleep(0.01)
    third = await send(service)
    assert "2 adapters of yours are being imported" in assert_refused(third, 429)
    assert third.headers["Retry-After"] == "5"
    assert (await send(service, key="tml-b")).status_code == 200
    go_on.set()
    assert [(await task).status_code for task in tasks] == [200, 200]
    await path_of(service)


@pytest.mark.parametrize("problem", ["gone", "stop", "late"])
async def test_an_interrupted_upload_leaves_no_file(
    service: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.services.imports, "_timeout_s", 0.2)

    async def broken() -> AsyncIterator[bytes]:
        yield archive()[:2000]
        if problem == "gone":
            raise ClientDisconnect
        if problem == "stop":
            service.services.polls.release()
        await asyncio.sleep(5)

    answer = await send(service, broken())
    assert_failure(answer, {"gone": 400, "stop": 503, "late": 408}[problem], below=504)
    assert left(service) == set()


async def test_the_files_of_a_killed_process_are_removed_an_hour_later(service: Any) -> None:
    files = service.services.files
    leaking = files.staging()
    folder = leaking.__enter__()
    (folder / "upload.tar").write_bytes(b"x")
    files.discard_partial()
    assert folder.exists()
    FileStore(files.path("0" * 32).parent, clock=lambda: 1e12).discard_partial()
    assert not folder.exists()
    leaking.__exit__(None, None, None)


async def test_a_full_disk_is_reported_and_leaves_no_file(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(service.services.files, "publish", full)
        said = assert_refused(await send(service), 503, below=504)
        assert "has no room for the adapter; nothing was changed" in said
    monkeypatch.setattr(service.services.disk, "_free_bytes", lambda _: 0)
    monkeypatch.setattr(service.services.disk, "_looked_s", -1e9)
    answer = await send(service)
    assert "min_free_bytes" in assert_refused(answer, 503, below=504)
    assert (answer.json()["code"], answer.headers["Retry-After"]) == ("disk_full", "15")
    assert left(service) == set()


WRITTEN = 3 * LAYERS * (WIDTH * 2 + 2 * WIDTH) * 4
"""All of the MLP, though only up_proj was sent."""


async def chunked() -> AsyncIterator[bytes]:
    """A body without a Content-Length."""
    yield archive()


async def never() -> AsyncIterator[bytes]:
    pytest.fail("the body was read")
    yield b""


async def test_an_upload_that_does_not_fit_on_the_disk_is_not_started(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    least, free = service.services.settings.min_free_bytes, 0
    monkeypatch.setattr(service.services.disk, "_free_bytes", lambda _: free)
    free = least + 8999
    answer = await send(service, never(), headers={"Content-Length": "9000"})
    said = assert_refused(answer, 503, below=504)
    assert f"{free} bytes left" in said and "9000 more do not fit" in said
    free = least + WRITTEN - 1
    answer = await send(service, chunked())
    assert f"{WRITTEN} more do not fit" in assert_refused(answer, 503, below=504)
    assert answer.json()["code"] == "disk_full" and left(service) == set()
    free = least + WRITTEN
    await path_of(service, chunked())


async def test_two_parallel_uploads_need_room_for_both(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = service.services.settings.min_free_bytes
    began, go_on, write = threading.Event(), threading.Event(), PeftAdapter.write

    def slow(*given: Any) -> None:
        began.set()
        assert go_on.wait(10)
        write(*given)

    monkeypatch.setattr(PeftAdapter, "write", slow)
    monkeypatch.setattr(service.services.disk, "_free_bytes", lambda _: least + 2 * WRITTEN - 1)
    first = asyncio.create_task(send(service, chunked()))
    while not began.is_set():
        await asyncio.sleep(0.01)
    said = assert_refused(await send(service, chunked()), 503, below=504)
    assert f"{2 * WRITTEN} more do not fit" in said
    go_on.set()
    assert (await first).status_code == 200
    await path_of(service, chunked())


async def test_a_tenant_imports_no_more_bytes_than_it_may_store(
    service: Any, settings: ApiSettings
) -> None:
    services = service.app.state.services
    few = settings.model_copy(update={"max_checkpoint_bytes": WRITTEN - 1})
    service.app.state.services = replace(services, settings=few)
    said = assert_refused(await send(service), 400)
    assert f"this one would have {WRITTEN}" in said and left(service) == set()
    enough = settings.model_copy(update={"max_checkpoint_bytes": WRITTEN})
    service.app.state.services = replace(services, settings=enough)
    await path_of(service)


# --- beside others --------------------------------------------------------------------------------


async def test_an_upload_that_waits_for_its_turn_is_not_removed(service: Any) -> None:
    """Its folder is an hour old when it has arrived, because the uploads before it take long."""
    services = service.services
    writing = services.imports._writing

    async def slow() -> AsyncIterator[bytes]:
        yield archive()
        (folder,) = services.settings.files_dir.glob(".partial-*")
        os.utime(folder, (0, 0))

    for _ in range(2):
        await writing.acquire()
    sending = asyncio.create_task(send(service, slow()))
    while not writing._waiters:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    await services.unused.clean()
    for _ in range(2):
        writing.release()
    answer = await sending
    assert answer.status_code == 200, answer.text


async def test_a_body_is_not_too_slow_because_others_occupy_the_threads(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft_upload, "_PIECE_BYTES", 10)
    monkeypatch.setattr(service.services.imports, "_timeout_s", 0.1)
    go_on = threading.Event()

    async def slow() -> AsyncIterator[bytes]:
        whole = archive()
        yield whole[:20]
        for _ in range(peft_upload._THREADS):
            service.services.imports._threads.submit(go_on.wait, 10)
        asyncio.get_running_loop().call_later(0.4, go_on.set)
        yield whole[20:]

    answer = await send(service, slow())
    assert answer.status_code == 200, answer.text


async def test_a_file_that_took_long_to_write_does_not_count_as_unused(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = PeftAdapter.write

    def slow(adapter: PeftAdapter, path: Path, *given: Any) -> None:
        write(adapter, path, *given)
        os.utime(path.parent, (0, 0))

    monkeypatch.setattr(PeftAdapter, "write", slow)
    await path_of(service)
    assert service.services.files.ids() and not service.services.files.ids(older_than_s=900)


async def test_a_waiting_upload_shows_a_sign_of_life(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft_upload, "_SIGN_OF_LIFE_S", 0.01)
    services = service.services
    for _ in range(2):
        await services.imports._writing.acquire()
    sending = asyncio.create_task(send(service))
    while not services.imports._writing._waiters:
        await asyncio.sleep(0.01)
    (folder,) = services.settings.files_dir.glob(".partial-*")
    for _ in range(2):
        os.utime(folder, (0, 0))
        async with asyncio.timeout(5):
            while folder.stat().st_mtime == 0:
                await asyncio.sleep(0.01)
    for _ in range(2):
        services.imports._writing.release()
    assert (await sending).status_code == 200


async def test_imports_and_other_work_in_threads_do_not_wait_for_each_other(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set()
    publish = FileStore.publish

    def seen(*given: Any) -> int:
        names.add(threading.current_thread().name.partition("_")[0])
        return publish(*given)

    monkeypatch.setattr(FileStore, "publish", seen)
    busy, go_on = ThreadPoolExecutor(1), threading.Event()
    busy.submit(go_on.wait, 10)
    asyncio.get_running_loop().set_default_executor(busy)
    try:
        async with asyncio.timeout(5):
            await path_of(service)
    finally:
        go_on.set()
    assert names == {"imports"}


async def test_an_import_being_written_ends_when_the_service_stops(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, numbers = [], PeftAdapter._numbers

    def stopping(*given: Any) -> Any:
        read.append(given)
        service.services.imports.stop()
        return numbers(*given)

    monkeypatch.setattr(PeftAdapter, "_numbers", stopping)
    said = assert_refused(await send(service), 503, below=504)
    assert said.startswith("the server is stopping; nothing was changed")
    assert len(read) == 1 and left(service) == set()
    assert "is stopping" in assert_refused(await send(service), 503, below=504)


# --- not taken in ---------------------------------------------------------------------------------


def assert_refused(answer: httpx.Response, status: int, below: int = 500) -> str:
    assert_failure(answer, status, below=below)
    said: str = answer.json()["detail"]
    return said


def folder_first() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as opened:
        info = tarfile.TarInfo("./")
        info.type = tarfile.DIRTYPE
        opened.addfile(info)
    return packed.getvalue()[:512] + archive()


HOW = "send exactly these two: tar -cf - -C FOLDER adapter_config.json adapter_model.safetensors"
ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "the archive has no adapter_config.json"),
    "no tar": (lambda: b"x" * 3000, "the body is not a tar archive"),
    "a pickle": (lambda: b"\x80\x04\x95\x0b" + bytes(2000), "the body is not a tar archive"),
    "gzipped": (lambda: b"\x1f\x8b\x08" + bytes(2000), "the body is not a tar archive"),
    "the weights alone": (lambda: archive({WEIGHTS: FILES[WEIGHTS]}), f"no {CONFIG}; {HOW}"),
    "no weights": (lambda: archive({CONFIG: b"{}"}), f"the archive has no {WEIGHTS}"),
    "pickled weights": (
        lambda: archive({CONFIG: FILES[CONFIG], "adapter_model.bin": b"\x80"}),
        "has 'adapter_model.bin'; it may hold only two files",
    ),
    "one more": (
        lambda: archive({**FILES, "README.md": b"x"}),
        "has 'README.md'; it may hold only two",
    ),
    "in a folder": (lambda: archive({f"a/{CONFIG}": b"{}"}), f"has 'a/{CONFIG}'"),
    "outside": (lambda: archive({f"../../{CONFIG}": b"{}"}), f"has '../../{CONFIG}'"),
    "at the root": (lambda: archive({f"/{CONFIG}": b"{}"}), f"has '/{CONFIG}'"),
    "a folder": (folder_first, "the archive has '.'; it may hold only"),
    "twice": (
        lambda: archive({CONFIG: b"{}"})[:1024] + archive(),
        f"has '{CONFIG}'; it may hold only two files, each once",
    ),
    "a link": (
        lambda: archive({CONFIG: b"", WEIGHTS: b""}, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "is a link or another special file",
    ),
    "a hard link": (
        lambda: archive({CONFIG: b"", WEIGHTS: b""}, type=tarfile.LNKTYPE, linkname="x"),
        "is a link or another special file",
    ),
    "a device": (lambda: archive({CONFIG: b""}, type=tarfile.CHRTYPE), "is a link or another"),
    "cut in the weights": (lambda: archive()[:1600], "it was cut; send all of it"),
    "cut in a header": (lambda: archive()[:1100], "not a tar archive (truncated header)"),
    "headers without end": (
        lambda: archive(mtime=1.5, kind=tarfile.PAX_FORMAT)[:1024] * 40,
        "more than 16 headers",
    ),
    "a huge extended header": (
        lambda: archive({CONFIG: bytes(70_000)}, type=tarfile.XHDTYPE),
        "an extended header of the archive has 70000 bytes; the limit is 65536",
    ),
}


@pytest.mark.parametrize("case", ARCHIVES)
async def test_an_archive_with_other_contents_is_refused(service: Any, case: str) -> None:
    make, words = ARCHIVES[case]
    assert words in assert_refused(await send(service, make()), 422)
    assert left(service) == set()


async def test_a_changed_byte_of_an_archive_never_causes_a_5xx_or_leaves_a_file(
    service: Any,
) -> None:
    whole, rng = archive()[:4096], np.random.default_rng(0)
    answered = Counter()
    for at in rng.integers(0, len(whole), 250).tolist():
        content = whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :]
        answer = await send(service, content[: rng.integers(len(whole) // 2, 2 * len(whole))])
        answered[answer.status_code] += 1
        if answer.status_code != 200:
            assert_failure(answer)
    assert answered.keys() == {200, 400, 422} and min(answered.values()) > 20
    assert len(left(service)) == answered[200]


async def test_an_invalid_adapter_is_explained_and_leaves_no_file(service: Any) -> None:
    dora = {**FILES, CONFIG: json.dumps({**SETTINGS, "use_dora": True}).encode()}
    nan = {**TENSORS, f"{MODULES[1]}.lora_B.weight": np.full((WIDTH, 2), np.nan, np.float32)}
    wide = {**TENSORS, f"{MODULES[1]}.lora_B.weight": np.zeros((9, 2), np.float32)}
    long = {**FILES, CONFIG: FILES[CONFIG] + b" " * 300_000}
    for files, words in (
        (dora, "use_dora = true"),
        ({**FILES, WEIGHTS: save(nan)}, "is nan at [0, 0]"),
        ({**FILES, WEIGHTS: save(wide)}, "is [9, 2]; with rank 2 'tuneserve/fake' has [4, 2]"),
        ({**FILES, WEIGHTS: FILES[WEIGHTS][:-1]}, "it was cut"),
        (long, "the limit is 262144"),
    ):
        assert words in assert_refused(await send(service, archive(files)), 400)
    assert left(service) == set()
    encoded = {"headers": {"Content-Encoding": "gzip"}}
    assert "without a Content-Encoding" in assert_refused(await send(service, **encoded), 415)


async def test_a_tenant_at_its_limit_of_checkpoints_cannot_import(
    service: Any, settings: ApiSettings
) -> None:
    services = service.app.state.services
    few = settings.model_copy(update={"max_checkpoints": 1})
    service.app.state.services = replace(services, settings=few)
    await path_of(service)
    assert "you have 1 checkpoints" in assert_refused(await send(service), 400)
    await path_of(service, key="tml-b")


async def test_without_a_worker_that_reports_shapes_an_import_is_refused(api: Any) -> None:
    answer = await send(api)
    assert_refused(answer, 503, below=504)
    assert answer.json()["code"] == "model_unavailable"
    await api.start_worker(info=replace(FAKE_INFO, target_shapes=()))
    said = assert_refused(await send(api), 503, below=504)
    assert "no worker of this release has served 'tuneserve/fake' yet" in said
    await api.start_worker("new")
    await path_of(api)
