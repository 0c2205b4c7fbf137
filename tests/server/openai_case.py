"""Requests to the OpenAI-compatible routes, and what their answers have in common."""

import string
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
