"""``tuneserve files``: the owner of the files directory, and unused files."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuneserve_server.cli import keys, output
from tuneserve_server.cli.keys import AsJson, DataDir

if TYPE_CHECKING:
    from tuneserve_engine.settings.common import CommonSettings

app = output.application(
    no_args_is_help=True, help="Manage the files directory: owner, unused files."
)

FilesDir = Annotated[
    Path | None, typer.Option(help="Files directory. Default: from the settings.", metavar="DIR")
]
FilesUrl = Annotated[
    str | None,
    typer.Option(help="Bucket of files, s3://…. Default: from the settings.", metavar="URL"),
]
StoreAddress = Annotated[
    str | None,
    typer.Option("--store", help="Address of the Redis store. Default: from the settings."),
]


@app.command()
def status(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show the number of files, the quarantine, and why unused files are kept."""
    _show(keys.call("GET", "/files", data_dir), as_json)


@app.command()
def clean(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Move all unused files into quarantine now, even if they exceed max_unused_share."""
    _show(keys.call("POST", "/files/clean", data_dir), as_json)


@app.command()
def adopt(
    data_dir: DataDir = None,
    files_dir: FilesDir = None,
    files_url: FilesUrl = None,
    store: StoreAddress = None,
    as_json: AsJson = False,
) -> None:
    """Make this store the owner of the files directory, after a store was replaced or restored.

    Files that the store does not name are unused from then on, and go into quarantine. The command
    is refused while the service of another store uses the directory."""
    import httpx  # wrong arguments are refused before it is imported

    given: dict[str, Any] = {"data_dir": data_dir, "files_dir": files_dir, "store": store}
    given["files_url"] = files_url
    settings = output.settings_here(**{name: value for name, value in given.items() if value})
    try:
        adopted = keys.ask(settings.admin_socket, "POST", "/files/adopt")
    except httpx.TransportError:  # the service does not run, or not on this machine
        adopted = _adopt_here(settings)
    if as_json:
        output.print_json(adopted)
        return
    files, named = adopted["files"], adopted["named"]
    typer.echo(f"{settings.files_shown} belongs to the store {settings.store_shown} now")
    typer.echo(
        f"it has {files} checkpoints and recovery points; the store names {named} of them. The "
        f"other {files - named} are unused and go into quarantine while the service runs"
    )


def _adopt_here(settings: "CommonSettings") -> dict[str, int]:
    from tuneserve_engine.store.errors import StoreFailed, StoreUnusable
    from tuneserve_engine.store.open import adopt_files

    try:
        return asyncio.run(adopt_files(settings))._asdict()
    except (StoreUnusable, StoreFailed, OSError) as error:  # ConnectionError is an OSError
        output.end(str(error), output.FAILED)


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.print_json(found)
        return
    quarantine = found["quarantine"]
    facts = {"files": str(found["files"]), "quarantine": str(sum(quarantine.values()))}
    facts |= {f"  {group}": str(count) for group, count in quarantine.items()}
    output.print_facts(facts | {"unused files": found["kept"] or "are cleaned up"})
