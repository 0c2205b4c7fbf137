"""Count the product's functions that one warm ``forward_backward`` enters, in both processes' code.

    python -m scripts.count_functions [--list]

The API and a worker on the embedded model run in this process, over the SQLite store and its
socket, as ``tuneserve up`` runs them in two. After two requests to warm up, it sends five more,
retrieves their results, and counts for the one that enters the fewest functions: renewals and
sweeps may run beside a request. A nested function counts as one; comprehensions, lambdas and
generator expressions do not.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx

from tuneserve_client.codec import encode_data, encode_gradient
from tuneserve_client.data import Datum, next_token_datum
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.store.files_mount import open_files
from tuneserve_engine.store.open import open_queue, open_store
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.worker import Worker
from tuneserve_server.app import PREFIX, create_app
from tuneserve_server.settings import ApiSettings

ROOT = Path(__file__).parent.parent
PACKAGES = tuple(str(ROOT / name) for name in ("clients", "engine", "server"))
HEADERS = {"X-API-Key": "tml-local", "Host": "127.0.0.1"}


class Recorder:
    """The functions that the threads of this process enter while it is recording."""

    def __init__(self) -> None:
        self.entered: set[CodeType] = set()
        self._is_recording = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_recording and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(PACKAGES) and not code.co_name.startswith("<"):
                self.entered.add(code)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.entered.clear()
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False


async def post(http: httpx.AsyncClient, path: str, **options: Any) -> Any:
    response = await http.post(
        f"{PREFIX}/{path}", headers=HEADERS | options.pop("headers", {}), **options
    )
    if response.status_code == httpx.codes.REQUEST_TIMEOUT:  # a poll that ended without a result
        return await post(http, path, **options)
    response.raise_for_status()
    return response.json() if "json" in response.headers["content-type"] else response.content


async def result_of(http: httpx.AsyncClient, submitted: Any) -> Any:
    return await post(http, "retrieve_future", json={"request_id": submitted["request_id"]})


async def forward_backward(
    http: httpx.AsyncClient, model_id: str, seq_id: int, data: list[Datum]
) -> None:
    body = encode_gradient(
        model_id, seq_id, encode_data(data), "cross_entropy", {}, forward_only=False
    )
    submitted = await post(
        http, "forward_backward", content=body, headers={"Content-Type": "application/x-protobuf"}
    )
    await result_of(http, submitted)


async def count(folder: Path, recorder: Recorder) -> set[CodeType]:
    """Return the functions that the request entered."""
    shared: dict[str, Any] = {"data_dir": folder}
    settings, api = WorkerSettings(compile_ahead=False, **shared), ApiSettings(**shared)
    store = await open_store(api, asyncio.Event())
    app = create_app(api, store)
    backend = JaxBackend.from_options(settings.backend_options)
    executor = JobExecutor(backend, open_files(settings))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        open_queue(settings) as connect,
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=300) as http,
    ):
        worker = Worker(connect, executor, backend.info, name="worker")
        running = asyncio.create_task(worker.run_until_stopped())
        while not worker.session.is_up:
            await asyncio.sleep(0.01)
        session = await post(http, "create_session", json={"tags": [], "sdk_version": "0.38.0"})
        created = await post(
            http,
            "create_model",
            json={
                "session_id": session["session_id"],
                "model_seq_id": 0,
                "base_model": backend.info.name,
                "lora_config": {"rank": 8},
            },
        )
        model_id = (await result_of(http, created))["model_id"]
        data = [next_token_datum(list(range(5, 40)))]
        for seq_id in (1, 2):
            await forward_backward(http, model_id, seq_id, data)
        counted = []
        for seq_id in range(3, 8):
            with recorder.recording():
                await forward_backward(http, model_id, seq_id, data)
            counted.append(set(recorder.entered))
        worker.stop()
        await running
    await store.close()
    return min(counted, key=len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the functions by file")
    arguments = parser.parse_args()
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        entered = asyncio.run(count(Path(folder), recorder))
    sys.setprofile(None)
    files = {code.co_filename for code in entered}
    if arguments.list:
        for file in sorted(files):
            names = sorted(
                code.co_qualname if hasattr(code, "co_qualname") else code.co_name
                for code in entered
                if code.co_filename == file
            )
            print(f"{Path(file).relative_to(ROOT)}: {', '.join(names)}")
    print(f"one warm forward_backward enters {len(entered)} functions in {len(files)} files")


if __name__ == "__main__":
    main()
