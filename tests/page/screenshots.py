"""``python -m tests.page.screenshots [runs]``: the pictures in docs/images.

Without an argument: the overview, of two training tenants. With ``runs``: the views of many runs,
at three widths, and the page of a run in both themes.
"""

import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.page.many_runs import COUNT, KEY, STEPS, fill, run_id
from tests.page.stage import (
    DESKTOP,
    PAGE,
    PHONE,
    Trainer,
    Visit,
    chromium,
    make_key,
    open_api,
    training,
)
from tuneserve_server.cli.local_server import LocalServer

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SEEN_S = 75.0
"""Seconds for which the dashboard is open before a picture, so that its metrics have a history."""
WIDTHS = {"desktop": DESKTOP, "tablet": {"width": 768, "height": 1024}, "phone": PHONE}
RUNNING = COUNT - 5  # each fifth run is running
LIST = f"#/runs?runs={run_id(COUNT - 3)},{run_id(COUNT - 4)}"
COMPARED = ",".join(run_id(number) for number in range(COUNT - 1, 9, -49)[:10])
VIEWS = {"runs": LIST, "run": f"#/runs/{run_id(RUNNING)}", "compare": f"#/compare?runs={COMPARED}"}
SAMPLES = ("Open the setings.", "Open Settings, then Security.", "Open Settings, then Security.")


def runs() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), COUNT)
        with open_api(Path(folder)) as url, chromium() as browser:
            _note(url)
            for view, address in VIEWS.items():
                for width, size in WIDTHS.items():
                    for theme in ("light", "dark") if view == "run" else ("light",):
                        visit = Visit(browser, url, viewport=size, color_scheme=theme)
                        visit.page.evaluate("address => { location.hash = address }", address)
                        visit.page.wait_for_selector("main > .view:visible .panel")
                        time.sleep(1.5)
                        visit.page.evaluate("document.activeElement.blur()")
                        visit.page.screenshot(path=IMAGES / f"{view}-{width}-{theme}.png")
                        visit.context.close()


def _note(url: str) -> None:
    """Leave samples of the running run, as its training loop would."""
    for number, text in enumerate(SAMPLES, 1):
        sample = {"prompt": "How do I reset my password?", "completion": text}
        httpx.post(
            f"{url}/api/v1/training_runs/{run_id(RUNNING)}/events",
            json={
                "kind": "samples",
                "step": number * STEPS // len(SAMPLES),
                "data": {"samples": [sample]},
            },
            headers={"X-API-Key": KEY},
        ).raise_for_status()


def overview() -> None:
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
            time.sleep(SEEN_S)
            light.page.screenshot(path=IMAGES / "page-light.png", full_page=True)
            light.page.emulate_media(color_scheme="dark")
            time.sleep(1.5)
            light.page.screenshot(path=IMAGES / "page-dark.png", full_page=True)


if __name__ == "__main__":
    runs() if sys.argv[1:] == ["runs"] else overview()
