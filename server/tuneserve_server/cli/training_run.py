"""The work of ``tuneserve train``: read the rows, train, save, and say how to go on."""

import shlex
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
from tuneserve_client.defaults import RANK
from tuneserve_client.paths import split_path
from tuneserve_engine.core.errors import REFUSED
from tuneserve_server.cli.data.sources import NoSource
from tuneserve_server.cli.options import PATIENT_S, connected
from tuneserve_server.cli.output import FAILED, end, print_json_line, this_command
from tuneserve_server.cli.resolve import checkpoint_path
from tuneserve_server.cli.train_options import SAVED_AS, TrainOptions
from tuneserve_server.cli.train_preview import Preview
from tuneserve_server.cli.train_recipe import Recipe
from tuneserve_server.cli.train_rows import BadRows, Rows, encode, read_rows
from tuneserve_server.cli.train_view import Step, View, view_of

_AHEAD = 2
"""The number of steps that are sent before the result of an earlier step is read.

The server works on them while results travel.
"""
_RATE_STEPS = 10
_SAVE_AGAIN_S = 15.0
_INTERRUPTED = 130  # a shell's status of a command that Ctrl-C ended


def fine_tune(asked: TrainOptions) -> None:
    """Train as asked. Any failure ends the command with its reason."""
    try:
        rows = read_rows(asked.data, asked.renamed, skip_bad=asked.skip_bad)
        with connected(asked.url, asked.api_key, deadline_s=PATIENT_S, name=asked.name) as client:
            _train(client, rows, asked)
    except NoSource as error:
        end(str(error), REFUSED)
    except BadRows as error:
        end(str(error), FAILED)
    except OSError as error:
        end(f"cannot read {asked.data}: {error.strerror}", FAILED)


def _train(client: Client, rows: Rows, asked: TrainOptions) -> None:
    """Show the rows and train on them."""
    recipe, first = Recipe(rows.digest).changed(asked.recipe), 0
    resume, base_model = asked.resume, asked.base_model
    if resume:
        resume = checkpoint_path(client, resume, training=True)
        recipe, first, base_model = _remembered(client, resume, recipe, asked.recipe)
    base_model = base_model or _only_base_model(client)
    datums = _encoded(client, rows, base_model, recipe.max_tokens)
    if first >= recipe.steps(len(datums)):
        end(f"{resume} is at the end of this run already; raise --epochs", REFUSED)
    if asked.dry_run or not asked.as_json:
        decoder = client.tokenizer(base_model)
        shown = Preview.from_data(rows, datums, decoder, steps=recipe.steps(len(datums)))
        shown.show(Console(), as_json=asked.as_json)
    elif rows.bad:
        typer.echo(f"bad rows skipped: {len(rows.bad)}", err=True)
    if asked.dry_run:
        return
    if resume:
        model = client.load_model(resume, name=asked.name)
    else:
        model = _new_model(client, base_model, recipe, asked)
    _carry_out(client, _TrainingRun(model, recipe, datums, first), asked)


def _new_model(client: Client, base_model: str, recipe: Recipe, asked: TrainOptions) -> Model:
    """Create the model. The server checks the options of its adapter."""
    rank = asked.adapter.get("rank")
    kind = (
        Adapter(**({"kind": "lora"} | asked.adapter)) if asked.adapter.keys() - {"rank"} else None
    )
    return client.create_model(
        base_model, rank=rank or RANK, seed=recipe.seed, adapter=kind, name=asked.name
    )


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


def _carry_out(client: Client, run: _TrainingRun, asked: TrainOptions) -> None:
    """Train, save, and print where the results are."""
    console = Console()
    view = view_of(console, steps=run.steps, done=run.next, as_json=asked.as_json)
    with _until_interrupted() as stop:
        with view:
            run.go(view, stop)
        is_whole = run.next == run.steps
        name = asked.save if is_whole else f"{asked.save}-step-{run.next}"
        path = _saved(run, name)
        exported = str(asked.export) if is_whole and asked.export else None
        if exported:
            client.download(path, exported)
    if asked.as_json:
        ended = {"checkpoint": path, "steps_done": run.next, "steps": run.steps}
        print_json_line({**ended, "export": exported})
    else:
        typer.echo(f"saved as {path}")
        if exported:
            typer.echo(f"the adapter is in {exported}")
        if is_whole:
            chat = shlex.join([this_command(), "chat", path, *asked.server])
            typer.echo(f"talk to it with: {chat}")
    if is_whole:
        return
    more = [] if asked.save == SAVED_AS else ["--save", asked.save]
    more += ["--export", str(asked.export)] if asked.export else []
    more += ["--map", asked.columns] if asked.columns else []
    more += ["--skip-bad"] if asked.skip_bad else []
    more += asked.server
    again = shlex.join([this_command(), "train", asked.data, "--resume", path, *more])
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
