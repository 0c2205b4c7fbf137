"""The messages of tuneserve up until the service can be used."""

from typing import Any

import pytest

from tuneserve_server.cli.readiness import report_progress

pytestmark = pytest.mark.anyio


async def test_up_prints_that_it_is_ready_and_how_far_compilation_is(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    own = {
        "name": settings.served_name,
        "context_length": 77,
        "warming": "1 of 3 programs compiled",
        "failing": "1 of 3 programs cannot be compiled",
    }
    other = {"name": "other/model", "workers": 1, "context_length": 9}
    answers = [
        {},
        {"worker": "absent", "base_models": []},
        # The command must not wait for a worker of another base model on the same data directory.
        {"worker": "ready", "base_model": "other/model", "base_models": [other]},
        {"worker": "ready", "base_models": [{**own, "workers": 0}, other]},
        {"worker": "ready", "base_models": [other, {**own, "workers": 1}]},
    ]
    monkeypatch.setattr("tuneserve_server.cli.readiness.health_of", lambda _: answers.pop(0))
    said: list[str] = []
    await report_progress(settings, said.append)
    assert said[1] == f"ready: TINKER_BASE_URL={settings.url} TINKER_API_KEY=tml-local"
    assert not answers
    assert said[2:] == [
        f"page: {settings.url}/page/   documentation: {settings.url}/docs",
        f"base model {settings.served_name}, context 77 tokens",
        "warming up: 1 of 3 programs compiled; requests that need the others wait for them",
        "attention: 1 of 3 programs cannot be compiled",
    ]


async def test_up_says_how_to_get_a_key_if_keys_are_required(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    own = {"name": settings.served_name, "workers": 1}
    health = {"base_models": [own], "keys_required": True}
    monkeypatch.setattr("tuneserve_server.cli.readiness.health_of", lambda _: health)
    said: list[str] = []
    await report_progress(settings, said.append)
    assert said[1].endswith("TINKER_API_KEY=<from tuneserve keys create>")
