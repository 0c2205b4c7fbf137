"""The ``tuneserve`` command. A command's module is imported when the command is called."""

from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from tuneserve_engine.core.errors import REFUSED
from tuneserve_server.cli.output import application, end

_Command = Any  # of click, or of typer's copy of it

SECTIONS = {
    "Use a server": {
        "train": ("train:train", "Fine-tune an adapter on your data."),
        "chat": ("chat:chat", "Talk to a checkpoint or a base model."),
        "eval": ("harness:evaluate", "Evaluate a checkpoint with lm-eval or inspect."),
        "runs": ("runs:app", "List, show, compare and annotate training runs."),
        "checkpoints": ("checkpoints:app", "List, delete, export, import, merge."),
        "models": ("status:models", "List the base models of a server."),
        "status": ("status:status", "Show whether a server works."),
        "top": ("top:top", "Show the load of the workers."),
        "conformance": ("conformance:conformance", "Check that a server speaks the protocol."),
    },
    "Run a server": {
        "up": ("services:up", "Start the API and a worker, and keep both running."),
        "stop": ("stop:stop", "Stop the service of a data directory."),
        "api": ("services:api", "Start the API process alone."),
        "worker": ("services:worker", "Start a worker alone, for a running API process."),
        "plan": ("services:plan", "Show a worker's plan of the device's memory."),
        "compile": ("services:compile_", "Compile a worker's programs ahead of its start."),
        "doctor": ("services:doctor", "Check whether a service would run here."),
    },
    "Administer a server": {
        "keys": ("keys:keys", "Manage API keys: create, list, revoke."),
        "tenants": ("keys:tenants", "Manage tenants: their weights and limits."),
        "files": ("files:app", "Manage the files directory: owner, unused files."),
    },
}
"""The commands by section of the help: the module and name of each, and its short help."""


class LazyCommands(TyperGroup):
    """A group whose commands are imported when they are called."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._homes = {name: home for name, home, _ in _rows()}
        self.commands = {name: TyperCommand(name, help=text) for name, _, text in _rows()}

    def get_command(self, ctx: Any, cmd_name: str) -> _Command | None:
        """Import the command."""
        if cmd_name not in self._homes:
            return None
        module, _, attribute = self._homes[cmd_name].partition(":")
        found = getattr(import_module(f"tuneserve_server.cli.{module}"), attribute)
        if not isinstance(found, typer.Typer):
            command, found = found, application()
            found.command()(command)
        loaded = get_command(found)
        loaded.name = cmd_name
        return loaded

    def invoke(self, ctx: Any) -> Any:
        """Import and call the command; end with what to install if a package is missing."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            end(
                f"{error.name} is not installed, which this command needs: in a clone of "
                "tuneserve's repository, pip install '.[server,engine]'",
                REFUSED,
            )

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the short help of the commands, by section."""
        width = max(len(name) for name in self.commands)
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(width), each[1]) for name, each in commands.items()]
                )


def _rows() -> Iterator[tuple[str, str, str]]:
    """Yield name, home and short help of each command."""
    for commands in SECTIONS.values():
        for name, (home, text) in commands.items():
            yield name, home, text


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        typer.echo(f"tuneserve {version('tuneserve')}")
        raise typer.Exit


@app.callback()
def tuneserve(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show version.")
    ] = False,
) -> None:
    """Fine-tune adapters of one base model for many tenants, and sample from them."""
