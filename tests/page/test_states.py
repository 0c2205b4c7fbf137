"""The words for the state of a run, on the overview and on its page."""

from typing import Any

import pytest

from tests.page.test_modules import Call, call, page

__all__ = ["call", "page"]  # fixtures

NOW_S = 1000.0


def told(status: str, state: str, quiet_s: float) -> dict[str, Any]:
    """A run of a look whose last request is ``quiet_s`` old."""
    last_s = NOW_S - quiet_s
    return {"model_id": "s", "status": status, "state": state, "last_request_s": last_s}


@pytest.mark.parametrize(
    ("run", "unfinished", "expected"),
    [
        (told("ended", "finished", 45), 0, ["finished 45 s ago", "quiet"]),
        (told("ended", "stopped", 45), 0, ["stopped 45 s ago", "warn"]),
        (told("ended", "diverged", 45), 0, ["diverged 45 s ago", "bad"]),
        (told("ready", "diverged", 300), 0, ["diverged 5 min ago", "bad"]),
        (told("failed", "failed", 45), 0, ["failed", "bad"]),
        (told("lost", "failed", 45), 0, ["lost", "bad"]),
        (told("creating", "running", 1), 1, ["starting", "quiet"]),
        (told("ready", "running", 1), 1, ["training", "good"]),
        (told("ready", "running", 60), 1, ["waiting", "warn"]),
        (told("ready", "running", 60), 0, ["idle, 1 min ago", "quiet"]),
    ],
)
def test_the_overview_tells_how_each_run_ended(
    call: Call, run: dict[str, Any], unfinished: int, expected: list[str]
) -> None:
    assert call("live.js", "stateOf", run, NOW_S, unfinished) == expected


@pytest.mark.parametrize(
    ("state", "expected"), [(["training", "good"], "warn"), (["failed", "bad"], "bad")]
)
def test_a_replay_with_other_results_is_told_beside_the_state(
    call: Call, state: list[str], expected: str
) -> None:
    assert call("live.js", "badgeOf", {"diverged": False}, state) == state
    text = f"{state[0]}, restored with other results"
    assert call("live.js", "badgeOf", {"diverged": True}, state) == [text, expected]
