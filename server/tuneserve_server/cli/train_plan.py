"""The plan of a training run: its recipe, its rows as datums, and the place where it begins."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import typer

from tuneserve_client import Client, Datum
from tuneserve_client.paths import split_path
from tuneserve_client.wire.tokenizer import Tokenizer
from tuneserve_engine.core.errors import REFUSED
from tuneserve_server.cli.data.sources import NoSource, check_exists
from tuneserve_server.cli.evaluation import HeldOutData, losses_in
from tuneserve_server.cli.held_out import SamplePrompt, encoded_prompt, prompt_in, split
from tuneserve_server.cli.output import FAILED, end
from tuneserve_server.cli.resolve import checkpoint_path
from tuneserve_server.cli.train_options import TrainOptions
from tuneserve_server.cli.train_recipe import Recipe
from tuneserve_server.cli.train_rows import Rows, encode, read_rows
from tuneserve_server.cli.verdict import HeldOut

_PROMPTS = 2
"""The number of held-out rows whose prompts are continued, unless the user gives prompts."""
_NEED_EVALUATION = {
    "eval_every": "--eval-every",
    "patience": "--patience",
    "sample_prompts": "--sample-prompt",
    "sample_tokens": "--sample-tokens",
}


@dataclass(frozen=True)
class TrainPlan:
    """A run that can start."""

    recipe: Recipe
    first: int
    """The first step, 0 unless the run resumes."""
    base_model: str
    resume: str | None
    rows: Rows
    data: list[Datum]
    held_out: HeldOutData | None
    losses: HeldOut | None
    """The held-out losses of the run that is resumed."""
    vocabulary: int

    @property
    def steps(self) -> int:
        return self.recipe.steps(len(self.data))

    @property
    def tokens_left(self) -> int:
        """The number of tokens that the run trains on, in all epochs, from its first step on."""
        tokens = self.recipe.epochs * sum(map(len, self.data))
        return round(tokens * (self.steps - self.first) / self.steps)

    @property
    def held_out_count(self) -> int:
        return self.held_out.rows if self.held_out else 0


def plan_of(client: Client, rows: Rows, asked: TrainOptions) -> TrainPlan:
    """Return the plan of the run that was asked for.

    Ends the command if the run cannot start. Raises ``BadRows``, ``NoSource`` and ``ValueError``.
    """
    resume = checkpoint_path(client, asked.resume, training=True) if asked.resume else None
    metadata = _metadata_of(client, resume) if resume else {}
    known, losses = Recipe.remembered(metadata), losses_in(metadata)
    recipe, first = _recipe(Recipe(rows.digest), asked.recipe, known)
    held_rows = _read_held_out(recipe, asked)
    if held_rows:
        recipe = replace(recipe, eval_data=held_rows.digest)
    is_same = known is not None and recipe.has_held_out_of(known[0])
    if not (is_same and first):
        losses = None
    if resume and recipe.eval_split is not None and not is_same:
        typer.echo(f"{resume} may have been trained on the rows that are now held out", err=True)
    if recipe.eval_split is not None:
        rows, held_rows = split(rows, recipe.eval_split, recipe.seed)
    base_model = client.checkpoint_info(resume).base_model if resume else asked.base_model
    base_model = base_model or _only_base_model(client)
    limit = _limit(client, base_model, recipe.max_tokens)
    tokenizer = client.tokenizer(base_model)
    data = encode(rows, tokenizer, limit=limit, cut=recipe.max_tokens is not None)
    plan = TrainPlan(
        recipe=recipe,
        first=first,
        base_model=base_model,
        resume=resume,
        rows=rows,
        data=data,
        held_out=_held_out(recipe, held_rows, tokenizer, limit) if held_rows else None,
        losses=losses,
        vocabulary=max(2, tokenizer.vocab_size),
    )
    if held_rows and recipe.eval_file and held_rows.bad:
        typer.echo(f"bad held-out rows skipped: {len(held_rows.bad)}", err=True)
    _check_goes_on(plan)
    return plan


def _recipe(
    fresh: Recipe, given: Mapping[str, Any], known: tuple[Recipe, int] | None
) -> tuple[Recipe, int]:
    """Return the recipe of the run, and its first step.

    A resumed run has the ``known`` recipe, with the options that were given replaced. With other
    data, or another order of the rows, it starts from the first step.
    """
    recipe, first = fresh.changed(given), 0
    if known is not None:
        recipe = known[0].changed({**given, "data": fresh.data})
        if recipe.has_order_of(known[0]):
            first = known[1]
        else:
            typer.echo(
                "the data or their order differ from the checkpoint's: starting at row 1", err=True
            )
    for name, option in _NEED_EVALUATION.items():
        if given.get(name) is not None and not recipe.evaluates:
            end(f"{option} needs held-out rows: give --eval-split 0.05 or --eval-file", REFUSED)
    return recipe, first


def _check_goes_on(plan: TrainPlan) -> None:
    """End the command if the run that is resumed has come to its end."""
    if plan.first >= plan.steps:
        end(f"{plan.resume} is at the end of this run already; raise --epochs", REFUSED)
    patience, losses = plan.recipe.patience, plan.losses
    if patience and losses and losses.since_best >= patience:
        end(
            f"{plan.resume} stopped after {losses.since_best} evaluations without improvement; "
            f"raise --patience, now {patience}",
            REFUSED,
        )


def _metadata_of(client: Client, path: str) -> Mapping[str, str]:
    model_id, _, _ = split_path(path)
    found = [each for each in client.checkpoints(model_id) if each.tinker_path == path]
    return (found[0].user_metadata or {}) if found else {}


def _read_held_out(recipe: Recipe, asked: TrainOptions) -> Rows | None:
    """Return the rows of the recipe's file of held-out rows, if it has one."""
    if recipe.eval_file is None:
        return None
    try:
        check_exists(recipe.eval_file)
        return read_rows(
            recipe.eval_file,
            asked.renamed,
            config=recipe.eval_file_config,
            split=recipe.eval_file_split,
            skip_bad=asked.skip_bad,
        )
    except NoSource as error:
        split = recipe.eval_file_split
        end(f"{f'--eval-split {split}' if split else '--eval-file'}: {error}", REFUSED)
    except OSError as error:
        end(f"--eval-file: cannot read {recipe.eval_file}: {error.strerror}", FAILED)


def _held_out(recipe: Recipe, rows: Rows, tokenizer: Tokenizer, limit: int) -> HeldOutData:
    """Return the held-out rows as datums, and the prompts that are continued."""
    data = encode(rows, tokenizer, limit=limit, cut=recipe.max_tokens is not None)
    as_chat = bool(rows.rows[0].messages)
    prompts = [
        SamplePrompt(encoded_prompt(each, tokenizer, as_chat=as_chat), each)
        for each in recipe.sample_prompts
    ] or [prompt_in(each, rows.rows[:_PROMPTS], tokenizer) for each in data[:_PROMPTS]]
    longest = limit - min(recipe.sample_tokens, limit // 2)  # the context has room for both
    cut = [replace(each, tokens=each.tokens[-longest:]) for each in prompts]
    return HeldOutData(len(rows.rows), data, cut)


def _only_base_model(client: Client) -> str:
    names = [each.model_name for each in client.base_models()]
    if len(names) != 1:
        raise ValueError(f"this server has {', '.join(names)}; choose one with --base-model")
    return names[0]


def _limit(client: Client, base_model: str, max_tokens: int | None) -> int:
    """Return the largest number of tokens of a row."""
    known = {each.model_name: each.max_context_length for each in client.base_models()}
    if base_model not in known:
        raise ValueError(
            f"base model {base_model!r} is not served here; this server has {', '.join(known)}"
        )
    return min(each for each in (max_tokens, known[base_model], 2**31) if each)
