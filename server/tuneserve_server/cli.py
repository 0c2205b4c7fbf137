"""The ``tuneserve`` command. Every setting is an option: ``data_dir`` is ``--data-dir``."""

import asyncio
import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tuneserve_engine.config import REFUSED, CommonSettings, WorkerSettings
from tuneserve_server import serving, supervisor
from tuneserve_server.readiness import report_progress
from tuneserve_server.settings import ApiSettings

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

S = TypeVar("S", bound=CommonSettings)
Given = dict[str, str]  # the options on the command line, by setting
_SUPERVISOR = "supervisor"


def _command(*settings: type[CommonSettings]) -> Callable[[Callable[[Given], None]], None]:
    """Registers a command with one option for each of the settings."""
    fields = {name: field for each in settings for name, field in each.model_fields.items()}

    def register(run: Callable[[Given], None]) -> None:
        def command(**values: Any) -> None:
            pid = values.pop(_SUPERVISOR)
            if pid is not None:
                supervisor.end_with(pid)
            run({name: value for name, value in values.items() if value is not None})

        types = {name: _option(field) for name, field in fields.items()}
        types[_SUPERVISOR] = Annotated[int | None, typer.Option(hidden=True)]
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in types.items()
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = types
        app.command(run.__name__, help=run.__doc__)(command)

    return register


def _option(field: FieldInfo) -> Any:
    default = "" if field.default is None else f" Default: {field.default}."
    return Annotated[str | None, typer.Option(help=f"{field.description}{default}", metavar="")]


@_command(ApiSettings, WorkerSettings)
def up(given: Given) -> None:
    """Start the API and a worker, and keep both running."""
    settings = _settings(ApiSettings, given)
    _settings(WorkerSettings, given)  # what the worker would refuse is said at once
    environment = _environment(given)
    children = [
        supervisor.ChildSpec(name, supervisor.child_command(name), environment)
        for name in ("api", "worker")
    ]
    keeper = supervisor.Supervisor(children, say, supervisor.RestartPolicy())

    async def run() -> int:
        return await keeper.run(lambda: asyncio.create_task(report_progress(settings, say)))

    raise typer.Exit(asyncio.run(run()))


@_command(ApiSettings)
def api(given: Given) -> None:
    """Start the API process alone."""
    raise typer.Exit(serving.run(_settings(ApiSettings, given)))


@_command(WorkerSettings)
def worker(given: Given) -> None:
    """Start a worker alone, on the data directory of an API process."""
    _settings(WorkerSettings, given)
    os.execve(sys.executable, [sys.executable, "-m", "tuneserve_engine"], _environment(given))


def _environment(given: Given) -> dict[str, str]:
    """Our environment with the options in it: what child processes read their settings from."""
    return {**os.environ, **{f"TUNESERVE_{name.upper()}": text for name, text in given.items()}}


def _settings(settings_type: type[S], given: Given) -> S:
    """The settings with the options on top; ends the process, saying why, if they are refused."""
    own: dict[str, Any] = {
        name: text for name, text in given.items() if name in settings_type.model_fields
    }
    try:
        return settings_type(**own)
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(map(str, problem["loc"]))
            say(f"{name}: {problem['msg']}" if name else problem["msg"])
        raise typer.Exit(REFUSED) from None


def say(text: str) -> None:
    """Tells whoever started us, beside the logs of the children."""
    print(f"tuneserve: {text}", file=sys.stderr, flush=True)


def main() -> None:
    """The console script."""
    app()
