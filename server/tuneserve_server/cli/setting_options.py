"""Settings as options of a command, ``data_dir`` as ``--data-dir``, and what is wrong with them."""

import difflib
import inspect
import logging
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typer.core import TyperCommand

from tuneserve_engine.core.errors import REFUSED
from tuneserve_engine.settings.common import (
    SETTINGS_FILE,
    TINY_MODEL,
    CommonSettings,
    without_password,
)
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.telemetry import logs
from tuneserve_server.cli import supervisor
from tuneserve_server.cli.output import application
from tuneserve_server.cli.setting_groups import FIRST, GROUP_OF
from tuneserve_server.settings import ApiSettings

logger = logging.getLogger(__name__)
S = TypeVar("S", bound=CommonSettings)
Given = dict[str, str]
"""The options on the command line, by setting."""

_SUPERVISOR, _HELP_ALL = "supervisor", "help_all"
_SHOWS_ALL = "tuneserve.shows_all"  # of a context


class SettingsCommand(TyperCommand):
    """A command that shows its settings by group: the first ones, or all with ``--help-all``."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shows_all = ctx.meta.get(_SHOWS_ALL, False)
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            group = GROUP_OF.get(parameter.name or "", "Options")
            row = parameter.get_help_record(ctx)
            if row and (shows_all or group == "Options" or parameter.name in FIRST):
                groups.setdefault(group, []).append(row)
        order = [*dict.fromkeys(GROUP_OF.values()), "Options"]
        for group in sorted(groups, key=order.index):
            with formatter.section(group):
                formatter.write_dl(groups[group])


def _show_all(ctx: typer.Context, is_asked: bool) -> None:
    if is_asked:
        ctx.meta[_SHOWS_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


_HELP_ALL_OPTION = Annotated[
    bool | None,
    typer.Option(
        "--help-all", callback=_show_all, is_eager=True, help="Show all settings and exit."
    ),
]


def command(
    *settings: type[CommonSettings], further: dict[str, Any] | None = None, **flags: str
) -> Callable[[Callable[[Given], None]], typer.Typer]:
    """Return a decorator that makes a command with one option for each of the settings.

    ``flags`` are further options without a value, by name, with their help texts; a flag on the
    command line is in ``Given`` with an empty text. ``further`` are options with a value, by name,
    as typer takes them.
    """
    fields = {name: field for each in settings for name, field in each.model_fields.items()}

    def register(run: Callable[[Given], None]) -> typer.Typer:
        def call(**values: Any) -> None:
            values.pop(_HELP_ALL)
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
        types[_HELP_ALL] = _HELP_ALL_OPTION
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in types.items()
        ]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = types
        app = application()
        app.command(run.__name__.rstrip("_"), cls=SettingsCommand, help=run.__doc__)(call)
        return app

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
    metavar = "|".join(get_args(field.annotation)) if is_choice else _metavar(name)
    return Annotated[str | None, typer.Option(help=text, metavar=metavar)]


def _metavar(name: str) -> str:
    if name.endswith("_bytes"):
        return "SIZE"
    return "DURATION" if name.endswith("_s") else "VALUE"


def _text(value: str | bool) -> str:
    """Return an option's value as the environment would have it."""
    return value if isinstance(value, str) else str(value).lower()


def variable(name: str) -> str:
    return f"TUNESERVE_{name.upper()}"


def settings_from(settings_type: type[S], given: Given) -> S:
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
    origin = variable(name)
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
            say(f"{name} is not a setting and is ignored{_like(setting, known, variable)}")
    unknown = [key for key in keys if key not in known]
    for key in unknown:
        say(f"{SETTINGS_FILE} has {key!r}, which is not a setting{_like(key, known)}")
    if unknown:
        raise typer.Exit(REFUSED)


def _like(name: str, known: set[str], spelt: Callable[[str], str] = str) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {spelt(close[0])}?" if close else "; see docs/configuration.md"


def say(text: str) -> None:
    """Print a message for the user, beside the logs of the children."""
    if logs.is_json():
        logger.info("%s", text)
    else:
        print(f"tuneserve: {text}", file=sys.stderr, flush=True)
