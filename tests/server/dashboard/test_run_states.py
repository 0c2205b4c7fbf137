"""The states of runs in the dashboard's looks."""

from typing import Any

import pytest

from tests.server.dashboard.test_views import first, watched
from tests.server.routes.test_usage import trained
from tuneserve_engine.core.records import Update

pytestmark = pytest.mark.anyio

__all__ = ["watched"]  # a fixture


@pytest.mark.parametrize("outcome", ["finished", "stopped", "diverged"])
async def test_a_look_has_the_outcome_of_each_run(watched: Any, outcome: str) -> None:
    model, _ = await trained(watched)
    (run,) = (await first(watched))["runs"]
    assert (run["state"], run["diverged"]) == ("running", False)
    await watched.services.store.update_record(
        Update("model", model, {}, {"user_metadata": {"outcome": outcome}})
    )
    (run,) = (await first(watched))["runs"]
    assert (run["state"], run["diverged"]) == (outcome, False)
