"""``tuneserve train``: supervised fine-tuning of one adapter on rows of data."""

from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from tuneserve_client.defaults import RANK
from tuneserve_engine.core.errors import REFUSED, UserError
from tuneserve_server.checkpoint_names import check_name
from tuneserve_server.cli.checkpoints import check_export
from tuneserve_server.cli.data.sources import NoSource, check_exists
from tuneserve_server.cli.options import HERE, ApiKey, AsJson, Force, Url
from tuneserve_server.cli.output import end
from tuneserve_server.cli.train_options import SAVED_AS, Tracker, TrainOptions, check_trackers

_LONGEST_SUFFIX = "-step-9999999"


def train(  # noqa: PLR0913 - options
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="JSONL, JSON, CSV or Parquet file; dataset directory or hub id."
        ),
    ],
    config: Annotated[
        str | None,
        typer.Option(help="Configuration of the dataset DATA.", metavar="NAME"),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Split of the dataset DATA. Default: train.", metavar="NAME"),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(help="Base model. Default: the only one of the server.", metavar="NAME"),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=1, help=f"Rank of the adapter. Default: {RANK}.")
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(help="Kind of adapter: lora, rslora or osft. Default: lora.", metavar="KIND"),
    ] = None,
    train_unembed: Annotated[
        bool | None,
        typer.Option(
            "--train-unembed/--no-train-unembed",
            help="Train the LM head too. Many inference servers refuse such an adapter. "
            "Default: yes.",
        ),
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
    eval_split: Annotated[
        str | None,
        typer.Option(
            help="Share of the rows to hold out, such as 0.05, or a split of the dataset, such as "
            "test. These rows are never trained on, so their loss shows whether the model improves "
            "on other text.",
            metavar="SHARE|NAME",
        ),
    ] = None,
    eval_file: Annotated[
        str | None,
        typer.Option(
            help="Held-out rows from elsewhere, in the forms of DATA. For a dataset, --eval-split "
            "names the split.",
            metavar="DATA",
        ),
    ] = None,
    eval_config: Annotated[
        str | None,
        typer.Option(
            help="Configuration of the dataset of held-out rows. Default: --config, for a split of "
            "DATA.",
            metavar="NAME",
        ),
    ] = None,
    eval_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps between evaluations. Default: about ten evaluations in a run, and always "
            "before the first and after the last step.",
        ),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            min=1, help="Evaluations without a better held-out loss after which the run ends."
        ),
    ] = None,
    sample_prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompt to continue at each evaluation; repeat it for more. Default: the prompts "
            "of the first two held-out rows.",
            metavar="TEXT",
        ),
    ] = None,
    sample_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each of these samples. Default: 64.")
    ] = None,
    save: Annotated[str, typer.Option(help="Name of the checkpoint.", metavar="NAME")] = SAVED_AS,
    export: Annotated[
        Path | None,
        typer.Option(help="Directory to write the adapter to, for PEFT.", metavar="DIR"),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint or run to continue from: path, name, start of the id, or last.",
            metavar="PATH",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the run. Default: train and the file's name.", metavar="NAME"),
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
    report_to: Annotated[
        list[Tracker] | None,
        typer.Option(help="Tracker that gets the curves too; repeat it for more."),
    ] = None,
    force: Force = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the data, and train nothing.")
    ] = False,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune an adapter on conversations, prompts and completions, instructions, or texts."""
    given = {"kind": adapter, "unfreeze_ratio": unfreeze_ratio, "form": form}
    kind = {field: value for field, value in given.items() if value is not None}
    if resume and (base_model or rank or kind or train_unembed is not None):
        end(
            "--base-model, --rank, --adapter and its options come from the checkpoint; leave them "
            "out with --resume",
            REFUSED,
        )
    _check_save(save)
    if export and not dry_run:
        check_export(export, force=force)
    check_trackers(report_to or ())
    held_out = _placed(_held_out(eval_split, eval_file, eval_config), data, config, split)
    if learning_rate is not None and not (learning_rate >= 0 and isfinite(learning_rate)):
        end(f"--learning-rate is {learning_rate:g}; it must be 0 or more, and finite", REFUSED)
    try:
        check_exists(data)
    except NoSource as error:
        end(str(error), REFUSED)
    recipe: dict[str, Any] = {
        "seed": seed,
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "max_tokens": max_tokens,
        **held_out,
        "eval_every": eval_every,
        "patience": patience,
        "sample_prompts": tuple(sample_prompt) if sample_prompt else None,
        "sample_tokens": sample_tokens,
    }
    from tuneserve_server.cli.training_run import fine_tune  # it takes long to import

    fine_tune(
        TrainOptions(
            data=data,
            name=name or f"train {Path(data).name}",
            is_named=name is not None,
            base_model=base_model,
            adapter=kind | ({} if rank is None else {"rank": rank}),
            train_unembed=train_unembed is not False,
            resume=resume,
            recipe=recipe,
            save=save,
            export=export,
            force=force,
            columns=columns,
            skip_bad=skip_bad,
            report_to=tuple(dict.fromkeys(report_to or ())),
            dry_run=dry_run,
            url=url,
            api_key=api_key,
            as_json=as_json,
            config=config,
            split=split,
        )
    )


def _check_save(name: str) -> None:
    """End the command now if ``name`` is unfit for the checkpoint of a full or interrupted run."""
    try:
        check_name("--save", name)
        check_name("--save plus the suffix of an interrupted run", name + _LONGEST_SUFFIX)
    except UserError as error:
        end(str(error), REFUSED)


def _held_out(split: str | None, file: str | None, config: str | None) -> dict[str, Any]:
    """Return the fields of the recipe for the held-out rows that were asked for.

    Ends the command now if there can be none such.
    """
    if split is not None and not split.strip():
        end("--eval-split is empty; give a share, such as 0.05, or the name of a split", REFUSED)
    share = _number(split)
    if share is not None and file is not None:
        end("--eval-split and --eval-file both name held-out rows; leave one out", REFUSED)
    if share is not None and not 0 < share < 1:
        end(f"--eval-split is {share:g}; it must be above 0 and below 1, such as 0.05", REFUSED)
    name = split if share is None else None
    if config and not (file or name):
        end("--eval-config needs --eval-file, or the name of a split as --eval-split", REFUSED)
    if file is not None:
        try:
            check_exists(file)
        except NoSource as error:
            end(f"--eval-file: {error}", REFUSED)
    return {
        "eval_split": share,
        "eval_file": file,
        "eval_file_config": config,
        "eval_file_split": name,
    }


def _placed(
    held_out: dict[str, Any], data: str, config: str | None, split: str | None
) -> dict[str, Any]:
    """Return the fields with the file of the held-out rows; a split without one is DATA's.

    Ends the command if the split is the one to train on.
    """
    file, name = held_out["eval_file"], held_out["eval_file_split"]
    if name and file is None:
        file = data
        held_out = {**held_out, "eval_file_config": held_out["eval_file_config"] or config}
        if (held_out["eval_file_config"], name) == (config, split or "train"):
            end(f"--eval-split {name} is the split to train on; name another one", REFUSED)
    return {**held_out, "eval_file": _lasting(file)}


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _lasting(data: str | None) -> str | None:
    """Return the data's name as a run that resumes in another folder finds them."""
    return str(Path(data).absolute()) if data and Path(data).exists() else data
