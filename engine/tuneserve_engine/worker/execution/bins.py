"""The bins of a request, and the micro-batches that they make: pure Python.

A request alone decides which of its datums share a bin, and the order of its bins. Its neighbours
decide only the micro-batch of a bin.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tuneserve_engine.core.shapes import StaticShapes, multiple_from
from tuneserve_engine.worker.codecs.training import TrainingData


class Bin(NamedTuple):
    """Datums of one request that lie one after another, in blocks of their own.

    With ``part``, it is that part of the blocks of a datum that is divided among devices.
    """

    member: int
    datum_ids: tuple[int, ...]
    targets: int
    tokens: int  # of its blocks
    part: int | None = None
    skipped: int = 0  # tokens of the datum in earlier parts


def bins_of(member: int, data: TrainingData, static_shapes: StaticShapes) -> list[Bin]:
    """Return a request's datums, grouped by padded K and packed into bins.

    The longest datum goes first, each into the first bin that has room. The result depends on the
    request alone.
    """
    buckets: dict[int, list[int]] = {}
    for i, datum in enumerate(data.data):
        buckets.setdefault(static_shapes.target_bucket(datum.targets.shape[1]), []).append(i)
    bins = []
    for targets, datum_ids in buckets.items():
        groups: list[list[int]] = []
        sums: list[int] = []
        for i in sorted(datum_ids, key=lambda i: -len(data.data[i].tokens)):
            length = len(data.data[i].tokens)
            room = static_shapes.bin_tokens - length
            at = next((at for at, tokens in enumerate(sums) if tokens <= room), len(groups))
            if at == len(groups):
                groups.append([])
                sums.append(0)
            groups[at].append(i)
            sums[at] += length
        for group, tokens in zip(groups, sums, strict=True):
            padded = multiple_from(tokens, static_shapes.block)
            bin_ = Bin(member, tuple(group), targets, padded)
            is_divided = padded > static_shapes.micro_batch_tokens
            bins += _parts_of(bin_, static_shapes.part_tokens(padded)) if is_divided else [bin_]
    return bins


def _parts_of(bin_: Bin, each: int) -> list[Bin]:
    """Return the parts of a bin whose datum is divided among devices."""
    return [
        bin_._replace(tokens=min(each, bin_.tokens - skipped), part=part, skipped=skipped)
        for part, skipped in enumerate(range(0, bin_.tokens, each))
    ]


def micro_batches_of(bins: Sequence[Bin], room: int, *, has_gradients: bool) -> list[list[Bin]]:
    """Return the bins of each micro-batch.

    The bins of a request keep their order. A micro-batch without room for the next bin is closed; a
    bin longer than ``room`` is alone in its own. With gradients, a micro-batch has only one bin of
    the requests with several: their gradients are sums of their bins' gradients, and a slot takes
    one. Parts of divided datums come first, each in a micro-batch of its own.
    """
    counts = Counter(bin_.member for bin_ in bins)
    layout: list[list[Bin]] = []
    for targets in sorted({bin_.targets for bin_ in bins}):
        free = 0
        has_part = False  # whether the micro-batch has a bin of a request with several
        mine = [bin_ for bin_ in bins if bin_.targets == targets]
        layout += [[bin_] for bin_ in mine if bin_.part is not None]
        for bin_ in mine:
            if bin_.part is not None:
                continue
            is_part = has_gradients and counts[bin_.member] > 1
            if bin_.tokens > free or (is_part and has_part):
                layout.append([])
                free, has_part = room, False
            layout[-1].append(bin_)
            free -= bin_.tokens
            has_part |= is_part
    return layout


def paced_tokens(layout: Sequence[Sequence[Bin]], chunk: int, at_once: int) -> int:
    """Return the tokens that ``at_once`` devices could compute in the time of the layout."""

    def tokens(contents: Sequence[Bin]) -> int:
        return multiple_from(sum(bin_.tokens for bin_ in contents), chunk)

    return at_once * sum(max(map(tokens, due)) for due in _rounds_of(layout, at_once))


def _rounds_of(layout: Sequence[Sequence[Bin]], at_once: int) -> list[list[Sequence[Bin]]]:
    """Return the micro-batches that a backend runs at once."""
    rounds: list[list[Sequence[Bin]]] = []
    for contents in layout:
        first = contents[0]
        last = rounds[-1][0][0] if rounds else first
        begins = not rounds or len(rounds[-1]) == at_once or first.part == 0
        if begins or first.targets != last.targets or (first.part is None) != (last.part is None):
            rounds.append([])
        rounds[-1].append(contents)
    return rounds


def spread_out(
    layout: list[list[Bin]],
    spread: Callable[[int], list[list[Bin]]],
    chunk: int,
    at_once: int,
) -> list[list[Bin]]:
    """Return ``spread(room)`` with the least room that needs no more rounds than ``layout``."""
    longest = max(sum(bin_.tokens for bin_ in contents) for contents in layout)
    most = len(_rounds_of(layout, at_once))
    smaller = map(spread, range(chunk, longest, chunk))
    return next((each for each in smaller if len(_rounds_of(each, at_once)) <= most), layout)
