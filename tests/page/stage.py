"""The setting of the dashboard's tests: real processes, training tenants, Debian's browser."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, sync_playwright

from examples.demo.tasks import FACTS, TASKS
from tests.quick_service import QUICK
from tuneserve_client import Client, chat_datum
from tuneserve_server.cli.local_server import LocalServer, free_port
from tuneserve_server.cli.readiness import health_of

PAGE = {
    **QUICK,
    "lease_ttl_s": "1.5",  # metrics are reported every third of it
    "require_keys": "true",
}
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


class Trainer(threading.Thread):
    """A tenant that trains until it is stopped, whatever the server does meanwhile."""

    def __init__(
        self,
        url: str,
        key: str,
        name: str,
        task: int,
        learning_rate: float,
        *,
        pause_s: float = 0.25,
        saved_at: int = 3,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._pause_s = pause_s  # leaves some of the processor to viewers
        self._url = url
        self._key = key
        self._task = TASKS[task]
        self._saved_at = saved_at  # steps after which it saves weights to sample from
        self._learning_rate = learning_rate
        self._stopped = threading.Event()
        self.model_id = ""
        self.saved = ""
        self.steps = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with Client(self._url, self._key, name=self.name) as client:
                self._train(client)
        except BaseException as error:
            self.error = error

    def _train(self, client: Client) -> None:
        model = client.create_model(rank=8, seed=0)
        self.model_id = model.id
        tokenizer = client.tokenizer()
        data = [
            chat_datum(
                tokenizer,
                [
                    {"role": "user", "content": fact.question},
                    {"role": "assistant", "content": self._task.reply(fact)},
                ],
            )
            for fact in FACTS
        ]
        while not self._stopped.is_set():
            batch = [data[(4 * self.steps + index) % len(data)] for index in range(4)]
            model.forward_backward(batch)
            # The rate falls, so that its curve differs from a frame.
            rate = self._learning_rate * 0.99**self.steps
            model.optim_step(learning_rate=rate).result()
            self.steps += 1
            self._stopped.wait(self._pause_s)
            if self.steps == self._saved_at:
                self.saved = model.save_sampler("first").path

    def end(self) -> None:
        self._stopped.set()
        self.join(60)
        if self.error is not None:
            raise self.error


@contextmanager
def training(*trainers: Trainer) -> Iterator[None]:
    for each in trainers:
        each.start()
    try:
        yield
    finally:
        for each in trainers:
            each.end()


@contextmanager
def open_api(folder: Path) -> Iterator[str]:
    """The address of an API process alone, without any key."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).with_name("tuneserve")), "api"]
    environment = {**os.environ, "TUNESERVE_DATA_DIR": str(folder), "TUNESERVE_PORT": str(port)}
    with (
        (folder / "api.log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            until_s = time.monotonic() + 60
            while not health_of(url):
                assert process.poll() is None and time.monotonic() < until_s
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


@contextmanager
def heartbeats(url: str, session: str, key: str) -> Iterator[None]:
    """Keep a session alive during the block, as the client of its runs would."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(10):
            httpx.post(
                f"{url}/api/v1/session_heartbeat",
                json={"session_id": session},
                headers={"X-API-Key": key},
            ).raise_for_status()

    with ThreadPoolExecutor(1) as pool:
        beating = pool.submit(beat)
        try:
            yield
        finally:
            ended.set()
            beating.result()


def kill_api(server: LocalServer) -> None:
    """Kill the API process. Its supervisor starts another."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    (pid,) = [
        int(child)
        for child in children
        if b"\0api\0" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    os.kill(pid, signal.SIGKILL)


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = shutil.which("chromium")
        assert chromium is not None, "there is no chromium: apt-get install chromium"
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A dashboard in a separate window, with its complaints and its requests."""

    def __init__(self, browser: Browser, url: str, key: str | None = None, **options: Any) -> None:
        options.setdefault("viewport", DESKTOP)
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda each: self.said.append(f"{each.type}: {each.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"exception: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(f"{url}/")
        if key is not None:
            self.page.get_by_label("Key, tml-").fill(key)
            self.page.get_by_role("button", name="Open").click()
            self.page.wait_for_selector("body[data-looks]")

    def points(self) -> int:
        """The number of points of the drawn loss curves."""
        return int(self.page.get_attribute("#loss", "data-points") or 0)

    def wait_for_points(self, least: int) -> None:
        self.page.wait_for_function(
            "least => Number(document.getElementById('loss').dataset.points) >= least",
            arg=least,
            timeout=120_000,  # programs are compiled first
        )


def make_key(server: LocalServer, tenant: str, *scopes: str) -> str:
    """Make a key like an operator, over the socket that only users of the machine reach."""
    transport = httpx.HTTPTransport(uds=str(server.data_dir / "admin.sock"))
    with httpx.Client(transport=transport, base_url="http://admin") as http:
        answer = http.post("/keys", json={"tenant": tenant, "scopes": scopes})
    made: str = answer.raise_for_status().json()["key"]
    return made
