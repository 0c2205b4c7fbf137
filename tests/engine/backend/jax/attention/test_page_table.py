"""The number of pages of a round and of a table's row."""

import pytest

from tuneserve_engine.backend.jax.attention.page_table import pages_per_round, table_width


def test_a_cpu_takes_a_page_per_round_and_other_devices_take_four() -> None:
    assert [pages_per_round(kind) for kind in ("cpu", "gpu", "tpu")] == [1, 4, 4]


@pytest.mark.parametrize(
    ("positions", "page", "width"),
    [(0, 64, 0), (1, 64, 4), (256, 64, 4), (257, 64, 8), (4096, 64, 64), (9, 2, 8)],
)
def test_a_row_of_the_table_holds_whole_rounds(positions: int, page: int, width: int) -> None:
    assert table_width(positions, page) == width
