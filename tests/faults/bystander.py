"""A tenant that asks for little, and measures how long it takes while others do harm."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx


class Bystander:
    """Requests the health and a finished result, again and again."""

    def __init__(
        self, port: int, base_model: str = "tuneserve/fake", pause_s: float = 0.005
    ) -> None:
        headers = {"X-API-Key": "tml-alice"}
        base = f"http://127.0.0.1:{port}/api/v1"
        self._http = httpx.Client(base_url=base, headers=headers, timeout=120, trust_env=False)
        self._pause_s = pause_s
        self._request_id = self._accepted(base_model)
        self._over = threading.Event()
        self._away = threading.Event()
        self._error: BaseException | None = None
        self.forget()
        self._thread = threading.Thread(target=self._ask)

    def forget(self) -> None:
        """Drop the measurements so far."""
        self.healthz_s: list[float] = []
        self.polls_s: list[float] = []

    @contextmanager
    def away(self) -> Iterator[None]:
        """The service may be away during the block: requests in it do not count."""
        self._away.set()
        try:
            yield
        finally:
            self._away.clear()

    def _post(self, path: str, body: object) -> httpx.Response:
        return self._http.post(path, json=body)

    def _accepted(self, base_model: str) -> str:
        session = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        session_id = self._post("/create_session", session).json()["session_id"]
        lora = {"rank": 4, "seed": 1}
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": base_model}
        answer = self._post("/create_model", {**body, "lora_config": lora})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["request_id"])

    def _ask(self) -> None:
        while not self._over.is_set():
            may_fail = self._away.is_set()
            started_s = time.perf_counter()
            try:
                between_s = self._ask_once()
            except (httpx.TransportError, AssertionError) as error:
                if not may_fail and not self._away.is_set():
                    self._error = error
                    return
            else:
                if not may_fail and not self._away.is_set():
                    self.healthz_s.append(between_s - started_s)
                    self.polls_s.append(time.perf_counter() - between_s)
            time.sleep(self._pause_s)

    def _ask_once(self) -> float:
        """The time until the first of the two answers."""
        assert self._http.get("/healthz").status_code == 200
        between_s = time.perf_counter()
        answer = self._post("/retrieve_future", {"request_id": self._request_id})
        assert answer.status_code == 200, answer.text
        return between_s

    def __enter__(self) -> "Bystander":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._http.close()
        if self._error is not None:
            raise self._error
