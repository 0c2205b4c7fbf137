"""The dashboard's views of 500 runs: the list, the page of a run, and the comparison."""

import csv
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Download, Locator, Page, Route, expect

from tests.page.many_runs import (
    ASKED,
    COUNT,
    FOREIGN,
    KEY,
    OTHER_KEY,
    RESTORED,
    STEPS,
    last_loss,
    run_id,
    tags,
)
from tests.page.stage import Visit

PAGE = 50
NEWEST = COUNT - 1


@pytest.fixture
def visit(browser: Browser, many_runs: str) -> Iterator[Visit]:
    """A dashboard, which may not complain."""
    found = Visit(browser, many_runs, permissions=["clipboard-read", "clipboard-write"])
    found.page.wait_for_selector("body[data-looks]")
    yield found
    found.context.close()
    assert found.said == []


def open_view(visit: Visit, address: str) -> Page:
    visit.page.evaluate("address => { location.hash = address }", address)
    return visit.page


def choice(page: Page, name: str) -> Locator:
    return page.get_by_role("combobox", name=name, exact=True)


def names(page: Page) -> list[str]:
    return page.locator("#all-table .name").all_inner_texts()


def named(*numbers: int) -> list[str]:
    return [f"tickets {number:03}" for number in numbers]


def metadata(url: str, number: int, **entries: str | None) -> None:
    """Set entries as another client would."""
    httpx.patch(
        f"{url}/api/v1/training_runs/{run_id(number)}",
        json={"user_metadata": entries},
        headers={"X-API-Key": KEY},
    ).raise_for_status()


# --- the list -------------------------------------------------------------------------------------


def test_every_run_is_on_one_of_the_pages(visit: Visit) -> None:
    page = open_view(visit, "#/runs")
    seen: list[str] = []
    for number in range(COUNT // PAGE):
        first = number * PAGE + 1
        expect(page.locator("#all-count")).to_have_text(f"{first} to {first + PAGE - 1} of {COUNT}")
        expect(page.locator("#all-table tbody tr")).to_have_count(PAGE)
        seen += names(page)
        if number < COUNT // PAGE - 1:
            page.get_by_role("button", name="Next").click()
    assert seen == named(*range(NEWEST, -1, -1))
    expect(page.get_by_role("button", name="Next")).to_be_disabled()
    page.go_back()
    expect(page.locator("#all-page")).to_have_text("Page 9 of 10")


def test_a_search_a_state_and_a_tag_leave_the_runs_that_match(visit: Visit) -> None:
    page = open_view(visit, "#/runs")
    page.get_by_label("Search").fill("tickets 12")
    wanted = list(range(129, 119, -1))
    expect(page.locator("#all-count")).to_have_text("1 to 10 of 10")
    assert names(page) == named(*wanted)
    choice(page, "State").select_option("finished")
    expect(page.locator("#all-count")).to_have_text("1 to 2 of 2")
    assert names(page) == named(126, 121)
    choice(page, "State").select_option("")
    page.get_by_role("button", name="Filter by the tag night").first.click()
    expect(page.locator("#all-count")).to_have_text("1 to 2 of 2")
    assert names(page) == named(*(number for number in wanted if "night" in tags(number)))
    page.get_by_label("Search").fill("no such run")
    expect(page.locator("#all-empty")).to_have_text("No run matches.")


def test_a_column_sorts_all_runs_both_ways(visit: Visit) -> None:
    page = open_view(visit, "#/runs")
    page.get_by_role("button", name="Loss", exact=True).click()
    head = page.locator('th[data-sort="loss"]')
    expect(head).to_have_attribute("aria-sort", "ascending")
    expect(page.locator("#all-table .name").first).to_have_text("tickets 000")
    assert names(page) == named(*range(PAGE))
    assert page.locator("#all-table td.loss .value").first.inner_text() == f"{last_loss(0):.4f}"
    page.get_by_role("button", name="Loss", exact=True).click()
    expect(head).to_have_attribute("aria-sort", "descending")
    expect(page.locator("#all-table .name").first).to_have_text(f"tickets {NEWEST}")


def test_the_address_brings_a_view_back(visit: Visit, browser: Browser, many_runs: str) -> None:
    page = open_view(visit, "#/runs")
    page.get_by_label("Search").fill("tickets")
    choice(page, "State").select_option("stopped")
    choice(page, "Sort by").select_option("name")
    choice(page, "Order").select_option("asc")
    page.get_by_role("button", name="Next").click()
    expect(page.locator("#all-count")).to_have_text("51 to 100 of 100")
    page.get_by_label("Select tickets 252").check()
    page.get_by_label("Select tickets 257").check()
    address, shown = page.url, names(page)
    again = Visit(browser, address.removesuffix("/"))
    again.page.goto(address)
    expect(again.page.locator("#all-count")).to_have_text("51 to 100 of 100")
    assert names(again.page) == shown
    assert again.page.get_by_label("Search").input_value() == "tickets"
    expect(again.page.locator("#picked-count")).to_have_text("2 of at most 10 selected")
    expect(again.page.get_by_label("Select tickets 257")).to_be_checked()
    again.context.close()


def test_an_archived_run_leaves_the_list_and_comes_back(visit: Visit, many_runs: str) -> None:
    page = open_view(visit, "#/runs?q=tickets+49")
    expect(page.locator("#all-count")).to_have_text("1 to 10 of 10")
    page.get_by_label("Select tickets 493").check()
    page.get_by_role("button", name="Archive", exact=True).click()
    expect(page.locator("#all-count")).to_have_text("1 to 9 of 9")
    choice(page, "Archive").select_option("archived")
    expect(page.locator("#all-count")).to_have_text("1 to 1 of 1")
    page.get_by_role("link", name="tickets 493").click()
    page.get_by_role("button", name="Take out of the archive").click()
    expect(page.locator("#edit-state")).to_have_text("taken out of the archive")
    page.get_by_role("link", name="All runs", exact=True).click()
    expect(page.locator("#all-count")).to_have_text(f"1 to {PAGE} of {COUNT}")


def test_another_tenants_run_is_left_out_when_a_selection_is_archived(
    visit: Visit, many_runs: str
) -> None:
    page = open_view(visit, "#/runs?q=tickets+25")
    for number in (FOREIGN, 258, 259):
        page.get_by_label(f"Select tickets {number}").check()
    page.get_by_role("button", name="Archive", exact=True).click()
    expect(page.locator("#all-archived-now")).to_contain_text("2 archived; 1 left out")
    expect(page.locator("#all-count")).to_have_text("1 to 8 of 8")
    page.get_by_label("Select tickets 257").check()
    expect(page.locator("#all-archived-now")).to_have_text("")
    for number in (258, 259):
        metadata(many_runs, number, archived=None)


# --- a run ----------------------------------------------------------------------------------------


def open_run(visit: Visit, number: int, query: str = "") -> Page:
    page = open_view(visit, f"#/runs/{run_id(number).replace(':', '%3A')}{query}")
    expect(page.locator("#run-title")).to_have_text(f"tickets {number:03}")
    expect(page.locator("#run-body")).to_be_visible()
    return page


def answer(page: Page, question: str) -> str:
    return page.locator("#answers li", has_text=question).inner_text()


def test_the_page_of_a_run_answers_three_questions(visit: Visit, many_runs: str) -> None:
    asked = f"{many_runs}/api/v1/training_runs/{run_id(495)}"  # 495 % 5 == 0: it runs
    newest = httpx.get(asked, headers={"X-API-Key": KEY}).json()["last_request_time"]
    visit.page.clock.set_fixed_time(newest)
    page = open_run(visit, 495)
    good = answer(page, "Is it good?")
    assert "Improving" in good and f"{last_loss(495) + 0.1:.4f}" in good
    assert f"step {STEPS} of {ASKED}" in answer(page, "When is it done?")
    assert re.search(r"in \d+ (min|s)", answer(page, "When is it done?"))
    cost = answer(page, "What did it cost?")
    assert "4 s" in cost and "20.0 k tokens" in cost  # 40 steps of 0.1 s and 500 tokens
    facts = dict(
        zip(
            page.locator("#run-config dt").all_inner_texts(),
            page.locator("#run-config dd").all_inner_texts(),
            strict=True,
        )
    )
    assert (facts["Data"], facts["Rows"], facts["Seed"]) == ("tickets.jsonl", "640", "7")
    assert (facts["Base model"], facts["Adapter"]) == ("tuneserve/tiny", "lora, rank 8")


def test_the_curves_are_all_there_and_hidden_without_points(visit: Visit) -> None:
    page = open_run(visit, 495)
    points = {"learning_rate": STEPS, "grad_norm": STEPS, "step_time_s": STEPS - 1}
    points |= {"loss": STEPS + STEPS // 5, "tokens_per_s": STEPS - 1}
    for column, count in points.items():
        expect(page.locator(f'[data-column="{column}"]')).to_have_attribute(
            "data-points", str(count)
        )
    assert page.locator(".figures figure:visible").count() == len(points)


def test_the_title_of_a_chart_with_two_lines_says_which_is_which(visit: Visit) -> None:
    page = open_view(visit, f"#/runs/{run_id(NEWEST)}")
    title = page.locator("figcaption", has_text="Loss and held-out loss")
    expect(title.locator("line")).to_have_count(2)
    colours = title.locator("line").evaluate_all("lines => lines.map((one) => one.style.stroke)")
    assert len(set(colours)) == 2 and all(re.fullmatch(r"var\(--line-\d+\)", c) for c in colours)
    expect(page.locator("figcaption", has_text="Learning rate").locator("line")).to_have_count(0)


def test_dragging_zooms_and_a_double_click_shows_the_whole(visit: Visit) -> None:
    page = open_run(visit, 495)
    chart = page.locator('[data-column="loss"] .u-over')
    box = chart.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, middle, steps=5)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"from=\d+(\.\d+)?&to=\d"))
    low, high = (
        float(page.locator(f"[name={name}]:visible").input_value()) for name in ("from", "to")
    )
    # Steps 1 to 40: the middle is at 20.5, nine tenths of the way at 36.1.
    assert (low, high) == (pytest.approx(20.5, abs=0.5), pytest.approx(36.1, abs=0.5))
    chart.dblclick()
    expect(page).not_to_have_url(re.compile("from="))
    page.get_by_role("spinbutton", name="From").fill("10")
    page.get_by_role("spinbutton", name="To", exact=True).fill("20")
    page.keyboard.press("Tab")
    expect(page).to_have_url(re.compile("from=10&to=20"))
    page.get_by_role("button", name="Reset zoom").click()
    expect(page).not_to_have_url(re.compile("from="))


def test_axis_smoothing_and_scale_are_in_the_address(visit: Visit) -> None:
    page = open_run(visit, 495, "?x=time&smooth=0.6&log=1")
    assert choice(page, "Horizontal axis").input_value() == "time"
    assert page.get_by_role("slider", name="Smoothing").input_value() == "0.6"
    expect(page.get_by_role("button", name="Log scale")).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".by").first).to_have_text(", by time")
    drawn = page.locator('[data-column="loss"] canvas')
    before = drawn.screenshot()
    page.get_by_role("slider", name="Smoothing").fill("0")
    expect(page).not_to_have_url(re.compile("smooth="))
    assert drawn.screenshot() != before


def saved(download: Download, folder: Path) -> Path:
    path = folder / download.suggested_filename
    download.save_as(path)
    return path


def test_a_curve_is_saved_as_csv_and_as_png(visit: Visit, tmp_path: Path) -> None:
    page = open_run(visit, 495)
    with page.expect_download() as told:
        page.get_by_role("button", name="Download CSV").click()
    path = saved(told.value, tmp_path)
    assert path.name == "tickets-495.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    assert float(rows[-1]["loss"]) == pytest.approx(last_loss(495))
    assert float(rows[-1]["held_out_loss"]) == pytest.approx(last_loss(495) + 0.1)
    with page.expect_download() as told:
        page.get_by_role("button", name="Download Learning rate as PNG").click()
    image = saved(told.value, tmp_path).read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", image[16:24])
    assert width > 300 and height > 150


def test_name_tags_and_notes_are_kept(visit: Visit, many_runs: str) -> None:
    page = open_run(visit, 7)
    page.get_by_label("Tags, separated by commas").fill("best, best ,release")
    page.get_by_role("textbox", name="Notes").fill("<b>good</b> on tickets")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#edit-state")).to_have_text("saved")
    page.reload()
    expect(page.get_by_label("Tags, separated by commas")).to_have_value("best, release")
    expect(page.get_by_role("textbox", name="Notes")).to_have_value("<b>good</b> on tickets")
    open_view(visit, "#/runs?q=good")
    expect(page.locator("#all-table .name")).to_have_text(["tickets 007"])
    metadata(many_runs, 7, tags=None, notes=None)


def test_only_the_owner_of_a_run_sees_the_form_that_changes_it(
    visit: Visit, many_runs: str
) -> None:
    page = open_run(visit, 8)
    expect(page.locator("#edit")).to_be_visible()
    open_run(visit, FOREIGN)
    expect(page.get_by_text("can change this run")).to_be_visible()
    expect(page.locator("#edit")).to_be_hidden()
    expect(page.locator("#run-archive")).to_be_hidden()
    page.locator("#who").click()
    page.get_by_label("Name, tml-").fill(OTHER_KEY)
    page.get_by_role("button", name="Open", exact=True).click()
    expect(page.locator("#edit")).to_be_visible()
    expect(page.get_by_text("can change this run")).to_be_hidden()


def test_a_run_that_was_opened_while_another_is_saved_stays_open(
    visit: Visit, many_runs: str
) -> None:
    page = open_run(visit, 9)
    held: list[Route] = []
    page.route("**/api/v1/training_runs/*", lambda route: held.append(route))
    page.get_by_role("textbox", name="Notes").fill("slow")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#edit-state")).to_have_text("saving")
    open_run(visit, 8)
    with page.expect_response("**/api/v1/training_runs/*"):
        held[0].continue_()
    page.wait_for_timeout(500)
    assert page.locator("#run-title").inner_text() == "tickets 008"
    assert page.locator("#edit-state").inner_text() == ""
    assert page.get_by_role("textbox", name="Notes").input_value() == ""
    metadata(many_runs, 9, notes=None)


def test_a_run_that_was_restored_with_other_results_says_so(visit: Visit) -> None:
    page = open_run(visit, RESTORED)
    expect(page.locator("#run-diverged")).to_contain_text("restored with other results")
    open_run(visit, 8)
    expect(page.locator("#run-diverged")).to_be_hidden()


def test_samples_events_and_checkpoints_are_listed(visit: Visit, many_runs: str) -> None:
    for step, text in ((5, "Open Setings."), (10, "Open Settings.")):
        httpx.post(
            f"{many_runs}/api/v1/training_runs/{run_id(400)}/events",
            json={
                "kind": "samples",
                "step": step,
                "data": {"samples": [{"prompt": "<i>Reset?</i>", "completion": text}]},
            },
            headers={"X-API-Key": KEY},
        ).raise_for_status()
    page = open_run(visit, 400)
    prompts = page.locator("#run-samples > li")
    expect(prompts).to_have_count(1)
    expect(prompts.locator("h3")).to_have_text("<i>Reset?</i>")
    assert prompts.locator("dd").all_inner_texts() == ["Open Settings.", "Open Setings."]
    expect(page.locator("#run-events li").first).to_contain_text("samples")
    path = f"tinker://{run_id(400)}/sampler_weights/final"
    command = f"tuneserve checkpoints export {path} ./final --url {many_runs}"
    page.get_by_role("button", name=f"Copy: {command}").click()
    assert page.evaluate("navigator.clipboard.readText()") == command
    page.get_by_role("link", name="Open final in the playground").click()
    expect(choice(page, "Model")).to_have_value(path)
    assert page.locator("#play-model option:checked").inner_text() == "tickets 400 / final"


# --- comparison -----------------------------------------------------------------------------------


def test_ten_selected_runs_are_on_one_chart_in_ten_colours(visit: Visit) -> None:
    page = open_view(visit, "#/runs")
    for number in range(NEWEST, NEWEST - 10, -1):
        page.get_by_label(f"Select tickets {number}").check()
    expect(page.get_by_label(f"Select tickets {NEWEST - 10}")).to_be_disabled()
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("#compare-table tbody tr")).to_have_count(10)
    expect(page.locator('[data-column="loss"]:visible')).to_have_attribute(
        "data-points", str(10 * STEPS)
    )
    colours = page.locator("#compare-table .swatch").evaluate_all(
        "lines => lines.map(line => getComputedStyle(line).stroke)"
    )
    assert len(set(colours)) == 10
    choice(page, "Metric").select_option("held_out_loss")
    expect(page.locator('[data-column="held_out_loss"]:visible')).to_have_attribute(
        "data-points", str(10 * STEPS // 5)
    )
    page.get_by_role("button", name=f"Remove tickets {NEWEST}").click()
    expect(page.locator("#compare-table tbody tr")).to_have_count(9)
    page.reload()
    expect(page.locator("#compare-table tbody tr")).to_have_count(9)
    assert choice(page, "Metric").input_value() == "held_out_loss"
