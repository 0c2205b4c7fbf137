"""``python -m tests.page.screenshots``: the pictures in docs/images, of two training tenants."""

import tempfile
import time
from pathlib import Path

import httpx
from playwright.sync_api import expect

from tests.page.stage import PAGE, PHONE, Trainer, Visit, chromium, make_key, training
from tuneserve_server.cli.local_server import LocalServer

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SEEN_S = 75.0
"""Seconds for which the dashboard is open before a picture, so that its metrics have a history."""
ANSWERED = 60_000


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, LocalServer(Path(folder), **PAGE) as server:
        alice, bob = (make_key(server, name, "train", "sample") for name in ("alice", "bob"))
        looking = make_key(server, "alice", "sample", "admin")
        trainers = [
            Trainer(server.url, alice, "pirate", 0, 8e-4, pause_s=0.6, saved_at=30),
            Trainer(server.url, bob, "shouting", 1, 5e-4, pause_s=0.5),
            Trainer(server.url, alice, "pirate, slowly", 0, 3e-4, pause_s=0.7, saved_at=60),
        ]
        with training(*trainers), chromium() as browser:
            httpx.post(
                f"{server.url}/api/v1/weights_info",
                json={"tinker_path": "tinker://my-run/weights/last"},
                headers={"X-API-Key": bob},
            )
            light = Visit(browser, server.url, looking, color_scheme="light")
            light.wait_for_points(3 * 32)
            _ask(light)
            time.sleep(SEEN_S)
            light.page.screenshot(path=IMAGES / "page-light.png", full_page=True)
            light.page.emulate_media(color_scheme="dark")
            time.sleep(1.5)
            light.page.screenshot(path=IMAGES / "page-dark.png", full_page=True)
            phone = Visit(browser, server.url, looking, viewport=PHONE, device_scale_factor=2)
            phone.wait_for_points(1)
            time.sleep(8)
            phone.page.screenshot(path=IMAGES / "page-phone.png")


def _ask(visit: Visit) -> None:
    """Let the playground answer with alice's checkpoint."""
    page = visit.page
    expect(page.locator("#play-model option")).to_have_count(2, timeout=ANSWERED)
    page.select_option("#play-model", index=1)
    page.select_option("#play-kind", "chat")
    page.fill("#play-prompt", "What colour is the sky?")
    for _ in range(2):  # the first answer compiles the programs
        page.click("#play-send")
        expect(page.locator("#play-state")).to_contain_text("ended by", timeout=ANSWERED)
    page.mouse.move(0, 0)


if __name__ == "__main__":
    main()
