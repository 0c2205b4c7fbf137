"""Names, tags and configurations of runs."""

from typing import Any

import pytest

from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.records import ModelRecord, SessionRecord
from tuneserve_server.runs import names

pytestmark = pytest.mark.anyio


def model(**metadata: str) -> ModelRecord:
    config = AdapterConfig(rank=4, alpha=32, seed=0)
    return ModelRecord("s:train:0", "alice", "s", "tiny", config, 0.0, 0.0, user_metadata=metadata)


class OneSession:
    def __init__(self) -> None:
        self.asked = 0

    async def get_record(self, _: Any, key: str) -> SessionRecord | None:
        self.asked += 1
        return SessionRecord(key, "alice", 0.0, 0.0, display_name="notebook")


async def test_a_run_has_its_own_name_else_its_sessions_which_is_read_once() -> None:
    store: Any = OneSession()
    known = names.RunNames(store)
    assert await known.name_of(model(name="mine")) == "mine"
    assert store.asked == 0
    for _ in range(2):
        assert await known.name_of(model()) == "notebook"
    assert store.asked == 1


def test_tags_are_parted_by_commas() -> None:
    assert names.tags_of(model(tags=" a,b c ,, d")) == ["a", "b c", "d"]
    assert names.tags_of(model()) == []


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ('{"steps": 12}', 12),
        *[(each, None) for each in ("", "{", "[1]", '{"steps": "12"}', '{"steps": true}')],
        *[(each, None) for each in ('{"steps": -1}', '{"steps": 1.5}', "[" * 100_000)],
    ],
)
def test_the_number_of_steps_comes_from_a_readable_configuration(
    config: str, steps: int | None
) -> None:
    assert names.steps_asked(model(config=config)) == steps


def test_only_known_outcomes_are_allowed() -> None:
    for outcome in (None, "finished", "stopped", "diverged", "failed"):
        names.check_outcome(outcome)
    with pytest.raises(UserError, match="'won'; it must be finished, stopped, diverged or failed"):
        names.check_outcome("won")
