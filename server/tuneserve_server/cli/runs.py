"""``tuneserve runs``: the models of a tenant, their losses and their cost."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuneserve_server.cli import resolve
from tuneserve_server.cli.options import HERE, ApiKey, AsJson, ListFirst, Url, connected
from tuneserve_server.cli.output import (
    application,
    minute,
    print_facts,
    print_json,
    print_table,
    sparkline,
)
from tuneserve_server.cli.resolve import run_name

if TYPE_CHECKING:
    from tuneserve_client.wire import types

app = application(cls=ListFirst, help="List and show training runs.")

_HEAD = ["id", "name", "base model", "adapter", "rank", "status", "created", "last request"]
_WIDTH = 48


@app.command("list")
def list_runs(url: Url = HERE, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List your training runs, newest first."""
    with connected(url, api_key) as client:
        runs = client.runs()
    if as_json:
        print_json([each.model_dump(mode="json") for each in runs])
        return
    print_table(
        _HEAD,
        [
            [
                each.training_run_id,
                run_name(each) or "-",
                each.base_model,
                each.adapter,
                str(each.lora_rank),
                _status(each),
                minute(each.created),
                minute(each.last_request_time),
            ]
            for each in runs
        ],
    )


@app.command("show")
def show_run(
    run_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id, the start of it, name, or last.")
    ],
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show one run: its losses, its steps and its cost."""
    with connected(url, api_key) as client:
        run_id = resolve.run_id(client, run_id)
        run = client.run(run_id)
        curve = client.curve(run_id)
        by_model = {each.name: each for each in client.usage().by_model}
        checkpoints = client.checkpoints(run_id)
    losses = [_loss(each) for each in curve if each.kind == "forward_backward"]
    steps = [each for each in curve if each.kind == "optim_step"]
    last_step = steps[-1] if steps else None
    used = by_model.get(run_id)
    facts: dict[str, Any] = {
        "run": run.model_dump(mode="json"),
        "last_loss": losses[-1] if losses else None,
        "steps": 0 if last_step is None else last_step.step,
        "learning_rate": None if last_step is None else last_step.learning_rate,
        "usage": None if used is None else used.model_dump(mode="json"),
        "checkpoints": [each.tinker_path for each in checkpoints],
    }
    if as_json:
        print_json(facts)
        return
    print_facts(_texts(run, facts, losses, used))


def _texts(
    run: "types.TrainingRunResponse",
    facts: dict[str, Any],
    losses: list[float],
    used: "types.ModelUsage | None",
) -> dict[str, str]:
    texts = {
        "id": run.training_run_id,
        "name": run_name(run) or "-",
        "base model": f"{run.base_model}, {run.adapter} of rank {run.lora_rank}",
        "status": _status(run),
        "created": f"{minute(run.created)} UTC",
        "last request": f"{minute(run.last_request_time)} UTC",
        "steps": f"{facts['steps']}",
    }
    if facts["learning_rate"] is not None:
        texts["learning rate"] = f"{facts['learning_rate']:.3g}"
    if losses:
        texts["last loss"] = f"{losses[-1]:.4f}  {sparkline(losses, _WIDTH)}"
    if used is not None:
        texts["cost"] = (
            f"{used.device_ms / 1000:.2f} device seconds, {used.trained_tokens} tokens trained, "
            f"{used.padded_tokens} padded, {used.flops:.3g} FLOPs"
        )
    for number, path in enumerate(facts["checkpoints"]):
        texts["checkpoints" if not number else " " * number] = path
    return texts


def _status(run: "types.TrainingRunResponse") -> str:
    return "diverged" if run.diverged else run.status


def _loss(point: "types.CurvePointResponse") -> float:
    """Return the mean loss, as on the dashboard: over the tokens' weights, else over tokens."""
    return (point.loss_sum or 0.0) / (point.weight or point.tokens or 1.0)
