"""The playground: a checkpoint and its base model answer, by keyboard and over several turns."""

import re
from typing import Any

from playwright.sync_api import Page, expect

from tests.page.conftest import Service
from tuneserve_client import Client


def test_a_checkpoint_can_be_sampled_by_keyboard_alone(service: Service, visits: Any) -> None:
    page: Page = visits(service.url, service.looking).page
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    expect(page.get_by_role("link", name="Skip to the content")).to_be_in_viewport()
    for _ in range(3):
        page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Playground")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Playground")).to_be_focused()
    expect(page.locator("#play-model option")).to_have_count(2, timeout=30_000)
    page.keyboard.press("Tab")
    model = page.get_by_role("combobox", name="Model")
    expect(model).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("End")
    expect(model).to_have_value(service.alice.saved)
    assert page.locator("#play-model option:checked").inner_text() == "pirate / first"
    page.keyboard.press("Tab")
    page.keyboard.press("End")
    expect(page.get_by_role("combobox", name="Mode", exact=True)).to_have_value("completion")
    for _ in range(2):
        page.keyboard.press("Tab")
    expect(page.get_by_label("Temperature")).to_be_focused()
    page.keyboard.press("Control+A")
    page.keyboard.type("0")  # the likeliest answer, which is the same in each run
    for _ in range(3):  # past top-p and the base model
        page.keyboard.press("Tab")
    expect(page.get_by_role("textbox", name="Prompt", exact=True)).to_be_focused()
    asked = "What colour is grass?"
    page.keyboard.type(asked)
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Send")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".reply-state")).to_have_text(
        re.compile(r"^[1-9]\d* tokens in [\d.]+ s, ended by (stop|length)$"), timeout=60_000
    )
    with Client(service.url, service.alice_key) as client:
        drawn = client.sampler(service.alice.saved).stream(asked, max_tokens=128, temperature=0)
        said = "".join(drawn).strip()
    assert page.locator(".drawn").inner_text().strip() == said != ""


def test_a_chat_goes_on_beside_the_base_model(service: Service, visits: Any) -> None:
    visit = visits(service.url, service.looking)
    page: Page = visit.page
    page.get_by_role("link", name="Playground").click()
    expect(page.locator("#play-model option")).to_have_count(2, timeout=30_000)
    page.locator("#play-model").select_option(service.alice.saved)
    page.get_by_label("Show the base model's answer next to it").check()
    page.get_by_role("textbox", name="System prompt").fill("Answer briefly.")
    page.get_by_label("Max tokens").fill("8")
    bodies: list[Any] = []
    page.on(
        "request",
        lambda each: bodies.append(each.post_data_json) if "/v1/chat/" in each.url else None,
    )
    for turn, asked in enumerate(("What colour is grass?", "And the sky?"), 1):
        page.get_by_role("textbox", name="Prompt", exact=True).fill(asked)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".reply-state")).to_have_text(
            [re.compile("tokens in .* ended by")] * 2 * turn, timeout=60_000
        )
    headings = page.locator(".reply h3").all_inner_texts()
    assert headings == ["pirate / first", "tuneserve/tiny"] * 2
    answers = page.locator(".drawn").all_text_contents()
    for body in bodies[2:]:
        is_base = body["model"] == "tuneserve/tiny"
        assert [each["content"] for each in body["messages"]] == [
            *("Answer briefly.", "What colour is grass?"),
            *(answers[is_base], "And the sky?"),
        ]
    assert {body["model"] for body in bodies} == {service.alice.saved, "tuneserve/tiny"}
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#play-log")).to_be_hidden()
