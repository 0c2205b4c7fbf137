"""A key's secret is in no log, no file and no answer, however the key is used."""

import asyncio
import base64
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.processes import running_service
from tests.server.conftest import Api

pytestmark = pytest.mark.anyio

PREFIX = "/api/v1"


class Remote(Api):
    """A tenant's calls to a separate process, whose answers must not repeat the secret."""

    def __init__(self, http: httpx.AsyncClient, secret: str) -> None:
        self.http = http
        self.secret = secret
        self.statuses: Counter[int] = Counter()

    async def call(
        self, method: str, path: str, *, key: str | None = None, **options: Any
    ) -> httpx.Response:
        answer = await super().call(method, path, key=key, **options)
        if self.secret not in path:  # an object named by the secret is reported as not found
            assert self.secret not in f"{answer.headers} {answer.text}"
        self.statuses[answer.status_code] += 1
        return answer


async def use_everything(api: Api, key: str, bodies: Any) -> None:
    """Train, save, sample and fail with the key, and report as the SDK does."""
    session = await api.session(key=key)
    model = await api.model(session, key=key)
    await api.poll((await api.forward_backward(model, 1, key=key))["request_id"], key=key)
    for seq, (route, body) in enumerate(
        [
            ("optim_step", {"adam_params": {"learning_rate": -1.0}}),
            ("optim_step", {"adam_params": {}}),
            ("save_weights", {"path": "a"}),
            ("save_weights_external", {"path": "e"}),
            ("load_weights", {"path": "tinker://nowhere/weights/a", "optimizer": True}),
        ],
        start=2,
    ):
        named = {"model_id": model, "seq_id": seq, **body}
        await api.result(await api.post(f"/{route}", named, key=key), key=key)
    sampler = await api.sampler(session, key=key)
    sampled = await api.post("/asample", bodies.asample(sampler, 1), key=key)
    await api.poll(sampled["request_id"], key=key)
    report = {"events": [{"event": "UNHANDLED_EXCEPTION", "traceback": f"api_key={key}"}]}
    await api.post("/telemetry", report, key=key)
    for content in (b"{", b'{"model_id": NaN}', key.encode(), json.dumps({key: key}).encode()):
        await api.call("POST", "/optim_step", content=content, key=key)
        await api.call("POST", "/forward_backward", content=content, key=key)
        encoded = {"Content-Encoding": "zstd"}
        await api.call("POST", "/forward_backward", content=content, key=key, headers=encoded)
    for path in ("/sessions", "/training_runs", "/checkpoints", f"/training_runs/{key}", "/none"):
        await api.call("GET", path, key=key)
    await api.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}}, key=key)


def holding(folder: Path, text: str) -> set[Path]:
    """Files that contain the text, plain or in the usual encodings."""
    plain = text.encode()
    disguises = [plain, plain.hex().encode(), base64.b64encode(plain)[:-4], plain[::-1]]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path for path in files if any(each in path.read_bytes() for each in disguises)}


def tuneserve(*arguments: str) -> str:
    """The output of the command."""
    command = [sys.executable, "-m", "tuneserve_server", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("mode", ["open", "keyed"])
async def test_a_key_is_in_no_log_and_in_no_file(mode: str, tmp_path: Path, bodies: Any) -> None:
    key = "tml-canary0f3b7c9e"
    settings = {
        "log_level": "debug",
        "log_format": "json" if mode == "keyed" else "text",
        "access_log": True,
        "require_keys": mode == "keyed",
    }
    with running_service(tmp_path, **settings) as service:
        url = f"http://127.0.0.1:{service.port}"
        if mode == "keyed":
            key = tuneserve(*("keys", "create", "--tenant", "canary", "--data-dir", f"{tmp_path}"))
        secret = key.rpartition("-")[2]
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
            remote = Remote(http, secret)
            await use_everything(remote, key, bodies)
            for headers in ({"X-API-Key": secret}, {"Authorization": f"Bearer {key}"}):
                answer = await http.get(f"{PREFIX}/sessions", headers=headers)
                assert answer.status_code == 401
            if mode == "keyed":
                await use_what_is_no_key(remote, key, tmp_path)
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(f"GET / HTTP/1.1\r\nX-API-Key: {key}\r\n: \r\n\r\n".encode())
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.close()
        while_running = holding(tmp_path, secret)
    assert service.log in holding(tmp_path, "listening on")  # the search finds existing text
    assert len(holding(tmp_path, "train:0")) >= 1
    assert while_running == holding(tmp_path, secret) == set()


async def use_what_is_no_key(remote: Remote, key: str, data_dir: Path) -> None:
    """Try the key with other ids, truncated, too often, and after it was revoked."""
    place = ("--data-dir", str(data_dir))
    _, key_id, secret = key.split("-")
    for wrong in (f"tml-nobody-{secret}", f"{key}0", *[f"tml-{n}-{secret}" for n in range(30)]):
        await remote.call("GET", "/sessions", key=wrong)
    assert min(remote.statuses[401], remote.statuses[429]) > 1
    assert (await remote.call("GET", "/sessions", key=key)).status_code == 200
    assert "canary" in tuneserve("keys", "list", *place)
    assert secret not in tuneserve("keys", "list", "--json", *place)
    tuneserve("keys", "revoke", key_id, *place)
    revoked_s = time.monotonic()
    while (await remote.call("GET", "/sessions", key=key)).status_code == 200:
        assert time.monotonic() < revoked_s + 5
        await asyncio.sleep(0.1)
