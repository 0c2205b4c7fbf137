"""Progress bars, for terminals and notebooks.

>>> [number * 2 for number in progress(range(3), "doubling", shown=False)]
[0, 2, 4]
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from tqdm.auto import tqdm

from tuneserve_client.sync import Future

T = TypeVar("T")


class progress(Generic[T]):
    """Goes through the items and shows how far it is; ``show`` puts figures beside the bar.

    Nothing is drawn where nobody looks (no terminal), unless ``shown`` says so.
    """

    def __init__(
        self, items: Iterable[T], description: str = "", *, shown: bool | None = None
    ) -> None:
        self._bar = tqdm(items, desc=description, disable=None if shown is None else not shown)

    def __iter__(self) -> Iterator[T]:
        return iter(self._bar)

    def show(self, **figures: float | str) -> None:
        self._bar.set_postfix(figures)


def gather(
    futures: Sequence[Future[T]], description: str = "", *, shown: bool | None = None
) -> list[T]:
    """The results of all futures in their order, with a bar while they come. Raises the first
    error."""
    for future in futures:
        future.done()  # all are asked for from now on
    return [future.result() for future in progress(futures, description, shown=shown)]
