"""Measure how long the dashboard's list of 500 runs takes to answer in Chromium.

The time is from the event of the input until the new rows are on the page. The API process and the
browser share this machine; the store is SQLite.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the store's contents are in the tests

from playwright.sync_api import Page
from results import publish, table

from tests.page.many_runs import COUNT, fill
from tests.page.stage import Visit, chromium, open_api

CHANGES = {
    "search by name": ("all-q", "input", ["tickets 1", "tickets 12", "tickets 123", ""]),
    "filter by state": ("all-state", "change", ["finished", "stopped", "running", ""]),
    "filter by tag": ("all-tag", "change", ["night", "sweep", ""]),
    "sort by name": ("all-sort", "change", ["name", "created"]),
    "sort by loss": ("all-sort", "change", ["loss", "created"]),
    "sort by held-out loss": ("all-sort", "change", ["held_out_loss", "created"]),
}
CHANGE = """async ([id, event, value]) => {
    const field = document.getElementById(id);
    const list = document.getElementById("all-table");
    const before = list.dataset.shown;
    const startedMs = performance.now();
    field.value = value;
    field.dispatchEvent(new Event(event));
    while (list.dataset.shown === before) {
        await new Promise(requestAnimationFrame);
    }
    return performance.now() - startedMs;
}"""


def times_ms(page: Page, change: tuple[str, str, list[str]], rounds: int) -> list[float]:
    field, event, values = change
    found = []
    for _ in range(rounds):
        for value in values:
            found.append(float(page.evaluate(CHANGE, [field, event, value])))
            page.wait_for_timeout(100)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="Do not store the table.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), COUNT)
        with open_api(Path(folder)) as url, chromium() as browser:
            visit = Visit(browser, url)
            visit.page.evaluate("location.hash = '#/runs'")
            visit.page.wait_for_selector("#all-table tbody tr")
            times_ms(visit.page, CHANGES["sort by loss"], 1)  # reads all curves once
            taken = {name: times_ms(visit.page, of, asked.rounds) for name, of in CHANGES.items()}
    about = f"`benchmarks/dashboard.py`: a list of {COUNT} runs, 50 on a page, in Chromium."
    rows = [[name, statistics.median(of), max(of)] for name, of in taken.items()]
    columns = ["change", "median, ms", "most, ms"]
    tables = table("The dashboard's list of runs", about, columns, rows)
    publish({"list_ms": taken}, tables, dry_run=asked.dry_run)


if __name__ == "__main__":
    main()
