"""``tuneserve train``: supervised fine-tuning of one adapter on rows of data."""

import shlex
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tuneserve_client import (
    Adapter,
    Client,
    Datum,
    Future,
    Model,
    RequestFailed,
    StepOutput,
    TrainOutput,
)
from tuneserve_client.catalog import split_path
from tuneserve_engine.core.errors import REFUSED, UserError
from tuneserve_server.checkpoint_names import check_name
from tuneserve_server.cli.checkpoints import check_export
from tuneserve_server.cli.data.preview import Preview
from tuneserve_server.cli.data.sources import NoSource
from tuneserve_server.cli.options import HERE, PATIENT_S, ApiKey, AsJson, Url, connected
from tuneserve_server.cli.output import FAILED, end, print_json_line, this_command
from tuneserve_server.cli.train_recipe import Recipe
from tuneserve_server.cli.train_rows import BadRows, Rows, encode, read_rows
from tuneserve_server.cli.train_view import Step, View, view_of

_RANK = 16
_AHEAD = 2
"""The number of steps that are sent before the result of an earlier step is read.

The server works on them while results travel.
"""
_RATE_STEPS = 10
_SAVED_AS = "final"
_LONGEST_SUFFIX = "-step-9999999"
_SAVE_AGAIN_S = 15.0
_INTERRUPTED = 130  # a shell's status of a command that Ctrl-C ended


def train(  # noqa: PLR0913 - options
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="JSONL, JSON, CSV or Parquet file; dataset directory or hub id."
        ),
    ],
    base_model: Annotated[
        str | None,
        typer.Option(help="Base model. Default: the only one of the server.", metavar="NAME"),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=1, help=f"Rank of the adapter. Default: {_RANK}.")
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(help="Kind of adapter: lora, rslora or osft. Default: lora.", metavar="KIND"),
    ] = None,
    unfreeze_ratio: Annotated[
        float | None,
        typer.Option(help="Share of directions that an osft adapter trains, instead of a rank."),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            help="Form of an osft adapter: factors, short_fixed or core. Default: factors.",
            metavar="FORM",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Learning rate of the first step. It falls linearly to 0. Default: 2e-4."
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Number of passes over the data. Default: 1.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Number of rows per step. Default: 8.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Length in tokens at which longer rows are cut. Default: no cut; rows longer than "
            "the context are refused.",
        ),
    ] = None,
    save: Annotated[str, typer.Option(help="Name of the checkpoint.", metavar="NAME")] = _SAVED_AS,
    export: Annotated[
        Path | None,
        typer.Option(help="Directory to write the adapter to, for PEFT.", metavar="DIR"),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Checkpoint to continue from.", metavar="PATH")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the adapter and of the order of the rows. Default: 0."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--map",
            help="Columns of the data for the expected names.",
            metavar="prompt=question,completion=answer",
        ),
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Train without bad rows.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the data, and train nothing.")
    ] = False,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune an adapter on conversations, prompts and completions, instructions, or texts."""
    kind = _adapter(adapter, rank, unfreeze_ratio, form)
    if resume and (base_model or rank or kind):
        end(
            "--base-model, --rank, --adapter and its options come from the checkpoint; leave them "
            "out with --resume",
            REFUSED,
        )
    _check_save(save)
    if export and not dry_run:
        check_export(export)
    given = {
        "seed": seed,
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "max_tokens": max_tokens,
    }
    try:
        rows = read_rows(data, _renamed(columns), skip_bad=skip_bad)
        name = f"train {Path(data).name}"
        with connected(url, api_key, deadline_s=PATIENT_S, name=name) as client:
            fresh = Recipe(rows.digest).changed(given)
            if resume:
                recipe, first, base_model = _remembered(client, resume, fresh, given)
            else:
                recipe, first = fresh, 0
                base_model = base_model or _only_base_model(client)
            datums = _encoded(client, rows, base_model, recipe.max_tokens)
            if first >= recipe.steps(len(datums)):
                end(f"{resume} is at the end of this run already; raise --epochs", REFUSED)
            if dry_run or not as_json:
                decoder = client.tokenizer(base_model)
                shown = Preview.from_data(rows, datums, decoder, steps=recipe.steps(len(datums)))
                shown.show(Console(), as_json=as_json)
            elif rows.bad:
                typer.echo(f"bad rows skipped: {len(rows.bad)}", err=True)
            if dry_run:
                return
            if resume:
                model = client.load_model(resume)
            else:
                model = client.create_model(
                    base_model, rank=rank or _RANK, seed=recipe.seed, adapter=kind
                )
            run = _TrainingRun(model, recipe, datums, first)
            _carry_out(client, run, _Wishes(data, save, export, as_json, url, columns, skip_bad))
    except NoSource as error:
        end(str(error), REFUSED)
    except BadRows as error:
        end(str(error), FAILED)
    except OSError as error:
        end(f"cannot read {data}: {error.strerror}", FAILED)


def _renamed(columns: str | None) -> dict[str, str]:
    """Return the column for each expected name, from ``name=column,name=column``."""
    pairs = [pair.partition("=") for pair in columns.split(",")] if columns else []
    if not all(name and column for name, _, column in pairs):
        end(f"--map is {columns!r}; it must be like prompt=question,completion=answer", REFUSED)
    return {name.strip(): column.strip() for name, _, column in pairs}


def _adapter(
    kind: str | None, rank: int | None, unfreeze_ratio: float | None, form: str | None
) -> Adapter | None:
    """Return the adapter asked for, or None for the default. The server checks the options."""
    if kind is None and unfreeze_ratio is None and form is None:
        return None
    return Adapter(kind=kind or "lora", rank=rank, unfreeze_ratio=unfreeze_ratio, form=form)


@dataclass(frozen=True)
class _Wishes:
    """The outputs that the user asked for."""

    data: str
    save: str
    export: Path | None
    as_json: bool
    url: str
    columns: str | None
    skip_bad: bool

    @property
    def server(self) -> list[str]:
        """The options with which another command reaches the same server, without the key."""
        return [] if self.url == HERE else ["--url", self.url]


@dataclass(frozen=True)
class _Sent:
    """A step whose results have not arrived."""

    number: int
    tokens: int
    weight: float
    rate: float
    gradient: Future[TrainOutput]
    applied: Future[StepOutput]


class _TrainingRun:
    """The steps of a run from ``first`` on; a few of them are always in flight."""

    def __init__(self, model: Model, recipe: Recipe, data: list[Datum], first: int) -> None:
        self.model = model
        self.recipe = recipe
        self.next = first
        self.steps = recipe.steps(len(data))
        self._data = data
        self._sent: deque[_Sent] = deque()
        self._landed: deque[tuple[float, int]] = deque(maxlen=_RATE_STEPS + 1)

    def go(self, view: View, stop: threading.Event) -> None:
        """Train until the last step or until ``stop`` is set, then wait for the steps sent."""
        self._landed.append((time.monotonic(), 0))
        while self.next < self.steps and not stop.is_set():
            self._send()
            if len(self._sent) > _AHEAD:
                view.show(self._land())
        while self._sent:
            view.show(self._land())

    def _send(self) -> None:
        batch = self.recipe.batch(self.next, self._data)
        rate = self.recipe.rate(self.next, len(self._data))
        gradient = self.model.forward_backward(batch)
        applied = self.model.optim_step(rate)  # queued behind the gradient
        weight = float(sum(each.inputs["weights"].sum() for each in batch))
        tokens = sum(map(len, batch))
        self._sent.append(_Sent(self.next, tokens, weight, rate, gradient, applied))
        self.next += 1

    def _land(self) -> Step:
        sent = self._sent.popleft()
        loss = sent.gradient.result().loss / sent.weight
        metrics = sent.applied.result().metrics
        self._landed.append((time.monotonic(), sent.tokens))
        took_s = self._landed[-1][0] - self._landed[0][0]
        tokens = sum(count for _, count in list(self._landed)[1:])
        return Step(
            step=sent.number + 1,
            steps=self.steps,
            epoch=self.recipe.epoch(sent.number, len(self._data)),
            loss=loss,
            grad_norm=metrics.get("grad_norm"),
            learning_rate=sent.rate,
            tokens=sent.tokens,
            tokens_per_s=tokens / max(took_s, 1e-6),
        )


def _remembered(
    client: Client, path: str, fresh: Recipe, given: dict[str, int | float | None]
) -> tuple[Recipe, int, str]:
    """Return the recipe, the next step and the base model with which a checkpoint's run continues.

    Options that were given replace those of the recipe. With other data, or another order of the
    rows, training starts from the first step.
    """
    model_id, _, _ = split_path(path)
    base_model = client.checkpoint_info(path).base_model
    found = [each for each in client.checkpoints(model_id) if each.tinker_path == path]
    known = Recipe.remembered((found[0].user_metadata or {}) if found else {})
    if known is None:
        return fresh, 0, base_model
    recipe = known[0].changed({**given, "data": fresh.data})
    if recipe.has_order_of(known[0]):
        return recipe, known[1], base_model
    typer.echo("the data or their order differ from the checkpoint's: starting at row 1", err=True)
    return recipe, 0, base_model


def _only_base_model(client: Client) -> str:
    names = [each.model_name for each in client.base_models()]
    if len(names) != 1:
        raise ValueError(f"this server has {', '.join(names)}; choose one with --base-model")
    return names[0]


def _encoded(client: Client, rows: Rows, base_model: str, max_tokens: int | None) -> list[Datum]:
    known = {each.model_name: each.max_context_length for each in client.base_models()}
    if base_model not in known:
        raise ValueError(
            f"base model {base_model!r} is not served here; this server has {', '.join(known)}"
        )
    limit = min(each for each in (max_tokens, known[base_model], 2**31) if each)
    return encode(rows, client.tokenizer(base_model), limit=limit, cut=max_tokens is not None)


def _carry_out(client: Client, run: _TrainingRun, wishes: _Wishes) -> None:
    """Train, save, and print where the results are."""
    console = Console()
    view = view_of(console, steps=run.steps, done=run.next, as_json=wishes.as_json)
    with _until_interrupted() as stop:
        with view:
            run.go(view, stop)
        is_whole = run.next == run.steps
        name = wishes.save if is_whole else f"{wishes.save}-step-{run.next}"
        path = _saved(run, name)
        exported = str(wishes.export) if is_whole and wishes.export else None
        if exported:
            client.download(path, exported)
    if wishes.as_json:
        ended = {"checkpoint": path, "steps_done": run.next, "steps": run.steps}
        print_json_line({**ended, "export": exported})
    else:
        typer.echo(f"saved as {path}")
        if exported:
            typer.echo(f"the adapter is in {exported}")
        if is_whole:
            chat = shlex.join([this_command(), "chat", path, *wishes.server])
            typer.echo(f"talk to it with: {chat}")
    if is_whole:
        return
    more = [] if wishes.save == _SAVED_AS else ["--save", wishes.save]
    more += ["--export", str(wishes.export)] if wishes.export else []
    more += ["--map", wishes.columns] if wishes.columns else []
    more += ["--skip-bad"] if wishes.skip_bad else []
    more += wishes.server
    again = shlex.join([this_command(), "train", wishes.data, "--resume", path, *more])
    typer.echo(f"stopped after step {run.next} of {run.steps}; continue with: {again}", err=True)
    raise typer.Exit(_INTERRUPTED)


def _saved(run: _TrainingRun, name: str) -> str:
    """Save the run as a checkpoint and return its path.

    If the tenant has no room for a checkpoint, the save is tried again until it succeeds. Otherwise
    the run would be lost.
    """
    while True:
        try:
            return run.model.save(name, user_metadata=run.recipe.metadata(run.next)).result()
        except RequestFailed as error:
            if error.category != "user":
                raise
            typer.echo(
                f"cannot save yet: {error}; trying again every {_SAVE_AGAIN_S:g} s; press Ctrl-C "
                "twice to quit without saving",
                err=True,
            )
            time.sleep(_SAVE_AGAIN_S)


def _check_save(name: str) -> None:
    """End the command now if ``name`` is unfit for the checkpoint of a full or interrupted run."""
    try:
        check_name("--save", name)
        check_name("--save plus the suffix of an interrupted run", name + _LONGEST_SUFFIX)
    except UserError as error:
        end(str(error), REFUSED)


@contextmanager
def _until_interrupted() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets; the second Ctrl-C ends the process as usual."""
    asked = threading.Event()

    def ask(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)
        typer.echo("stopping and saving; press Ctrl-C again to quit without saving", err=True)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
