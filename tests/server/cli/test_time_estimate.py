"""The estimated time of a run is its tokens at the speed of the newest run on the base model."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tuneserve_client import Client
from tuneserve_client.wire.run_types import TrainingRunResponse, TrainingRunsResponse
from tuneserve_client.wire.types import Cursor
from tuneserve_server.cli.time_estimate import TimeEstimate


def run(name: str | None = "a", **fields: Any) -> TrainingRunResponse:
    known = {
        "training_run_id": f"id-{name}",
        "name": name,
        "base_model": "base",
        "model_owner": "t",
        "last_request_time": "2026-01-01T00:00:00Z",
        "state": "finished",
        "tokens": 1000,
        "duration_s": 10.0,
        "step": 10,
    }
    return TrainingRunResponse.model_validate(known | fields)


def estimate(*runs: TrainingRunResponse) -> TimeEstimate | None:
    """The estimate for 1,200 tokens."""
    page = TrainingRunsResponse(
        training_runs=list(runs), cursor=Cursor(limit=50, offset=0, total_count=len(runs))
    )
    client = SimpleNamespace(search_runs=lambda *, limit: page)
    return TimeEstimate.of(cast(Client, client), "base", 1200)


def test_the_time_is_all_tokens_at_the_speed_of_the_newest_run() -> None:
    found = estimate(run(), run("older", duration_s=1.0))
    assert found == TimeEstimate(seconds=12.0, tokens_per_s=100.0, run="a")
    assert found.text == "less than a minute, at the 100 tokens/s of run 'a'"


def test_a_run_without_a_name_is_named_by_its_id() -> None:
    found = estimate(run(name=None))
    assert found and found.run == "id-None"


@pytest.mark.parametrize(
    "fields",
    [
        {"base_model": "other"},
        {"state": "running"},
        {"tokens": 0},
        {"tokens": None},
        {"step": 9},
        {"step": None},
        {"duration_s": None},
    ],
    ids=str,
)
def test_runs_without_a_speed_on_this_base_model_do_not_count(fields: dict[str, Any]) -> None:
    assert estimate(run(**fields)) is None
    counted = estimate(run(**fields), run("b", tokens=2000))
    assert counted and (counted.tokens_per_s, counted.run) == (200.0, "b")
