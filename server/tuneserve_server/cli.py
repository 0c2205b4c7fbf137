"""The ``tuneserve`` command. Options override ``TUNESERVE_*`` and ``tuneserve.toml``."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from tuneserve_engine.config import REFUSED
from tuneserve_server import serving, supervisor
from tuneserve_server.readiness import report_progress
from tuneserve_server.settings import ApiSettings

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

Host = Annotated[str | None, typer.Option(help="Address to listen on; loopback only.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on (8410).")]
DataDir = Annotated[
    Path | None, typer.Option(help="Holds the store, checkpoints and the compile cache (./data).")
]
BaseModel = Annotated[
    str | None,
    typer.Option(help="Directory in Hugging Face layout, or hub id (the embedded tiny model)."),
]
BaseModelName = Annotated[str | None, typer.Option(help="Name to serve the base model under.")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
SupervisorPid = Annotated[int | None, typer.Option("--supervisor", hidden=True)]


@app.command()
def up(  # noqa: PLR0913 - one parameter per option
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    base_model: BaseModel = None,
    base_model_name: BaseModelName = None,
    log_level: LogLevel = None,
) -> None:
    """Start the API and a worker, and keep both running."""
    options = _given(
        host=host,
        port=port,
        data_dir=data_dir,
        base_model=base_model,
        base_model_name=base_model_name,
        log_level=log_level,
    )
    settings = _settings(options)
    environment = _environment(options)
    children = [
        supervisor.ChildSpec("api", supervisor.child_command("api"), environment),
        supervisor.ChildSpec("worker", supervisor.child_command("worker"), environment),
    ]
    keeper = supervisor.Supervisor(children, _say, supervisor.RestartPolicy())

    async def run() -> int:
        return await keeper.run(lambda: asyncio.create_task(report_progress(settings, _say)))

    raise typer.Exit(asyncio.run(run()))


@app.command()
def api(  # noqa: PLR0913 - one parameter per option
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    base_model: BaseModel = None,
    base_model_name: BaseModelName = None,
    log_level: LogLevel = None,
    supervisor_pid: SupervisorPid = None,
) -> None:
    """Start the API process alone."""
    if supervisor_pid is not None:
        supervisor.end_with(supervisor_pid)
    options = _given(
        host=host,
        port=port,
        data_dir=data_dir,
        base_model=base_model,
        base_model_name=base_model_name,
        log_level=log_level,
    )
    raise typer.Exit(serving.run(_settings(options)))


@app.command()
def worker(
    data_dir: DataDir = None,
    base_model: BaseModel = None,
    base_model_name: BaseModelName = None,
    log_level: LogLevel = None,
    supervisor_pid: SupervisorPid = None,
) -> None:
    """Start a worker alone, on the data directory of an API process."""
    if supervisor_pid is not None:
        supervisor.end_with(supervisor_pid)
    options = _given(
        data_dir=data_dir,
        base_model=base_model,
        base_model_name=base_model_name,
        log_level=log_level,
    )
    command = [sys.executable, "-m", "tuneserve_engine"]
    os.execve(sys.executable, command, _environment(options))


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _environment(options: dict[str, Any]) -> dict[str, str]:
    """Our environment with the options in it: what child processes read their settings from."""
    own = {f"TUNESERVE_{name.upper()}": str(value) for name, value in options.items()}
    return {**os.environ, **own}


def _settings(options: dict[str, Any]) -> ApiSettings:
    try:
        return ApiSettings(**options)
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(map(str, problem["loc"]))
            _say(f"{name}: {problem['msg']}" if name else problem["msg"])
        raise typer.Exit(REFUSED) from None


def _say(text: str) -> None:
    print(f"tuneserve: {text}", file=sys.stderr, flush=True)


def main() -> None:
    """The console script."""
    app()
