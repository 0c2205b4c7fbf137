"""``tuneserve checkpoints``: list, delete, expire, export, import and merge checkpoints."""

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tuneserve_engine.core.errors import REFUSED
from tuneserve_server.cli.options import (
    HERE,
    PATIENT_S,
    ApiKey,
    AsJson,
    Force,
    ListFirst,
    Url,
    connected,
)
from tuneserve_server.cli.output import (
    FAILED,
    application,
    end,
    minute,
    print_json,
    print_table,
    settings_here,
    size,
)
from tuneserve_server.cli.resolve import checkpoint_path, run_id

app = application(cls=ListFirst, help="Manage checkpoints: list, delete, export, import, merge.")

CheckpointPath = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="Checkpoint: tinker://…, its run's name, the start of the id, or last."
    ),
]

_NEVER = "none"


@app.command("list")
def list_checkpoints(
    run: Annotated[
        str | None, typer.Option(help="List only checkpoints of this training run.", metavar="ID")
    ] = None,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List your checkpoints, newest first."""
    with connected(url, api_key) as client:
        found = client.checkpoints(None if run is None else run_id(client, run))
    if as_json:
        print_json([each.model_dump(mode="json") for each in found])
        return
    rows = [
        [
            each.tinker_path,
            each.checkpoint_type,
            size(each.size_bytes),
            minute(each.time),
            minute(each.expires_at),
        ]
        for each in found
    ]
    head = ["path", "type", "size", "saved (UTC)", "expires (UTC)"]
    print_table(head, rows, empty="no checkpoints; tuneserve train saves one at its end")


@app.command("delete")
def delete_checkpoint(
    path: CheckpointPath, url: Url = HERE, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """Delete a checkpoint. Sampling sessions that use it continue."""
    with connected(url, api_key) as client:
        path = checkpoint_path(client, path, newest=False)
        client.delete_checkpoint(path)
    if as_json:
        print_json({"deleted": path})
    else:
        typer.echo(f"{path} is deleted")


@app.command("ttl")
def set_ttl(
    path: CheckpointPath,
    time: Annotated[
        str,
        typer.Argument(metavar="TIME", help="Time from now, such as 1h or 30d; none: no expiry."),
    ],
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Set the time after which a checkpoint is deleted, or remove its expiry."""
    from tuneserve_engine.settings.units import seconds_of  # imports pydantic

    try:
        ttl_s = None if time == _NEVER else round(seconds_of(time))
    except (ValueError, OverflowError):
        end(f"TIME is {time!r}; it must be like 7200, 2h or 30d, or none for no expiry", REFUSED)
    with connected(url, api_key) as client:
        path = checkpoint_path(client, path, newest=False)
        client.set_ttl(path, ttl_s)
    if as_json:
        print_json({"path": path, "ttl_seconds": ttl_s})
    else:
        typer.echo(f"{path} " + ("never expires" if ttl_s is None else f"expires in {ttl_s} s"))


@app.command("export")
def export_checkpoint(  # noqa: PLR0913 - options
    path: CheckpointPath,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Output directory; empty, or created.")
    ],
    force: Force = False,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's adapter into a directory that PEFT can load."""
    check_export(folder, force=force)
    with connected(url, api_key, deadline_s=PATIENT_S) as client:
        path = checkpoint_path(client, path)
        client.download(path, folder)
    if as_json:
        files = sorted(each.name for each in folder.iterdir())
        print_json({"path": path, "folder": str(folder), "files": files})
    else:
        typer.echo(f"{folder} holds the adapter: PeftModel.from_pretrained(model, {str(folder)!r})")


@app.command("import")
def import_checkpoint(  # noqa: PLR0913 - options
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory written by PEFT's save_pretrained.")
    ],
    name: Annotated[str, typer.Option(help="Name of the checkpoint.")] = "imported",
    base_model: Annotated[
        str | None,
        typer.Option(
            help="Name of the base model on the server. Default: the name in the adapter.",
            metavar="NAME",
        ),
    ] = None,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Import an adapter that PEFT saved, as a checkpoint that you can train from."""
    with connected(url, api_key, deadline_s=PATIENT_S) as client:
        path = client.import_peft(folder, name=name, base_model=base_model)
        found = client.checkpoint_info(path)
    if as_json:
        rank = {"base_model": found.base_model, "rank": found.lora_rank}
        print_json({"folder": str(folder), "path": path, **rank})
    else:
        typer.echo(f"{path} has rank {found.lora_rank} on {found.base_model}")
        typer.echo(f"continue with: tuneserve train ROWS.jsonl --resume {path}", err=True)


@app.command("merge")
def merge_checkpoint(  # noqa: PLR0913 - options
    path: CheckpointPath,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Output directory; empty, or created.")
    ],
    base: Annotated[
        str | None,
        typer.Option(
            help="Directory or hub id of the base model. Default: the base model of this "
            "machine's settings if it has the checkpoint's name, else that name.",
            metavar="BASE",
        ),
    ] = None,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Merge a checkpoint's adapter into its base model, on this machine, and write the model."""
    if find_spec("jax") is None:
        end("merging needs the engine: pip install '.[engine]' in a clone", FAILED)
    check_export(folder)
    with tempfile.TemporaryDirectory() as taken:
        with connected(url, api_key, deadline_s=PATIENT_S) as client:
            path = checkpoint_path(client, path)
            client.download(path, taken)
        config = json.loads((Path(taken) / "adapter_config.json").read_text())
        base = base or _where_it_is(config["base_model_name_or_path"])
        command = [
            sys.executable,
            "-m",
            "tuneserve_engine.adapters.merge",
            taken,
            base,
            str(folder),
        ]
        ran = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if ran.returncode != 0:
        reason = (ran.stderr.strip().splitlines() or ["it was killed; check the memory"])[-1]
        end(f"{reason} (--base is {base})", FAILED)
    if as_json:
        print_json({"path": path, "base": base, "folder": str(folder)})
    else:
        typer.echo(f"{folder} holds the model: tuneserve up --base-model {folder}")


def check_export(folder: Path, *, force: bool | None = None) -> None:
    """End the command if the folder cannot be written or, without ``force``, is not empty.

    Without ``--force``, which is None then, a command accepts only an empty folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = next(folder.iterdir(), None) is None
    except OSError as error:
        end(f"cannot write an adapter into {folder}: {error.strerror}", REFUSED)
    if not is_empty and not force:
        way_out = "" if force is None else ", or replace its files with --force"
        end(f"{folder} is not empty; name an empty or a new directory{way_out}", REFUSED)


def _where_it_is(base_model: str) -> str:
    """Return the place of the named base model by this machine's settings, else the name."""
    settings = settings_here()
    return settings.base_model if base_model == settings.served_name else base_model
