"""The messages of ``tuneserve up`` until the service can be used."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from tuneserve_server.settings import ApiSettings

_PAUSE_S = 0.1


async def report_progress(settings: ApiSettings, say: Callable[[str], None]) -> None:
    """Report the loading, wait for a worker of the settings' base model, report how to connect.

    Workers of other base models do not count.
    """
    health: dict[str, Any] = {}
    while not health:
        await asyncio.sleep(_PAUSE_S)
        health = await asyncio.to_thread(health_of, settings.url)
    say(f"loading {settings.served_name} ...")
    while (own := _own(health, settings.served_name)) is None:
        await asyncio.sleep(_PAUSE_S)
        health = await asyncio.to_thread(health_of, settings.url)
    key = "<from tuneserve keys create>" if health.get("keys_required") else "tml-local"
    say(f"ready: TINKER_BASE_URL={settings.url} TINKER_API_KEY={key}")
    say(f"page: {settings.url}/page/   documentation: {settings.url}/docs")
    say(f"base model {own['name']}, context {own.get('context_length')} tokens")
    if "warming" in own:
        say(f"warming up: {own['warming']}; requests that need the others wait for them")
    if "store_damage" in health:
        say(f"attention: {health['store_damage']}")
    if "failing" in own:
        say(f"attention: {own['failing']}")


def _own(health: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the base model's entry in ``healthz`` once a worker trains it, else None."""
    models = health.get("base_models", [])
    trained = [each for each in models if each["workers"] > each.get("samplers", 0)]
    return next((each for each in trained if each["name"] == name), None)


def health_of(url: str) -> dict[str, Any]:
    """Return the answer of ``healthz``, or an empty dict while no server answers.

    No proxy is used, because the server is on this machine.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/api/v1/healthz", timeout=5) as answer:
            health: dict[str, Any] = json.load(answer)
    except (OSError, urllib.error.URLError, ValueError):
        health = {}
    return health
