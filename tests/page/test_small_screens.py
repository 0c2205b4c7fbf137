"""The dashboard's views on small screens, with many runs."""

import pytest
from playwright.sync_api import Browser, expect

from tests.page.many_runs import run_id
from tests.page.stage import PHONE, Visit

WIDE = """() => [...document.querySelectorAll("body *")]
    .filter(each => each.getBoundingClientRect().right > innerWidth + 0.5
        && !each.closest(".sr, .u-over, .u-under, .skip, .cards thead"))
    .map(each => each.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("width", [320, 390, 768, 1024])
@pytest.mark.parametrize(
    "address",
    [
        "#/overview",
        "#/runs",
        f"#/runs/{run_id(495)}",
        f"#/compare?runs={run_id(1)}",
        "#/playground",
    ],
)
def test_no_column_is_cut(browser: Browser, many_runs: str, address: str, width: int) -> None:
    found = Visit(browser, many_runs, viewport={**PHONE, "width": width})
    page = found.page
    page.evaluate("address => { location.hash = address }", address)
    page.wait_for_selector("body[data-looks]")
    page.wait_for_selector("main > .view:visible .panel")
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(WIDE) == []
    if address == "#/runs":
        expect(page.locator("#all-table tbody tr").first.locator(".status")).to_be_visible()
        cut = "cells => cells.filter(each => each.scrollWidth > each.clientWidth + 1).length"
        assert page.locator("#all-table tbody .value").evaluate_all(cut) == 0
    found.context.close()
