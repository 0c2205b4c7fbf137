"""The API called without a socket, thousands of times a second."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def call(
    app: FastAPI, method: str, target: str, body: bytes, headers: dict[str, str]
) -> Answer:
    """The application's answer. An exception that the application lets through is raised here."""
    path, _, query = target.partition("?")
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path, errors="replace"),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [
            (k.lower().encode(), v.encode("latin-1"))
            for k, v in ({"host": "localhost"} | headers).items()
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "app": app,
    }
    requests: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not requests:
            await asyncio.Event().wait()  # the client stays until it is answered
        return requests.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return Answer(
        status=sent[0]["status"],
        headers={k.decode(): v.decode("latin-1") for k, v in sent[0]["headers"]},
        body=b"".join(message.get("body", b"") for message in sent[1:]),
    )
