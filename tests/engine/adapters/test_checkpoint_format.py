"""The metadata of adapter files, and the initial numbers of an adapter."""

import json

import numpy as np
import pytest

from tuneserve_engine.adapters.checkpoint_format import (
    FORMAT,
    config_in,
    initial_a,
    initial_layers,
    metadata_of,
)
from tuneserve_engine.core.adapter import AdapterConfig

CONFIG = AdapterConfig(3, 16.0, 7, train_mlp=False, kind="osft", options={"form": "core"})


def test_a_configuration_survives_its_metadata() -> None:
    metadata = metadata_of(CONFIG, "base", 4)
    assert {name: metadata[name] for name in ("format", "base_model", "step")} == {
        "format": FORMAT,
        "base_model": "base",
        "step": "4",
    }
    assert config_in(metadata) == CONFIG
    assert "base_model_revision" not in metadata
    assert metadata_of(CONFIG, "base", 4, "abc")["base_model_revision"] == "abc"


@pytest.mark.parametrize("rank", [0, -1, "3", None])
def test_a_rank_that_is_not_a_positive_number_is_refused(rank: object) -> None:
    metadata = metadata_of(CONFIG, "base", 0)
    changed = json.dumps(json.loads(metadata["config"]) | {"rank": rank})
    with pytest.raises(ValueError):
        config_in(metadata | {"config": changed})


def test_initial_numbers_are_uniform_within_a_root_of_the_inputs() -> None:
    """Of 100 inputs the bound is a tenth, and the mean of uniform squares is a third of a square.

    The seed and the number of the target decide the numbers.
    """
    a = initial_a(7, 2, (4, 100, 50))
    assert (a.dtype, a.shape) == (np.float32, (4, 100, 50))
    assert 0.099 < np.abs(a).max() <= 0.1
    assert np.mean(a**2) == pytest.approx(0.01 / 3, rel=0.03)
    np.testing.assert_array_equal(a, initial_a(7, 2, (4, 100, 50)))
    for seed, index in ((8, 2), (7, 1)):
        assert not np.any(a == initial_a(seed, index, (4, 100, 50)))


def test_numbers_drawn_layer_by_layer_are_the_same() -> None:
    layers = list(initial_layers(7, 2, (4, 10, 5)))
    np.testing.assert_array_equal(np.stack(layers), initial_a(7, 2, (4, 10, 5)))
