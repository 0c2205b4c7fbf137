"""``tuneserve runs``: the runs of a tenant, their losses, their notes and their cost."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuneserve_client.runs import RunOrder, RunState
from tuneserve_engine.core.errors import REFUSED
from tuneserve_server.cli import resolve
from tuneserve_server.cli.options import HERE, ApiKey, AsJson, ListFirst, Url, connected
from tuneserve_server.cli.output import (
    application,
    duration,
    end,
    minute,
    print_facts,
    print_json,
    print_table,
)
from tuneserve_server.cli.resolve import run_name
from tuneserve_server.cli.run_curve import as_csv, step_rows
from tuneserve_server.cli.run_facts import RunFacts, facts_of, figure, texts_of

if TYPE_CHECKING:
    from tuneserve_client.wire import run_types

app = application(cls=ListFirst, help="List, show, compare and annotate training runs.")

_HEAD = ["name", "state", "step", "loss", "held out", "duration", "tokens", "created (UTC)", "id"]
_ASCEND = ("name", "loss", "held_out_loss")
_PAGE = 500
_NOT_COMPARED = {"name", "config", "checkpoints", "samples"}  # in the head, in rows, too long

RunId = Annotated[str, typer.Argument(metavar="ID", help="Id, the start of it, name, or last.")]


@app.command("list")
def list_runs(  # noqa: PLR0913 - options
    search: Annotated[
        str, typer.Option(help="Part of a name, id, base model, note or tag.", metavar="TEXT")
    ] = "",
    state: Annotated[RunState | None, typer.Option(help="Only runs in this state.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only runs with this tag.")] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Archived runs too.")] = False,
    sort: Annotated[
        RunOrder,
        typer.Option(help="Figure to sort by. Losses and names ascend; all others descend."),
    ] = "created",
    reverse: Annotated[bool, typer.Option("--reverse", help="Sort the other way round.")] = False,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List your training runs, newest first."""
    runs: list[run_types.TrainingRunResponse] = []
    with connected(url, api_key) as client:
        while True:
            page = client.search_runs(
                search,
                state=state,
                tag=tag,
                archived=None if archived else False,
                sort=sort,
                descending=(sort in _ASCEND) == reverse,
                limit=_PAGE,
                offset=len(runs),
            )
            runs += page.training_runs
            if not page.training_runs or len(runs) >= page.cursor.total_count:
                break
    if as_json:
        print_json([each.model_dump(mode="json") for each in runs])
        return
    none = "no run fits" if search or state or tag else "no runs; tuneserve train makes one"
    print_table(_HEAD, [_row(each) for each in runs], empty=none)


@app.command("show")
def show_run(
    run_id: RunId, url: Url = HERE, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """Show one run: its configuration, losses, verdict, samples, checkpoints and cost."""
    with connected(url, api_key) as client:
        facts = facts_of(client, resolve.run_id(client, run_id))
    if as_json:
        print_json(facts.as_json())
    else:
        print_facts(texts_of(facts))


@app.command("compare")
def compare_runs(
    run_ids: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Two runs or more, as in show.")
    ],
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show runs side by side: what differs in their configuration, and how they went."""
    if len(run_ids) < 2:
        end("compare takes two runs or more; name another one", REFUSED)
    with connected(url, api_key) as client:
        found = [facts_of(client, resolve.run_id(client, each)) for each in run_ids]
    if as_json:
        print_json([each.as_json() for each in found])
        return
    columns = [
        {name: " ".join([text] if isinstance(text, str) else text) for name, text in told.items()}
        for told in map(_compared, found)
    ]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    head = ["", *(run_name(each.run) or each.run.training_run_id for each in found)]
    print_table(head, [row for row in rows if len(set(row[1:])) > 1])


@app.command("curve")
def write_curve(
    run_id: RunId,
    csv: Annotated[
        Path | None,
        typer.Option(
            "--csv", help="File to write. Default: standard output.", metavar="FILE", dir_okay=False
        ),
    ] = None,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Write the curve of a run, as CSV or with --json: a row for each optimizer step."""
    with connected(url, api_key) as client:
        rows = step_rows(client.curve(resolve.run_id(client, run_id)))
        text = json.dumps([asdict(each) for each in rows]) + "\n" if as_json else as_csv(rows)
        if csv is None:
            typer.echo(text, nl=False)
        else:
            csv.write_text(text, encoding="utf-8")


@app.command("note")
def note_run(
    run_id: RunId,
    text: Annotated[str, typer.Argument(help="The note; an empty text removes it.")],
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Keep a note with a run, in place of an earlier one."""
    with connected(url, api_key) as client:
        run = client.update_run(resolve.run_id(client, run_id), {"notes": text or None})
    _tell_changed(run, as_json=as_json)


@app.command("rename")
def rename_run(
    run_id: RunId,
    name: Annotated[str, typer.Argument(help="The new name.")],
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Give a run another name."""
    with connected(url, api_key) as client:
        run = client.update_run(resolve.run_id(client, run_id), {"name": name or None})
    _tell_changed(run, as_json=as_json)


@app.command("tag")
def tag_run(  # noqa: PLR0913 - options
    run_id: RunId,
    tags: Annotated[list[str], typer.Argument(metavar="TAG...", help="Tags to add.")],
    remove: Annotated[bool, typer.Option("--remove", help="Remove these tags instead.")] = False,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Add tags to a run, or remove them."""
    wanted = [each.strip() for tag in tags for each in tag.split(",") if each.strip()]
    with connected(url, api_key) as client:
        run = client.run(resolve.run_id(client, run_id))
        had = [each.strip() for each in (run.user_metadata or {}).get("tags", "").split(",")]
        kept = [each for each in had if each and each not in wanted]
        now = kept if remove else [*kept, *wanted]
        run = client.update_run(run.training_run_id, {"tags": ",".join(now) or None})
    _tell_changed(run, as_json=as_json)


@app.command("archive")
def archive_run(
    run_id: RunId,
    undo: Annotated[bool, typer.Option("--undo", help="Bring the run back.")] = False,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Leave a run out of lists; nothing of it is deleted."""
    with connected(url, api_key) as client:
        changes = {"archived": None if undo else "true"}
        run = client.update_run(resolve.run_id(client, run_id), changes)
    _tell_changed(run, as_json=as_json)


def _tell_changed(run: "run_types.TrainingRunResponse", *, as_json: bool) -> None:
    if as_json:
        print_json(run.model_dump(mode="json"))
        return
    metadata = run.user_metadata or {}
    known = {name: metadata[name] for name in ("tags", "notes", "archived") if name in metadata}
    about = "".join(f", {name}: {text}" for name, text in known.items())
    typer.echo(f"run {run_name(run) or run.training_run_id}{about}")


def _compared(facts: RunFacts) -> dict[str, str | list[str]]:
    """Return the texts about a run, with a line for each entry of its configuration."""
    texts = texts_of(facts)
    entries = {key: str(value) for key, value in sorted(facts.config.items())}
    return {name: text for name, text in texts.items() if name not in _NOT_COMPARED} | entries


def _row(run: "run_types.TrainingRunResponse") -> list[str]:
    step = "-" if run.step is None else f"{run.step}/{run.steps}" if run.steps else f"{run.step}"
    return [
        run_name(run) or "-",
        run.state,
        step,
        figure(run.loss),
        figure(run.held_out_loss),
        duration(run.duration_s),
        "-" if run.tokens is None else f"{run.tokens:,}",
        minute(run.created),
        run.training_run_id,
    ]
