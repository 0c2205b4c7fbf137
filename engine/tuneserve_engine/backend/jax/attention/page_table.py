"""How pages of keys and values are counted. Needs no JAX: plans are made without it."""

_MOST_PAGES_PER_ROUND = 4


UNUSED_PAGE = 0
"""The page of no sequence, which idle rows and the padding of tables read and write."""


def pages_per_round(device_kind: str) -> int:
    """Return how many pages of every row attention takes per round.

    The pages gathered in a round should stay in a CPU's cache: for 64 rows, four pages are 3 times
    as slow as one. Elsewhere a round costs a few kernel launches.
    """
    return 1 if device_kind == "cpu" else _MOST_PAGES_PER_ROUND


def table_width(positions: int, page: int) -> int:
    """Return the table entries of a sequence of ``positions``: whole rounds, on any device."""
    return -(-positions // (page * _MOST_PAGES_PER_ROUND)) * _MOST_PAGES_PER_ROUND
