"""The texts of ``tuneserve runs show``."""

from datetime import UTC, datetime
from typing import Any

from tuneserve_client.wire import run_types
from tuneserve_server.cli.run_facts import RunFacts, texts_of

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def facts(events: list[run_types.RunEvent] | None = None, **fields: Any) -> RunFacts:
    run = run_types.TrainingRunResponse(
        training_run_id="s:train:0",
        base_model="tiny",
        model_owner="alice",
        last_request_time=NOON,
        lora_rank=4,
        **fields,
    )
    return RunFacts(run, [], events or [], None, [])


def event(step: int, data: dict[str, Any], kind: str = "samples") -> run_types.RunEvent:
    return run_types.RunEvent(event_id=f"e{step}", kind=kind, step=step, time=NOON, data=data)


def test_a_run_without_a_loop_of_ours_shows_its_own_metadata() -> None:
    texts = texts_of(facts(user_metadata={"lr": "0.1", "notes": "too high", "name": "mine"}))
    assert (texts["name"], texts["notes"]) == ("mine", "too high")
    assert texts["config"] == ["lr = 0.1"]
    assert texts["step"] == "0"


def test_a_configuration_or_samples_of_another_form_end_no_command() -> None:
    for config in ("{", "[1, 2]", "[" * 100_000, '"text"'):
        assert facts(user_metadata={"config": config}).config == {}
    for data in ({}, {"samples": 3}, {"samples": ["a"]}):
        assert texts_of(facts([event(1, data)]))["samples"] == []


def test_the_newest_samples_and_verdict_are_shown() -> None:
    def samples(text: str) -> dict[str, Any]:
        return {"samples": [{"prompt": "p", "completion": text}]}

    events = [
        event(1, samples("old")),
        event(2, samples("new")),
        event(3, {"verdict": "improved"}, "verdict"),
    ]
    texts = texts_of(facts(events))
    assert texts["samples"] == ["'p' -> 'new'"]
    assert texts["verdict"] == "improved"


def test_a_run_restored_with_other_results_says_so() -> None:
    assert "restored" not in texts_of(facts())
    assert "differ" in texts_of(facts(diverged=True))["restored"]
