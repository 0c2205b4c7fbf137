"""The work of ``tuneserve train``: read the rows, train, save, and say how to go on."""

import json
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NoReturn

import typer
from rich.console import Console

from tuneserve_client import Adapter, Client, Model, RequestFailed, TuneserveError
from tuneserve_client.defaults import RANK
from tuneserve_client.runs import RunOutcome
from tuneserve_engine.core.errors import REFUSED
from tuneserve_server.cli.data.sources import NoSource
from tuneserve_server.cli.evaluation import Evaluation
from tuneserve_server.cli.options import PATIENT_S, connected
from tuneserve_server.cli.output import FAILED, INTERRUPTED, end, print_json_line, this_command
from tuneserve_server.cli.reporting import ReportedView, Reports
from tuneserve_server.cli.run_events import record_event, record_outcome
from tuneserve_server.cli.time_estimate import TimeEstimate
from tuneserve_server.cli.train_options import SAVED_AS, TrainOptions
from tuneserve_server.cli.train_plan import TrainPlan, plan_of
from tuneserve_server.cli.train_preview import Preview, shortened
from tuneserve_server.cli.train_rows import BadRows, Rows, read_rows
from tuneserve_server.cli.train_view import view_of
from tuneserve_server.cli.training_loop import TrainingLoop
from tuneserve_server.cli.verdict import Diverged, DivergenceWatch, Verdict

_SAVE_AGAIN_S = 15.0


def fine_tune(asked: TrainOptions) -> None:
    """Train as asked. Any failure ends the command with its reason."""
    try:
        rows = read_rows(
            asked.data,
            asked.renamed,
            config=asked.config,
            split=asked.split,
            skip_bad=asked.skip_bad,
        )
        with connected(asked.url, asked.api_key, deadline_s=PATIENT_S, name=asked.name) as client:
            _train(client, rows, asked)
    except NoSource as error:
        end(str(error), REFUSED)
    except BadRows as error:
        end(str(error), FAILED, keep_lines=True)
    except OSError as error:
        end(f"cannot read {asked.data}: {error.strerror}", FAILED)


def _train(client: Client, rows: Rows, asked: TrainOptions) -> None:
    """Show the rows and train on them."""
    plan = plan_of(client, rows, asked)
    if asked.dry_run or not asked.as_json:
        decoder = client.tokenizer(plan.base_model)
        shown = Preview.from_data(
            plan.rows,
            plan.data,
            decoder,
            steps=plan.steps,
            held_out=plan.held_out_count,
            time=TimeEstimate.of(client, plan.base_model, plan.tokens_left),
        )
        shown.show(Console(), as_json=asked.as_json)
    else:
        if rows.bad:
            typer.echo(f"bad rows skipped: {len(rows.bad)}", err=True)
        if rows.unused:
            typer.echo(f"columns not used: {shortened(rows.unused)}", err=True)
    if asked.dry_run:
        return
    model = _model(client, plan, asked)
    loop = TrainingLoop(model, plan.recipe, plan.data, plan.first, DivergenceWatch(plan.vocabulary))
    if plan.held_out is not None:
        loop.evaluation = Evaluation(client, model, plan.recipe, plan.held_out, asked.save)
        loop.evaluation.losses = plan.losses
    with Reports.begin(asked.report_to, asked.name, _config(plan, asked)) as reports:
        _carry_out(client, loop, asked, reports)


def _model(client: Client, plan: TrainPlan, asked: TrainOptions) -> Model:
    """Load or create the model. The server checks the options of its adapter."""
    about = {"config": json.dumps(_config(plan, asked))}
    if plan.resume:
        return client.load_model(plan.resume, name=asked.name, user_metadata=about)
    rank = asked.adapter.get("rank")
    kind = Adapter(**asked.adapter) if asked.adapter.keys() - {"rank"} else None
    return client.create_model(
        plan.base_model,
        rank=rank or RANK,
        train_unembed=asked.train_unembed,
        seed=plan.recipe.seed,
        adapter=kind,
        name=asked.name,
        user_metadata=about,
    )


def _config(plan: TrainPlan, asked: TrainOptions) -> dict[str, Any]:
    """Return what was asked for, as the run's page shows it."""
    known = {
        **asdict(plan.recipe),
        **asked.adapter,
        "data": asked.data,
        "data_config": asked.config,
        "data_split": asked.split,
        "data_digest": plan.recipe.data,
        "rows": len(plan.rows.rows),
        "held_out_rows": plan.held_out_count,
        # With another order of the rows, the steps begin anew, and the optimizer's go on.
        "steps": plan.steps if plan.first or not plan.resume else None,
        "train_unembed": None if asked.train_unembed else False,
        "resumed_from": plan.resume,
        "save": asked.save,
    }
    return {name: value for name, value in known.items() if value not in (None, ())}


def _carry_out(client: Client, run: TrainingLoop, asked: TrainOptions, reports: Reports) -> None:
    """Train, save, and print the verdict and where the results are."""
    shown = view_of(Console(), steps=run.steps, done=run.next, as_json=asked.as_json)
    view = ReportedView(shown, reports)
    with _until_interrupted() as stop:
        try:
            with view:
                run.go(view, stop)
        except Diverged as error:
            _end_diverged(client, run, error, as_json=asked.as_json)
        except TuneserveError:
            record_outcome(client, run.model.id, "failed")
            raise
        name = asked.save if run.is_whole else f"{asked.save}-step-{run.next}"
        path = _saved(run, name)
        exported = str(asked.export) if run.is_whole and asked.export else None
        if exported:
            client.download(path, exported)
    outcome: RunOutcome = "finished" if run.is_whole else "stopped"
    verdict = Verdict.on(outcome, run.losses, run.held_out, run.steps_per_epoch)
    _record(client, run, verdict)
    _tell(run, asked, verdict, path, exported)
    if run.is_whole:
        return
    more = [] if asked.save == SAVED_AS else ["--save", asked.save]
    more += ["--name", asked.name] if asked.is_named else []
    more += ["--export", str(asked.export)] if asked.export else []
    more += ["--force"] if asked.export and asked.force else []
    more += asked.part
    more += ["--map", asked.columns] if asked.columns else []
    more += ["--skip-bad"] if asked.skip_bad else []
    for tracker in asked.report_to:
        more += ["--report-to", tracker]
    more += asked.server
    again = shlex.join([this_command(), "train", asked.data, "--resume", path, *more])
    typer.echo(f"stopped after step {run.next} of {run.steps}; continue with: {again}", err=True)
    raise typer.Exit(INTERRUPTED)


def _tell(
    run: TrainingLoop, asked: TrainOptions, verdict: Verdict, path: str, exported: str | None
) -> None:
    """Print the verdict, the paths of the results, and how to talk to the model."""
    if asked.as_json:
        _print_end(run, verdict, path, exported)
        return
    typer.echo(f"saved as {path}")
    if exported:
        typer.echo(f"the adapter is in {exported}")
    if verdict.best_checkpoint:
        typer.echo(f"the best checkpoint is {verdict.best_checkpoint}")
    if run.is_early:
        typer.echo(
            f"stopped early, after step {run.next} of {run.steps}: no improvement in "
            f"{run.recipe.patience} evaluations"
        )
    typer.echo(f"verdict: {verdict.verdict}")
    if run.is_whole:
        chat = shlex.join([this_command(), "chat", path, *asked.server])
        typer.echo(f"talk to it with: {chat}")


def _print_end(
    run: TrainingLoop, verdict: Verdict, path: str | None, exported: str | None = None
) -> None:
    """Print the last line of the JSON output."""
    ended = {"checkpoint": path, "steps_done": run.next, "steps": run.steps, "export": exported}
    print_json_line({**ended, **verdict.fields})


def _end_diverged(client: Client, run: TrainingLoop, error: Diverged, *, as_json: bool) -> NoReturn:
    """End the command as failed. Weights that have diverged are not saved."""
    verdict = Verdict.on_diverged(error, run.recipe.learning_rate, run.held_out)
    _record(client, run, verdict)
    if as_json:
        _print_end(run, verdict, None)
    kept = (
        f"; the best checkpoint is {verdict.best_checkpoint}"
        if verdict.best_checkpoint
        else "; nothing was saved"
    )
    end(f"{verdict.verdict}{kept}", FAILED)


def _record(client: Client, run: TrainingLoop, verdict: Verdict) -> None:
    told = {name: value for name, value in verdict.fields.items() if name != "outcome"}
    record_event(client, run.model.id, "verdict", run.next, told)
    record_outcome(client, run.model.id, verdict.outcome)


def _saved(run: TrainingLoop, name: str) -> str:
    """Save the run as a checkpoint and return its path.

    If the tenant has no room for a checkpoint, the save is tried again until it succeeds. Otherwise
    the run would be lost.
    """
    while True:
        try:
            return run.model.save(name, user_metadata=run.metadata()).result()
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
