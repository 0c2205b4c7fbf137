"""axe-core finds nothing on any view, and the keyboard and screen readers reach what matters."""

from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.page.many_runs import COUNT, run_id
from tests.page.stage import DESKTOP, PHONE, Visit

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
VIEWS = {
    "#/overview": "#tiles li",
    f"#/runs?runs={run_id(1)},{run_id(2)}": "#all-table tbody tr",
    f"#/runs/{run_id(COUNT - 5)}": "#run-body .figures canvas",
    f"#/compare?smooth=0.5&runs={run_id(1)},{run_id(2)}": "#compare-table tbody tr",
    "#/playground": "#play-model option",
}


def violations(page: Page) -> list[str]:
    options = {"runOnly": RULES, "resultTypes": ["violations"]}
    found = Axe().run(page, options=options).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html'][:120]}" for each in found]


@pytest.fixture
def visit(browser: Browser, many_runs: str, request: pytest.FixtureRequest) -> Iterator[Visit]:
    options: dict[str, Any] = getattr(request, "param", {})
    found = Visit(browser, many_runs, **options)
    found.page.wait_for_selector("body[data-looks]")
    yield found
    found.context.close()


def test_axe_finds_a_fault(visit: Visit) -> None:
    visit.page.evaluate(
        "document.getElementById('play-model').closest('label').replaceWith("
        "document.getElementById('play-model'))"
    )
    visit.page.evaluate("location.hash = '#/playground'")
    assert any(each.startswith("select-name") for each in violations(visit.page))


@pytest.mark.parametrize(
    "visit",
    [
        {"viewport": size, "color_scheme": theme}
        for size in (DESKTOP, PHONE)
        for theme in ("light", "dark")
    ],
    indirect=True,
    ids=["light", "dark", "light-phone", "dark-phone"],
)
def test_axe_finds_nothing_on_any_view(visit: Visit) -> None:
    for address, shown in VIEWS.items():
        visit.page.evaluate("address => { location.hash = address }", address)
        visit.page.wait_for_selector(shown, state="attached")
        assert violations(visit.page) == [], address


def test_a_view_takes_the_focus_and_the_title(visit: Visit) -> None:
    page = visit.page
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    for _ in range(2):
        page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Runs", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="All runs")).to_be_focused()
    assert page.title() == "Runs · tuneserve"
    page.keyboard.press("Tab")
    expect(page.get_by_role("searchbox", name="Search")).to_be_focused()
    page.keyboard.type("tickets 123")
    expect(page.locator("#all-count")).to_have_text("1 to 1 of 1")
    assert page.locator("#all-count").get_attribute("role") == "status"
    page.locator("#all-table .name").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="tickets 123")).to_be_focused()


def test_cards_are_still_a_table_for_screen_readers(browser: Browser, many_runs: str) -> None:
    found = Visit(browser, many_runs, viewport=PHONE)
    found.page.evaluate("location.hash = '#/runs'")
    table = found.page.get_by_role("table", name="All runs")
    row = table.get_by_role("row").nth(1)
    expect(row.get_by_role("rowheader")).to_have_count(1)
    expect(row.get_by_role("cell").first).to_be_visible()
    found.context.close()
