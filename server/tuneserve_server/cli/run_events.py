"""The record of a run on the server: its configuration, its events and its outcome."""

from typing import Any

import typer

from tuneserve_client import Client, TuneserveError


def record_event(client: Client, run_id: str, kind: str, step: int, data: dict[str, Any]) -> None:
    """Record an event of the run. A failure is a warning: training matters more."""
    if not hasattr(client, "add_run_event"):
        return  # SHIM
    try:
        client.add_run_event(run_id, kind, step, data)
    except TuneserveError as error:
        _warn(kind, error)


def record_outcome(client: Client, run_id: str, outcome: str) -> None:
    """Record the end of the run. A failure is a warning."""
    if not hasattr(client, "update_run"):
        return  # SHIM
    try:
        client.update_run(run_id, outcome=outcome)
    except TuneserveError as error:
        _warn("outcome", error)


def _warn(name: str, error: TuneserveError) -> None:
    typer.echo(f"cannot record the {name} of the run: {error}", err=True)
