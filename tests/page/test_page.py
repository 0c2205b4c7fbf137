"""The dashboard in Debian's Chromium, on the real processes, with two training tenants."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.page.conftest import HOSTILE, Service
from tests.page.stage import PHONE, kill_api, open_api

# The browser's own message about a request without a server, which scripts cannot prevent.
AWAY = re.compile(
    r"error: Failed to load resource: net::ERR_(CONNECTION_REFUSED|CONNECTION_RESET|"
    r"EMPTY_RESPONSE|INCOMPLETE_CHUNKED_ENCODING)"
)
TEXT = ("--text", "--quiet", "--accent", "--good", "--warn", "--bad")
LINES = tuple(f"--line-{number}" for number in range(1, 11))
SURFACES = ("--page", "--panel", "--sunk")


def texts(page: Page, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


# --- contents -------------------------------------------------------------------------------------


def test_curves_of_two_tenants_move_and_continue_after_the_api_process_was_killed(
    service: Service, visits: Any
) -> None:
    visit = visits(service.url, service.looking)
    page: Page = visit.page
    visit.wait_for_points(8)
    drawn = page.locator("#loss canvas")
    before = drawn.screenshot()
    assert set(texts(page, "#run-table td.tenant .value")) == {"alice", "bob"}
    visit.wait_for_points(visit.points() + 4)
    assert drawn.screenshot() != before
    expect(page.locator("#state")).to_have_text("live")

    marked = page.evaluate("document.body.dataset.mark = 'same page'")
    seen = visit.points()
    kill_api(service.server)
    expect(page.locator("#state")).to_have_text("reconnecting")
    assert visit.points() >= seen  # drawn points stay
    expect(page.locator("#state")).to_have_text("live", timeout=20_000)
    visit.wait_for_points(seen + 6)
    assert page.evaluate("document.body.dataset.mark") == marked
    while visit.said and AWAY.fullmatch(visit.said[0]):
        visit.said.pop(0)


def test_an_admin_key_shows_the_device_the_store_and_every_tenant(
    service: Service, visits: Any
) -> None:
    visit = visits(service.url, service.looking)
    visit.wait_for_points(2)
    page: Page = visit.page
    for name in ("Recent runs", "Tenants", "Device", "Store", "Recent errors"):
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
    assert set(texts(page, ".tenant-name")) == {"alice", "bob"}
    expect(page.locator(".busy")).to_have_text(re.compile(r"^\d+(\.\d)? % busy$"), timeout=15_000)
    expect(page.locator(".trained")).to_have_text(
        re.compile(r"^[1-9][\d.]* (k )?tok/s$|^[\d.]+ ktok"), timeout=15_000
    )
    expect(page.locator(".padding")).to_have_text(re.compile(r"^[1-9]?\d(\.\d)? %$"))
    expect(page.locator(".flops")).to_have_text(
        re.compile(r"^[1-9][\d.]* [kMGT]FLOP/s$"), timeout=15_000
    )
    expect(page.locator(".flops-note")).to_have_text("set device_peak_flops for a share")
    expect(page.locator(".tenant-share").first).to_have_text(re.compile(r"%$"), timeout=15_000)
    for note in texts(page, ".tenant-note"):
        assert re.search(r" · (queue empty|[\d,]+ in the queue)$", note), note
    sizes = texts(page, ".size")
    assert len(sizes) == 5 and all(re.fullmatch(r"[\d.]+ [KMG]iB", size) for size in sizes)
    facts = dict(zip(texts(page, "#store dt"), texts(page, "#store .value"), strict=True))
    assert (facts["Kind"], facts["Durability"], facts["Disk"]) == ("SQLite", "always", "ok")
    assert int(facts["Log"].replace(",", "")) > 0


def one_look(service: Service) -> Any:
    """The first state that the dashboard receives."""
    asking = httpx.stream(
        "GET", f"{service.url}/api/v1/live", headers={"X-API-Key": service.looking}
    )
    with asking as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                return json.loads(line.removeprefix("data: "))


def test_padding_recompiles_flops_and_queues_follow_the_metrics(
    service: Service, visits: Any
) -> None:
    look = one_look(service)
    (worker,) = look["workers"]
    worker["figures"] |= {"compilations_after_ready_total": 3, "device_peak_flops": 4e9}
    worker["rates"] |= {
        **{"device_seconds_total": 0.5, "model_flops_total": 1e9},
        **{"tokens_computed_total": 1000.0, "tokens_trained_total": 750.0},
    }
    for tenant in look["tenants"]:
        is_alice = tenant["name"] == "alice"
        tenant |= {"unfinished": 1234, "device_rate": 0.3} if is_alice else {"unfinished": 0}
    page: Page = visits(service.url, service.looking).page
    told = f"event: look\nid: 1\ndata: {json.dumps(look)}\n\n"
    page.route(
        re.compile("/api/v1/live"),
        lambda route: route.fulfill(body=told, content_type="text/event-stream"),
    )
    page.reload()
    expect(page.locator(".padding")).to_have_text("25 %")
    expect(page.locator(".flops")).to_have_text("25 %")
    expect(page.locator(".flops-note")).to_have_text("utilised: 1.0 GFLOP/s of 4.0 GFLOP/s")
    expect(page.locator(".late")).to_have_text("3")
    expect(page.locator(".late")).to_have_attribute("data-tone", "warn")
    notes = dict(zip(texts(page, ".tenant-name"), texts(page, ".tenant-note"), strict=True))
    assert notes["alice"].endswith(" · 1,234 in the queue")
    assert notes["bob"].endswith(" · queue empty")


def test_a_key_is_required_and_shows_only_its_tenants_objects(
    service: Service, visits: Any
) -> None:
    visit = visits(service.url)
    page: Page = visit.page
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_label("Key, tml-").fill("tml-wrong-0")
    page.keyboard.press("Enter")
    expect(page.locator("#key-problem")).to_contain_text("does not accept this API key")
    refused = "error: Failed to load resource: the server responded with a status of 401"
    assert visit.said.pop().startswith(refused) and not visit.said
    page.get_by_label("Key, tml-").fill(service.alice_key)
    page.keyboard.press("Enter")
    visit.wait_for_points(1)
    expect(page.locator("#who")).to_have_text("alice")
    assert texts(page, "#run-table .name") == ["pirate"]
    assert texts(page, ".tenant-name") == ["alice"]
    for hidden in ("#workers", "#store", "#run-table td.tenant"):
        expect(page.locator(hidden).first).to_be_hidden()
    assert "bob" not in page.content() and HOSTILE[1:8] not in page.inner_text("body")
    assert service.alice_key not in page.content()
    kept = page.evaluate("[Object.keys(localStorage), document.cookie]")
    assert service.alice_key not in str(kept)


def test_without_keys_the_dashboard_opens_by_itself_and_says_how_to_begin(
    visits: Any, tmp_path: Path
) -> None:
    with open_api(tmp_path) as url:
        page: Page = visits(url).page
        expect(page.locator("#state")).to_have_text("live")
        expect(page.locator("#who")).to_have_text("tml-local")
        expect(page.get_by_text("No worker is connected.")).to_be_visible()
        expect(page.locator("#how")).to_contain_text(f"TINKER_BASE_URL={url}")
        page.locator("#who").click()
        page.get_by_label("Name, tml-").fill("tml-me")
        page.get_by_role("button", name="Open").click()
        expect(page.locator("#who")).to_have_text("tml-me")
        expect(page.locator("#play-note")).to_have_text("as tml-me")
        page.context.close()


def test_the_name_of_a_run_is_shown_as_plain_text(service: Service, visits: Any) -> None:
    page: Page = visits(service.url, service.looking).page
    assert HOSTILE in texts(page, "#run-table .name")
    assert page.locator("main img").count() == 0


def test_an_error_is_shown_with_its_text(service: Service, visits: Any) -> None:
    page: Page = visits(service.url, service.looking).page
    answer = httpx.get(
        f"{service.url}/api/v1/usage?since=-1", headers={"X-API-Key": service.alice_key}
    )
    assert answer.status_code == 422
    shown = page.locator("#errors li", has_text="malformed")
    expect(shown).to_contain_text("greater than or equal to 0")
    expect(shown).to_contain_text("alice")


# --- use ------------------------------------------------------------------------------------------


def test_a_run_in_progress_is_followed_on_its_page(service: Service, visits: Any) -> None:
    """The run is of alice, who owns the key; another tenant's run can be read, not changed."""
    visit = visits(service.url, service.looking)
    page: Page = visit.page
    visit.wait_for_points(2)
    page.get_by_role("link", name="Open the page of pirate").click()
    expect(page.locator("#run-title")).to_have_text("pirate")
    expect(page.locator("#run-state")).to_have_text("running")
    loss = page.locator('[data-column="loss"]:visible')
    before = int(loss.get_attribute("data-points") or 0)
    page.wait_for_function(
        "before => [...document.querySelectorAll('[data-column=loss]')]"
        ".some(each => Number(each.dataset.points) > before)",
        arg=before,
    )
    expect(page.locator("#answers")).to_contain_text("no held-out data")
    page.get_by_role("textbox", name="Notes").fill("mine")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#edit-state")).to_contain_text("scope train")
    assert all("status of 40" in each for each in visit.said) and len(visit.said) == 1
    visit.said.clear()
    page.evaluate(
        "id => { location.hash = `#/runs/${encodeURIComponent(id)}` }", service.bob.model_id
    )
    expect(page.locator("#run-title")).to_have_text(HOSTILE)
    expect(page.get_by_text("Only keys of bob can change this run.")).to_be_visible()
    expect(page.locator("#edit")).to_be_hidden()


def test_a_phone_shows_it_without_scrolling_sideways(service: Service, visits: Any) -> None:
    visit = visits(service.url, service.looking, viewport=PHONE, has_touch=True, is_mobile=True)
    visit.wait_for_points(1)
    page: Page = visit.page
    wide = """() => [...document.querySelectorAll("body *")]
        .filter(each => each.getBoundingClientRect().right > innerWidth + 0.5
            && !each.closest(".sr, .u-over, .u-under, .skip"))
        .map(each => each.outerHTML.slice(0, 120))"""
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate(wide) == []


def test_lines_can_be_hidden_and_shown(service: Service, visits: Any) -> None:
    visit = visits(service.url, service.looking)
    visit.wait_for_points(2)
    toggle = visit.page.locator("#run-table").get_by_role("button", name="pirate")
    expect(toggle).to_have_attribute("aria-pressed", "true")
    label = visit.page.locator("#loss")
    toggle.click()
    expect(toggle).to_have_attribute("aria-pressed", "false")
    expect(label).not_to_have_attribute("aria-label", re.compile("pirate"))
    toggle.click()
    expect(label).to_have_attribute("aria-label", re.compile("pirate"))


def test_the_chart_does_not_move_under_the_pointer(service: Service, visits: Any) -> None:
    """The text that names the values once pushed the chart away: by 117 pixels with 24 runs."""
    visit = visits(service.url, service.looking)
    visit.wait_for_points(4)
    page: Page = visit.page
    page.mouse.move(0, 0)
    before = {name: page.locator(name).bounding_box() for name in ("#loss", "#run-table")}
    page.locator("#loss .u-over").hover()
    expect(page.locator("#readout")).to_be_visible()
    page.evaluate(
        "document.getElementById('readout').textContent += ' a run of ours 0.123 '.repeat(60)"
    )
    assert page.locator("#readout").bounding_box()["height"] > 30
    assert {name: page.locator(name).bounding_box() for name in before} == before
    page.mouse.move(0, 0)
    expect(page.locator("#readout")).to_be_hidden()


def test_losses_can_be_seen_on_a_log_scale(service: Service, visits: Any) -> None:
    visit = visits(service.url, service.looking)
    visit.wait_for_points(6)
    drawn, button = visit.page.locator("#loss canvas"), visit.page.get_by_role("button", name="log")
    before = drawn.screenshot()
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    assert drawn.screenshot() != before
    visit.wait_for_points(visit.points() + 2)


# --- appearance -----------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """The luminance of ``rgb(r, g, b)``, as WCAG 2.2 defines it."""
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_computed_as_in_the_standard() -> None:
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgb(118, 118, 118)", "rgb(255, 255, 255)") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_lines_stand_out_in_both_themes(service: Service, visits: Any, theme: str) -> None:
    page: Page = visits(service.url, color_scheme=theme).page
    assert page.locator("html").get_attribute("data-theme") == theme
    computed = """names => names.map(name => {
        const probe = document.body.appendChild(document.createElement("i"));
        probe.style.color = `var(${name})`;
        const found = getComputedStyle(probe).color;
        probe.remove();
        return found;
    })"""
    names = [*TEXT, *LINES, *SURFACES, "--on-accent"]
    colours = dict(zip(names, page.evaluate(computed, names), strict=True))
    assert len(set(colours.values())) > len(names) / 2
    for surface in SURFACES:
        for token in TEXT:
            assert contrast(colours[token], colours[surface]) >= 4.5, (token, surface)
    for line in LINES:
        assert contrast(colours[line], colours["--panel"]) >= 3, line
    assert contrast(colours["--on-accent"], colours["--accent"]) >= 4.5


def test_the_theme_can_be_chosen_and_stays(service: Service, visits: Any) -> None:
    page: Page = visits(service.url, service.looking, color_scheme="light").page
    page.get_by_role("button", name="Switch to the dark theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 24)"
    page.reload()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    expect(page.locator("#state")).to_have_text("live")  # the key is still there


def test_nothing_moves_if_the_reader_prefers_reduced_motion(service: Service, visits: Any) -> None:
    page: Page = visits(service.url, service.looking, reduced_motion="reduce").page
    bar = page.locator(".bar").first
    bar.wait_for(state="attached")
    assert bar.evaluate("each => getComputedStyle(each).transitionDuration") in ("0s", "")
