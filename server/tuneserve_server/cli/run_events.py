"""The events and the outcome of a run, recorded on the server."""

from typing import Any

import typer

from tuneserve_client import Client, TuneserveError
from tuneserve_client.wire.run_types import EventKind


def record_event(
    client: Client, run_id: str, kind: EventKind, step: int, data: dict[str, Any]
) -> None:
    """Record an event of the run. A failure is a warning: training matters more."""
    try:
        client.add_run_event(run_id, kind, step, data)
    except TuneserveError as error:
        _warn(kind, error)


def record_outcome(client: Client, run_id: str, outcome: str) -> None:
    """Record the end of the run. A failure is a warning."""
    try:
        client.update_run(run_id, {"outcome": outcome})
    except TuneserveError as error:
        _warn("outcome", error)


def _warn(name: str, error: TuneserveError) -> None:
    typer.echo(f"cannot record the {name} of the run: {error}", err=True)
