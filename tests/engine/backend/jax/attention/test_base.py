"""The keys that each token of a packed sequence sees, by hand."""

import jax.numpy as jnp
import numpy as np

from tuneserve_engine.backend.jax.attention.base import (
    Visibility,
    next_window,
    sees_window,
    windows,
)

SEEN = Visibility(
    segment_ids=jnp.array([[0, 0, 1, 1], [1, -1, -1, -1]], jnp.int32),
    position=jnp.array([[0, 1, 0, 1], [2, 0, 0, 0]], jnp.int32),
    start=jnp.array([0, 0], jnp.int32),
    blocks=jnp.int32(2),
)
"""Two blocks of four tokens: a datum of two tokens, a datum of three, and padding."""


def test_a_token_sees_its_datum_up_to_itself_and_padding_sees_its_block() -> None:
    found = windows(SEEN)
    assert np.asarray(found.first).tolist() == [[0, 0, 2, 2], [2, 5, 5, 5]]
    assert np.asarray(found.last).tolist() == [[0, 1, 2, 3], [4, 7, 7, 7]]
    assert np.asarray(found.end).tolist() == [[2, 2, 4, 4], [5, 8, 8, 8]]


def test_only_the_first_datum_of_a_window_of_keys_is_seen() -> None:
    second = type(windows(SEEN))(*(x[1] for x in windows(SEEN)))
    of_datum = np.asarray(sees_window(second, jnp.int32(2)))
    assert of_datum.tolist() == [[True, True, True, False], *[[False] * 4] * 3]
    of_padding = np.asarray(sees_window(second, jnp.int32(5)))
    assert of_padding.tolist() == [[False] * 4, *[[True, True, True, False]] * 3]


def test_the_next_window_starts_with_the_next_datum() -> None:
    end = windows(SEEN).end
    assert int(next_window(end, jnp.int32(0), 0)) == 2
    assert int(next_window(end, jnp.int32(2), 0)) == 4
    assert int(next_window(end, jnp.int32(2), 1)) == 5
    assert int(next_window(end, jnp.int32(5), 1)) == 8
