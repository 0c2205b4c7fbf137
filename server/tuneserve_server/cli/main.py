"""The ``tuneserve`` command. Every setting is an option: ``data_dir`` is ``--data-dir``."""

import asyncio
import difflib
import inspect
import logging
import os
import socket
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tuneserve_engine.core.errors import REFUSED
from tuneserve_engine.core.gpus import DEVICE_KINDS, DRIVERS, GPU_MIB
from tuneserve_engine.settings.common import (
    SETTINGS_FILE,
    TINY_MODEL,
    CommonSettings,
    without_password,
)
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.telemetry import logs
from tuneserve_server.cli import chat, checkpoints, runs, supervisor, top, train
from tuneserve_server.cli import doctor as checks
from tuneserve_server.cli import files as files_cli
from tuneserve_server.cli import keys as admin_cli
from tuneserve_server.cli.killed import tell_killed
from tuneserve_server.cli.output import FAILED, print_json
from tuneserve_server.cli.readiness import report_progress
from tuneserve_server.listening import CannotStart, listen
from tuneserve_server.settings import ApiSettings

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.add_typer(admin_cli.keys, name="keys")
app.add_typer(admin_cli.tenants, name="tenants")
app.add_typer(files_cli.app, name="files")
app.command()(train.train)
app.command()(chat.chat)
app.add_typer(runs.app, name="runs")
app.add_typer(checkpoints.app, name="checkpoints")
app.command()(top.top)

logger = logging.getLogger(__name__)
S = TypeVar("S", bound=CommonSettings)
Given = dict[str, str]  # the options on the command line, by setting
_SUPERVISOR = "supervisor"


def _command(
    *settings: type[CommonSettings], further: dict[str, Any] | None = None, **flags: str
) -> Callable[[Callable[[Given], None]], None]:
    """Return a decorator that registers a command with one option for each of the settings.

    ``flags`` are further options without a value, by name, with their help texts; a flag on the
    command line is in ``Given`` with an empty text. ``further`` are options with a value, by name,
    as typer takes them.
    """
    fields = {name: field for each in settings for name, field in each.model_fields.items()}

    def register(run: Callable[[Given], None]) -> None:
        def command(**values: Any) -> None:
            pid = values.pop(_SUPERVISOR)
            if pid is None:
                _check_names()
            else:
                supervisor.end_with(pid)
            given = {name: _text(value) for name, value in values.items() if value is not None}
            run(given | {name: "" for name in flags if name in given})

        types = {name: _option(name, field) for name, field in fields.items()}
        for name, purpose in flags.items():
            types[name] = Annotated[bool | None, typer.Option(f"--{name}", help=purpose)]
        types |= further or {}
        types[_SUPERVISOR] = Annotated[int | None, typer.Option(hidden=True)]
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in types.items()
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = types
        app.command(run.__name__.rstrip("_"), help=run.__doc__)(command)

    return register


def _option(name: str, field: FieldInfo) -> Any:
    value = None if field.default_factory else field.default  # the description names it
    shown = "the embedded model" if value == str(TINY_MODEL) else value
    default = "" if shown in (None, "") else f" Default: {shown}."
    text = f"{field.description}{default}"
    if field.annotation is bool:
        option = name.replace("_", "-")
        return Annotated[bool | None, typer.Option(f"--{option}/--no-{option}", help=text)]
    is_choice = get_origin(field.annotation) is Literal
    metavar = "|".join(get_args(field.annotation)) if is_choice else "VALUE"
    return Annotated[str | None, typer.Option(help=text, metavar=metavar)]


def _text(value: str | bool) -> str:
    """Return an option's value as the environment would have it."""
    return value if isinstance(value, str) else str(value).lower()


@_command(ApiSettings, WorkerSettings)
def up(given: Given) -> None:
    """Start the API and a worker, and keep both running."""
    settings = _settings(ApiSettings, given)
    # Settings that a child would refuse are reported before the port is checked: another service
    # on the port must not be taken for the child.
    worker_settings = _settings(WorkerSettings, given)
    if worker_settings.sample_only:
        say(
            "sample_only is set, and models would wait for a worker that trains; unset it, and "
            "start workers that only sample by tuneserve worker --sample-only"
        )
        raise typer.Exit(REFUSED)
    if settings.log_format == "json":
        logs.start("up", settings)
    _check_engine()
    _check_port(settings)
    # Every restarted worker gets the same name, so that it takes over at once.
    given.setdefault("worker_name", worker_settings.worker_name or _worker_name(settings))
    environment = _environment(given)
    children = [
        supervisor.ChildSpec(name, supervisor.child_command(name), environment)
        for name in ("api", "worker")
    ]

    async def ended(name: str, status: int) -> None:
        if name == "worker" and supervisor.is_from_outside(status):
            await tell_killed(settings, given["worker_name"])

    keeper = supervisor.Supervisor(children, say, supervisor.RestartPolicy(), ended)

    async def run() -> int:
        return await keeper.supervise(lambda: asyncio.create_task(report_progress(settings, say)))

    raise typer.Exit(asyncio.run(run()))


@_command(ApiSettings)
def api(given: Given) -> None:
    """Start the API process alone."""
    settings = _settings(ApiSettings, given)
    from tuneserve_server.serve import serve_api  # other commands need not wait for the application

    raise typer.Exit(serve_api(settings))


@_command(WorkerSettings)
def worker(given: Given) -> None:
    """Start a worker alone, for a running API process."""
    _settings(WorkerSettings, given)
    _check_engine()
    os.execve(
        sys.executable, [sys.executable, "-m", "tuneserve_engine.worker"], _environment(given)
    )


_GPU = Annotated[
    str | None,
    typer.Option(metavar="|".join(GPU_MIB), help="Plan for this GPU, which need not be there."),
]


@_command(WorkerSettings, further={"device": _GPU}, json="Print JSON instead of text.")
def plan(given: Given) -> None:
    """Show a worker's plan of the device's memory, line by line."""
    flags = ["--json"] if given.pop("json", None) is not None else []
    if device := given.pop("device", None):
        flags += ["--device", device]
    _settings(WorkerSettings, given)
    _check_engine()
    command = [sys.executable, "-m", "tuneserve_engine.backend.jax.memory.report", *flags]
    os.execve(sys.executable, command, _environment(given))


_COMPILED = {
    "out": Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Directory for the programs. Default, without --device: that of the worker.",
        ),
    ],
    "device": Annotated[
        str | None,
        typer.Option(
            metavar="|".join(DEVICE_KINDS), help="Compile for this GPU, which need not be there."
        ),
    ],
    "driver": Annotated[
        str | None,
        typer.Option(
            metavar="|".join(DRIVERS),
            help=f"Branch of the absent GPU's driver. Default: {max(DRIVERS)}.",
        ),
    ],
}


@_command(WorkerSettings, further=_COMPILED, json="Print JSON instead of text.")
def compile_(given: Given) -> None:
    """Compile a worker's programs ahead of its start, without loading the base model."""
    flags = ["--json"] if given.pop("json", None) is not None else []
    for name in _COMPILED:
        if (value := given.pop(name, None)) is not None:
            flags += [f"--{name}", value]
    _settings(WorkerSettings, given)
    _check_engine()
    command = [sys.executable, "-m", "tuneserve_engine.backend.jax.precompile", *flags]
    os.execve(sys.executable, command, _environment(given))


@_command(ApiSettings, WorkerSettings, json="Print JSON instead of text.")
def doctor(given: Given) -> None:
    """Check whether a service with these settings would run here. Exits with status 1 if not."""
    as_json = given.pop("json", None) is not None
    settings = _settings(ApiSettings, given)
    _settings(WorkerSettings, given)
    findings = checks.examine(settings, _environment(given))
    if as_json:
        print_json(checks.facts(findings))
    else:
        for each in findings:
            typer.echo(f"{each.level:<4}  {each.name:<9}  {each.text}")
    raise typer.Exit(FAILED if checks.has_failed(findings) else 0)


def _worker_name(settings: ApiSettings) -> str:
    """Return a worker name that no other ``tuneserve up`` on the same store uses."""
    if settings.store_kind == "sqlite":
        return "worker"
    return f"worker-{socket.gethostname()}-{settings.port}"


def _environment(given: Given) -> dict[str, str]:
    """Return this environment plus the options: child processes read their settings from it."""
    return {**os.environ, **{_variable(name): text for name, text in given.items()}}


def _variable(name: str) -> str:
    return f"TUNESERVE_{name.upper()}"


def _settings(settings_type: type[S], given: Given) -> S:
    """Return the settings with the options on top; if they are refused, exit with the reasons."""
    own: dict[str, Any] = {
        name: text for name, text in given.items() if name in settings_type.model_fields
    }
    try:
        return settings_type(**own)
    except ValidationError as error:
        for problem in error.errors():
            say(_explain(problem, given))
    raise typer.Exit(REFUSED)


def _explain(problem: ErrorDetails, given: Given) -> str:
    """Explain the problem of a setting, with its value and where the value comes from."""
    text = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return text
    name = str(problem["loc"][0])
    origin = _variable(name)
    if name in given:
        origin = f"--{name.replace('_', '-')}"
    elif origin not in os.environ:
        origin = SETTINGS_FILE
    value = problem["input"]
    part = "".join(f"[{each!r}]" for each in problem["loc"][1:])  # of a setting that is a table
    if name == "store":
        value = without_password(str(value))
    return f"{name}{part} is {value!r} (from {origin}); {text[0].lower()}{text[1:]}"


_OF_CLIENTS = {"url", "api_key"}
"""The variables (without the prefix) of clients, which may run in the same shell."""


def _check_names() -> None:
    """Refuse a settings file that cannot be read or holds anything but settings.

    An unknown variable may belong to another program, so it only causes a warning.
    """
    known = {*ApiSettings.model_fields, *WorkerSettings.model_fields}
    try:
        keys = tomllib.loads(Path(SETTINGS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        keys = {}
    except (OSError, ValueError) as error:
        say(f"{SETTINGS_FILE} cannot be read: {error}; correct it or remove it")
        raise typer.Exit(REFUSED) from None
    for name in os.environ:
        setting = name.lower().removeprefix("tuneserve_")
        if name.upper().startswith("TUNESERVE_") and setting not in known | _OF_CLIENTS:
            say(f"{name} is not a setting and is ignored{_like(setting, known, _variable)}")
    unknown = [key for key in keys if key not in known]
    for key in unknown:
        say(f"{SETTINGS_FILE} has {key!r}, which is not a setting{_like(key, known)}")
    if unknown:
        raise typer.Exit(REFUSED)


def _like(name: str, known: set[str], spelt: Callable[[str], str] = str) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {spelt(close[0])}?" if close else "; see docs/configuration.md"


def _check_engine() -> None:
    if find_spec("jax") is None:
        say("a worker needs the engine, which is not installed: pip install '.[engine]' in a clone")
        raise typer.Exit(REFUSED)


def _check_port(settings: ApiSettings) -> None:
    try:
        listen(settings).close()
    except CannotStart as error:
        say(str(error))
        raise typer.Exit(REFUSED) from None


def say(text: str) -> None:
    """Print a message for the user, beside the logs of the children."""
    if logs.is_json():
        logger.info("%s", text)
    else:
        print(f"tuneserve: {text}", file=sys.stderr, flush=True)
