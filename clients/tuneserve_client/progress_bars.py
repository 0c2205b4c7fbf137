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
    """A progress bar around the items; ``show`` displays values beside the bar.

    No bar is drawn without a terminal, unless ``shown`` is True.
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
    """Return the results of all futures in order, with a progress bar. Raises the first error."""
    for future in futures:
        future.done()  # starts to fetch every result
    return [future.result() for future in progress(futures, description, shown=shown)]
