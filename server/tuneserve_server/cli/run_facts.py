"""Everything that ``tuneserve runs show`` says about a run."""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuneserve_server.cli.output import duration, minute, sparkline
from tuneserve_server.cli.resolve import run_name
from tuneserve_server.cli.run_curve import StepRow, step_rows

if TYPE_CHECKING:
    import tuneserve_client as sdk
    from tuneserve_client.wire import run_types, types

_WIDTH = 48
_SHOWN_SAMPLES = 2
_MEANT = {"name", "notes", "tags", "archived", "outcome", "config"}


@dataclass(frozen=True)
class RunFacts:
    """A run, its curve by steps, its events, its cost and its checkpoints."""

    run: "run_types.TrainingRunResponse"
    rows: list[StepRow]
    events: list["run_types.RunEvent"]
    usage: "types.ModelUsage | None"
    checkpoints: list[str]

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that the training loop left, or an empty one."""
        with suppress(ValueError, RecursionError):
            found = json.loads((self.run.user_metadata or {}).get("config", ""))
            return found if isinstance(found, dict) else {}
        return {}

    def newest(self, kind: str) -> dict[str, Any] | None:
        """Return the data of the newest event of this kind."""
        return next((each.data for each in reversed(self.events) if each.kind == kind), None)

    def as_json(self) -> dict[str, Any]:
        rates = [each.learning_rate for each in self.rows if each.learning_rate is not None]
        return {
            "run": self.run.model_dump(mode="json"),
            "config": self.config,
            "last_loss": self.run.loss,
            "held_out_loss": self.run.held_out_loss,
            "best_held_out_loss": self.run.best_held_out_loss,
            "best_step": self.run.best_step,
            "steps": self.run.step or 0,
            "learning_rate": rates[-1] if rates else None,
            "usage": None if self.usage is None else self.usage.model_dump(mode="json"),
            "checkpoints": self.checkpoints,
            "events": [each.model_dump(mode="json") for each in self.events],
        }


def facts_of(client: "sdk.Client", run_id: str) -> RunFacts:
    """Read all about a run."""
    by_model = {each.name: each for each in client.usage().by_model}
    return RunFacts(
        client.run(run_id),
        step_rows(client.curve(run_id)),
        client.run_events(run_id),
        by_model.get(run_id),
        [each.tinker_path for each in client.checkpoints(run_id)],
    )


def texts_of(facts: RunFacts) -> dict[str, str | list[str]]:
    """Return the facts as texts, or as a list of lines, by their names."""
    run, metadata = facts.run, facts.run.user_metadata or {}
    texts: dict[str, str | list[str]] = {
        "id": run.training_run_id,
        "name": run_name(run) or "-",
        "state": run.state + (f" ({run.status})" if run.state == "failed" else ""),
        "base model": f"{run.base_model}, {run.adapter} of rank {run.lora_rank}",
        "created": f"{minute(run.created)} UTC",
        "last request": f"{minute(run.last_request_time)} UTC",
        "duration": duration(run.duration_s),
        "step": f"{run.step or 0}" + (f" of {run.steps}" if run.steps else ""),
    }
    for name in ("tags", "notes"):
        if name in metadata:
            texts[name] = metadata[name]
    texts |= _curves(facts)
    if verdict := facts.newest("verdict"):
        texts["verdict"] = str(verdict.get("verdict", ""))
    config = facts.config or {k: v for k, v in metadata.items() if k not in _MEANT}
    texts["config"] = [f"{key} = {value}" for key, value in sorted(config.items())]
    if run.diverged:
        texts["restored"] = "with results that differ from those delivered before"
    if facts.usage is not None:
        texts["cost"] = (
            f"{facts.usage.device_ms / 1000:.2f} device seconds, {facts.usage.trained_tokens} "
            f"tokens trained and evaluated, {facts.usage.padded_tokens} padded, "
            f"{facts.usage.flops:.3g} FLOPs, without samples"
        )
    texts["checkpoints"] = facts.checkpoints
    texts["samples"] = _samples(facts.newest("samples"))
    return texts


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _curves(facts: RunFacts) -> dict[str, str]:
    run, texts = facts.run, {}
    losses = [each.loss for each in facts.rows if each.loss is not None]
    held_out = [each.held_out_loss for each in facts.rows if each.held_out_loss is not None]
    rates = [each.learning_rate for each in facts.rows if each.learning_rate is not None]
    if rates:
        texts["learning rate"] = f"{rates[-1]:.3g}"
    if losses:
        texts["last loss"] = f"{losses[-1]:.4f}  {sparkline(losses, _WIDTH)}"
    if held_out:
        texts["held-out loss"] = f"{held_out[-1]:.4f}  {sparkline(held_out, _WIDTH)}"
        texts["best"] = f"{figure(run.best_held_out_loss)} at step {run.best_step}"
    return texts


def _samples(data: dict[str, Any] | None) -> list[str]:
    found = (data or {}).get("samples")
    pairs = found[:_SHOWN_SAMPLES] if isinstance(found, list) else []
    return [
        f"{each.get('prompt')!r} -> {each.get('completion')!r}"
        for each in pairs
        if isinstance(each, dict)
    ]
