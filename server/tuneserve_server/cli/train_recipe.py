"""The recipe of a training run's steps, so that a run can resume from one of its checkpoints."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeVar

from tuneserve_client.defaults import LEARNING_RATE
from tuneserve_client.wire.run_types import MOST_EVENTS

T = TypeVar("T")

SAMPLE_TOKENS = 64

_MARK = "tuneserve_train_"
_EVALUATIONS = 10
"""The number of evaluations between the first and the last step, unless the user says more."""
_RECORDED = MOST_EVENTS // 2
_REQUIRED: Mapping[str, Callable[[str], Any]] = {
    "data": str,
    "seed": int,
    "epochs": int,
    "batch_size": int,
    "learning_rate": float,
}
_OPTIONAL: Mapping[str, Callable[[str], Any]] = {
    "max_tokens": int,
    "eval_split": float,
    "eval_file": str,
    "eval_file_config": str,
    "eval_file_split": str,
    "eval_data": str,
    "eval_every": int,
    "patience": int,
    "sample_prompts": lambda text: tuple(json.loads(text)),
    "sample_tokens": int,
}


@dataclass(frozen=True)
class Recipe:
    """The options that determine every step of a training run.

    The seed determines the order of every epoch. The learning rate falls linearly and reaches zero
    after the last step.
    """

    data: str
    """The digest of the data file."""
    seed: int = 0
    epochs: int = 1
    batch_size: int = 8
    learning_rate: float = LEARNING_RATE
    max_tokens: int | None = None
    """The length at which longer rows are cut; None refuses rows longer than the context."""
    eval_split: float | None = None
    """The share of the rows that is held out; None holds none of them out."""
    eval_file: str | None = None
    """The source of held-out rows, in place of a share of the data."""
    eval_file_config: str | None = None
    """The configuration of the dataset ``eval_file``; None if it has only one."""
    eval_file_split: str | None = None
    """The split of the dataset ``eval_file``; None for ``train``."""
    eval_data: str | None = None
    """The digest of ``eval_file``."""
    eval_every: int | None = None
    """The number of steps between evaluations; None evaluates about ten times in a run."""
    patience: int | None = None
    """The number of evaluations without improvement after which the run ends; None for no end."""
    sample_prompts: tuple[str, ...] = ()
    """Texts that are continued at each evaluation; empty for those of two held-out rows."""
    sample_tokens: int = SAMPLE_TOKENS

    def steps(self, count: int) -> int:
        """Return the number of steps of all epochs over ``count`` datums."""
        return self.epochs * self.steps_per_epoch(count)

    def epoch(self, step: int, count: int) -> int:
        """Return the epoch of a step; epochs count from 1, steps from 0."""
        return step // self.steps_per_epoch(count) + 1

    def batch(self, step: int, data: Sequence[T]) -> list[T]:
        epoch, place = divmod(step, self.steps_per_epoch(len(data)))
        order = list(range(len(data)))
        random.Random(f"{self.seed}:{epoch}").shuffle(order)
        first = place * self.batch_size
        return [data[each] for each in order[first : first + self.batch_size]]

    def rate(self, step: int, count: int) -> float:
        return self.learning_rate * (1 - step / self.steps(count))

    @property
    def evaluates(self) -> bool:
        """Return whether there are held-out rows."""
        return self.eval_split is not None or self.eval_file is not None

    def is_evaluated(self, step: int, steps: int) -> bool:
        """Return whether the held-out loss is computed when ``step`` of ``steps`` are done."""
        return self.evaluates and (step % self._every(steps) == 0 or step == steps)

    def is_recorded(self, step: int, steps: int) -> bool:
        """Return whether the samples of this evaluation are stored with the run.

        If there are very many evaluations, only some of them are stored: the server keeps a limited
        number of events.
        """
        every = self._every(steps)
        return step == steps or step // every % (1 + steps // (every * _RECORDED)) == 0

    def _every(self, steps: int) -> int:
        return self.eval_every or max(1, round(steps / _EVALUATIONS))

    def steps_per_epoch(self, count: int) -> int:
        """Return the number of steps of one epoch over ``count`` datums."""
        return -(-count // self.batch_size)

    # --- in a checkpoint --------------------------------------------------------------------------

    def metadata(self, step: int) -> dict[str, str]:
        """Return the metadata of a checkpoint for the recipe and its next step."""
        known = {**asdict(self), "step": step}
        known["sample_prompts"] = json.dumps(self.sample_prompts) if self.sample_prompts else None
        return {f"{_MARK}{name}": str(value) for name, value in known.items() if value is not None}

    @classmethod
    def remembered(cls, metadata: Mapping[str, str]) -> tuple[Self, int] | None:
        """Return a checkpoint's recipe and its next step; None if no such run made it."""
        try:
            known = {
                name.removeprefix(_MARK): value
                for name, value in metadata.items()
                if name.startswith(_MARK)
            }
            fields = {name: read(known[name]) for name, read in _REQUIRED.items()}
            fields |= {name: read(known[name]) for name, read in _OPTIONAL.items() if name in known}
            return cls(**fields), int(known["step"])
        except (KeyError, ValueError):
            return None

    def changed(self, given: Mapping[str, Any]) -> Self:
        """Return the recipe with the options that are given (not None) replaced.

        The two sources of held-out rows replace each other.
        """
        new = {name: v for name, v in given.items() if v is not None}
        part = {"eval_file_config": None, "eval_file_split": None}
        if "eval_split" in new:
            new |= {"eval_file": None, "eval_data": None, **part}
        elif "eval_file" in new:
            new = {"eval_split": None, **part, **new}
        return replace(self, **new)

    def has_order_of(self, other: "Recipe") -> bool:
        """Return whether the steps of both recipes have the same batches."""
        mine, theirs = (
            (r.data, r.seed, r.batch_size, r.max_tokens, r.eval_split) for r in (self, other)
        )
        return mine == theirs

    def has_held_out_of(self, other: "Recipe") -> bool:
        """Return whether the held-out losses of both recipes can be compared."""
        mine, theirs = (
            (r.eval_split, r.eval_data, r.max_tokens, (r.data, r.seed) if r.eval_split else None)
            for r in (self, other)
        )
        return mine == theirs
