"""The route from which clients get a base model's tokenizer."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.anyio

HEADERS = {"X-API-Key": "tml-a"}
FAKE = "tuneserve/fake"


async def get(api: Any, **asked: Any) -> Any:
    headers = {**HEADERS, **asked.pop("headers", {})}
    return await api.http.get("/api/v1/tokenizer", params=asked, headers=headers)


async def test_each_file_equals_the_one_that_the_worker_reads(
    speaking: Any, tokenizer: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        response = await get(speaking, base_model=FAKE, file=name)
        assert response.status_code == 200
        assert response.content == (tokenizer / name).read_bytes()
    unnamed = await get(speaking, base_model=f"{FAKE}:suffix")
    assert unnamed.content == (tokenizer / "tokenizer.json").read_bytes()


async def test_a_cached_file_is_not_sent_again_until_it_changes(
    speaking: Any, tokenizer: Path
) -> None:
    tag = (await get(speaking, base_model=FAKE)).headers["ETag"]
    same = await get(speaking, base_model=FAKE, headers={"If-None-Match": f'"other", {tag}'})
    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["ETag"] == tag
    (tokenizer / "tokenizer.json").write_text("{} ")
    changed = await get(speaking, base_model=FAKE, headers={"If-None-Match": tag})
    assert (changed.status_code, changed.content) == (200, b"{} ")


async def test_a_file_that_the_tokenizer_lacks_is_absent_and_others_are_refused(
    speaking: Any, tokenizer: Path
) -> None:
    absent = await get(speaking, base_model=FAKE, file="chat_template.jinja")
    assert (absent.status_code, absent.json()["code"]) == (404, "not_found")
    (tokenizer / "secret.json").write_text("{}")
    for name in ("secret.json", "../store.db", "/etc/passwd", ""):
        response = await get(speaking, base_model=FAKE, file=name)
        assert (response.status_code, response.json()["code"]) == (422, "malformed")


async def test_an_unknown_base_model_is_refused_with_the_known_ones(speaking: Any) -> None:
    response = await get(speaking, base_model="no/such")
    assert (response.status_code, response.json()["code"]) == (400, "invalid_request")
    assert FAKE in response.json()["detail"]
    missing = await get(speaking)
    assert missing.status_code == 422


async def test_an_unreadable_tokenizer_is_unavailable(service: Any, api: Any) -> None:
    """The fake worker's tokenizer does not exist."""
    response = await get(service, base_model=FAKE)
    assert (response.status_code, response.json()["code"]) == (503, "model_unavailable")
    assert "tokenizer.json" in response.json()["detail"]


async def test_a_valid_key_is_required(speaking: Any) -> None:
    response = await get(speaking, base_model=FAKE, headers={"X-API-Key": "none"})
    assert response.status_code == 401
