"""The recipe of a training run's steps, so that a run can resume from one of its checkpoints."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeVar

from tuneserve_client.defaults import LEARNING_RATE

T = TypeVar("T")

_MARK = "tuneserve_train_"


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

    def steps(self, count: int) -> int:
        """Return the number of steps of all epochs over ``count`` datums."""
        return self.epochs * self._of_epoch(count)

    def epoch(self, step: int, count: int) -> int:
        """Return the epoch of a step; epochs count from 1, steps from 0."""
        return step // self._of_epoch(count) + 1

    def batch(self, step: int, data: Sequence[T]) -> list[T]:
        epoch, place = divmod(step, self._of_epoch(len(data)))
        order = list(range(len(data)))
        random.Random(f"{self.seed}:{epoch}").shuffle(order)
        first = place * self.batch_size
        return [data[each] for each in order[first : first + self.batch_size]]

    def rate(self, step: int, count: int) -> float:
        return self.learning_rate * (1 - step / self.steps(count))

    def _of_epoch(self, count: int) -> int:
        return -(-count // self.batch_size)

    # --- in a checkpoint --------------------------------------------------------------------------

    def metadata(self, step: int) -> dict[str, str]:
        """Return the metadata of a checkpoint for the recipe and its next step."""
        known = {**asdict(self), "step": step}
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
            numbers = {name: int(known[name]) for name in ("seed", "epochs", "batch_size")}
            if "max_tokens" in known:
                numbers["max_tokens"] = int(known["max_tokens"])
            rate = float(known["learning_rate"])
            return cls(known["data"], **numbers, learning_rate=rate), int(known["step"])
        except (KeyError, ValueError):
            return None

    def changed(self, given: Mapping[str, Any]) -> Self:
        """Return the recipe with the options that are given (not None) replaced."""
        return replace(self, **{name: v for name, v in given.items() if v is not None})

    def has_order_of(self, other: "Recipe") -> bool:
        """Return whether the steps of both recipes have the same batches."""
        mine, theirs = ((r.data, r.seed, r.batch_size, r.max_tokens) for r in (self, other))
        return mine == theirs
