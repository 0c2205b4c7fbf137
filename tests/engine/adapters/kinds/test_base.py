"""The sizes of adapters and of the decomposition that some of them share, counted by hand."""

import numpy as np
import pytest

from tuneserve_engine.adapters.kinds.base import (
    SvdFactors,
    adapter_bytes,
    decomposition_bytes,
    decomposition_shapes,
    mask_size,
    parameters,
)
from tuneserve_engine.adapters.kinds.lora import Lora
from tuneserve_engine.core.adapter import AdapterConfig

SHAPES = {"q_proj": (2, 3, 5), "unembed": (3, 7)}
"""[L, D, F]: two layers of 3 inputs and 5 outputs."""


def test_the_lowest_directions_beyond_the_adapters_own_rank_are_zero() -> None:
    u = np.array([[[1, 2], [3, 4], [5, 6]]], np.float32)
    v = np.array([[[7, 8, 9], [1, 2, 3], [4, 5, 6]]], np.float32)
    s = np.array([[1, 2, 3]], np.float32)
    lowest = SvdFactors(u, s, v, np.array([1, 0, 0], np.float32)).lowest(2)
    np.testing.assert_array_equal(lowest[0], [[[1, 2], [0, 0]]])
    np.testing.assert_array_equal(lowest[1], [[1, 0]])
    np.testing.assert_array_equal(lowest[2], [[[7, 8, 9], [0, 0, 0]]])


def test_parameters_are_counted_over_the_targets_of_the_configuration() -> None:
    config = AdapterConfig(2, 1.0, 0, train_mlp=False, train_unembed=False)
    shapes = dict.fromkeys(config.targets, (2, 3, 5))
    # Four targets of two layers: A has 3 * 2 numbers, B has 2 * 5.
    assert parameters(Lora(), config, shapes) == 4 * 2 * (6 + 10)


def test_an_adapter_has_its_weights_two_moments_and_a_gradient_in_float32() -> None:
    # At rank 4, A and B of q_proj have 2 * 4 * (3 + 5) numbers, those of unembed 4 * (3 + 7).
    assert adapter_bytes(Lora(), SHAPES, 4) == 4 * (3 + 1) * (64 + 40)


@pytest.mark.parametrize(
    ("shape", "u", "v", "kept"),
    [
        ((2, 6, 4), (2, 3, 4), (2, 4, 6), 4),  # v is longer, and has all four directions
        ((2, 4, 6), (2, 4, 6), (2, 3, 4), 4),
        ((1, 4, 4), (1, 3, 4), (1, 3, 4), 3),
        ((1, 2, 9), (1, 3, 9), (1, 3, 2), 3),  # padded to the highest rank
    ],
)
def test_the_longer_factor_has_all_directions(
    shape: tuple[int, ...], u: tuple[int, ...], v: tuple[int, ...], kept: int
) -> None:
    shapes = decomposition_shapes(shape, 3)
    assert shapes == {"u": u, "s": (shape[0], 3), "v": v}
    assert mask_size(shapes) == kept


def test_a_weight_without_layers_is_not_decomposed() -> None:
    assert decomposition_shapes((3, 7), 2) == {}


def test_the_bytes_of_a_decomposition_are_those_of_all_layers() -> None:
    # At rank 2: u has 2 * 3 * 5 numbers, s 2 * 2 and v 2 * 2 * 3.
    assert decomposition_bytes(SHAPES, 2) == 4 * (30 + 4 + 12)
