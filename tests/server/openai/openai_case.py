"""Requests to the OpenAI-compatible routes, and the checks that their answers share."""

import asyncio
import json
import string
from collections.abc import Callable
from typing import Any

LETTERS = string.ascii_letters + string.digits + " "
ASK = {"model": "tuneserve/fake", "prompt": "ab", "max_tokens": 3, "seed": 7}
CHAT = {
    "model": "tuneserve/fake",
    "messages": [{"role": "user", "content": "hi"}],  # "user hi assistant": 17 tokens
    "max_tokens": 3,
    "seed": 7,
}


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}{{ m.role }} {{ m.content }} "
    "{% endfor %}{% if add_generation_prompt %}{{ voice or 'assistant' }}{% endif %}"
)


def logprob(x: int, y: int) -> float:
    return -(1 + (x + y) % 8) / 8


async def ask(api: Any, path: str, body: Any = None, *, key: str = "tml-a", **options: Any) -> Any:
    method = "GET" if body is None and not options else "POST"
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    if body is not None:
        options["json"] = body
    return await api.http.request(method, f"/v1{path}", headers=headers, **options)


async def complete(api: Any, **fields: Any) -> Any:
    response = await ask(api, "/completions", {**ASK, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def chat(api: Any, **fields: Any) -> Any:
    response = await ask(api, "/chat/completions", {**CHAT, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def assert_error(response: Any, status: int, code: str, param: str | None) -> str:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert int(response.headers["content-length"]) == len(response.content)
    message: str = error["message"]
    return message


def events(response: Any) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    found = [each for each in response.text.split("\n\n")[:-1] if not each.startswith(":")]
    assert all(each.startswith("data: ") for each in found)
    return [each.removeprefix("data: ") for each in found]


class Streaming:
    """A request whose answer is read as it arrives, unlike with httpx's transport to an app."""

    def __init__(self, api: Any, path: str, body: Any) -> None:
        self._app = api.app
        self._path = f"/v1{path}"
        self.body = body
        self.text = ""
        self._news = asyncio.Event()
        self._left = asyncio.Event()

    async def __aenter__(self) -> "Streaming":
        self._running = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: Any) -> None:
        """Disconnect the client, if the answer has not ended."""
        self._left.set()
        async with asyncio.timeout(10):
            await self._running

    async def _run(self) -> None:
        messages = [{"type": "http.request", "body": json.dumps(self.body).encode()}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"authorization", b"Bearer tml-a")],
            "state": {},
        }

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await self._left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.text += message.get("body", b"").decode()
            self._news.set()

        await self._app(scope, receive, send)

    @property
    def events(self) -> list[Any]:
        """The events that have arrived, without the final ``[DONE]``."""
        found = [each for each in self.text.split("\n\n")[:-1] if not each.startswith(":")]
        data = [each.removeprefix("data: ") for each in found]
        return [json.loads(each) for each in data if each != "[DONE]"]

    @property
    def is_done(self) -> bool:
        return self.text.endswith("data: [DONE]\n\n")

    @property
    def said(self) -> dict[int, str]:
        """The text of every choice that has arrived so far."""
        said: dict[int, str] = {}
        for event in self.events:
            for choice in event["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                said[choice["index"]] = said.get(choice["index"], "") + text
        return said

    async def until(self, is_so: Callable[["Streaming"], bool]) -> None:
        async with asyncio.timeout(10):
            while not is_so(self):
                self._news.clear()
                await self._news.wait()

    async def says(self, said: dict[int, str]) -> None:
        """Return when the choices have this text."""
        await self.until(lambda stream: stream.said == said)

    async def done(self) -> None:
        await self.until(lambda stream: stream.is_done)


def whole(events: list[Any]) -> list[Any]:
    """The choices of a stream of completions, joined as in a single answer."""
    choices: dict[int, Any] = {}
    for event in events:
        for piece in event["choices"]:
            if piece["index"] not in choices:
                choices[piece["index"]] = piece
                continue
            choice = choices[piece["index"]]
            assert choice["finish_reason"] is None
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"] is not None:
                for name, values in piece["logprobs"].items():
                    before = choice["logprobs"][name]
                    choice["logprobs"][name] = (
                        before + values if before and values else before or values
                    )
    return [choices[index] for index in sorted(choices)]
