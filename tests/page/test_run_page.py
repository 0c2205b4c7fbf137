"""The page of a run shows that run alone, as it is now; the overview shows how runs ended."""

from typing import Any

import httpx
from playwright.sync_api import expect

from tests.page.many_runs import FOREIGN, KEY, RESTORED, run_id
from tests.page.stage import Visit
from tests.page.test_runs import open_run, open_view, visit

__all__ = ["visit"]  # a fixture


def leave(url: str, number: int, kind: str, step: int, data: dict[str, Any]) -> None:
    """Leave an event as a training loop would."""
    httpx.post(
        f"{url}/api/v1/training_runs/{run_id(number)}/events",
        json={"kind": kind, "step": step, "data": data},
        headers={"X-API-Key": KEY},
    ).raise_for_status()


def test_a_run_that_is_opened_after_another_has_only_its_own_events(
    visit: Visit, many_runs: str
) -> None:
    leave(many_runs, 10, "verdict", 40, {"verdict": "improved by 10 %"})
    leave(many_runs, 11, "verdict", 40, {"verdict": "improved by 11 %"})
    for number in (10, 11):
        page = open_run(visit, number)
        expect(page.locator("#run-events li > span:last-child")).to_have_text(
            [f"verdict: improved by {number} %", f"created: 000000…/{number}"]
        )


def test_a_run_that_does_not_exist_shows_nothing_of_the_one_before(visit: Visit) -> None:
    page = open_run(visit, 10)
    expect(page.locator("#answers li")).to_have_count(3)
    open_view(visit, "#/runs/nothing")
    expect(page.locator("#run-problem")).not_to_be_empty()
    expect(page.locator("#answers li")).to_have_count(0)
    expect(page.locator("#run-state")).to_be_empty()
    expect(page.locator("#run-of")).to_be_empty()
    visit.said.clear()  # the browser reports the 404


def test_a_checkpoint_shows_a_new_end_of_its_life(visit: Visit, many_runs: str) -> None:
    page = open_run(visit, 300)
    checkpoint = page.locator("#run-checkpoints li")
    expect(checkpoint).to_have_count(1)
    expect(checkpoint).not_to_contain_text("expires")
    httpx.put(
        f"{many_runs}/api/v1/training_runs/{run_id(300)}/checkpoints/sampler_weights/final/ttl",
        json={"ttl_seconds": 86_400},
        headers={"X-API-Key": KEY},
    ).raise_for_status()
    expect(checkpoint).to_contain_text("expires", timeout=30_000)
    expect(checkpoint).to_have_count(1)


def test_equal_samples_of_a_step_are_listed_once_each_time(visit: Visit, many_runs: str) -> None:
    sample = {"prompt": "Why?", "completion": "Because."}
    leave(many_runs, 110, "samples", 5, {"samples": [sample, sample]})
    page = open_run(visit, 110)
    expect(page.locator("#run-samples dd")).to_have_count(2)
    leave(many_runs, 110, "note", 6, {"text": "read again"})
    expect(page.locator("#run-events li").first).to_contain_text("read again", timeout=30_000)
    expect(page.locator("#run-samples dd")).to_have_count(2)


def test_the_overview_shows_outcomes_and_restored_runs_apart(visit: Visit) -> None:
    rows = visit.page.locator("#run-table tbody tr")
    states = {484: "failed", 487: "stopped", 488: "diverged", 491: "finished"}
    for number, state in states.items():  # STATES[number % 5]
        badge = rows.filter(has_text=f"tickets {number}").locator(".badge .value")
        expect(badge).to_contain_text(state)
        expect(badge).not_to_contain_text("restored")
    restored = rows.filter(has_text=f"tickets {RESTORED}").locator(".badge .value")
    expect(restored).to_contain_text("finished")
    expect(restored).to_contain_text("restored with other results")


def test_the_playground_answers_for_no_checkpoint_but_the_one_of_the_address(
    visit: Visit,
) -> None:
    path = f"tinker://{run_id(FOREIGN)}/sampler_weights/final"  # no checkpoint of this tenant
    page = open_view(visit, f"#/playground?model={path}")
    problem, send = page.locator("#play-problem"), page.get_by_role("button", name="Send")
    expect(problem).to_contain_text(f"{path} is not one of your checkpoints")
    model = page.get_by_role("combobox", name="Model")
    expect(model).to_have_value("")
    expect(send).to_be_disabled()
    model.select_option("tuneserve/tiny")
    expect(problem).to_be_empty()
    expect(send).to_be_enabled()
    page.go_back()
    expect(send).to_be_disabled()
    open_view(visit, "#/playground?model=absent/model")
    expect(problem).to_contain_text("No worker serves absent/model")
    own = f"tinker://{run_id(300)}/sampler_weights/final"
    open_view(visit, f"#/playground?model={own}")
    expect(model).to_have_value(own)
    expect(send).to_be_enabled()
    expect(problem).to_be_empty()
