"""An adapter in host memory or in a spill file, and the copies that are made of its state."""

from pathlib import Path

import numpy as np
import pytest

from tuneserve_engine.adapters.state import AdapterState, Tensors
from tuneserve_engine.backend.jax.adapters.cached_adapter import (
    CachedAdapter,
    part_of_state,
    resumable_copy,
)
from tuneserve_engine.backend.jax.adapters.spill_files import SpillFile
from tuneserve_engine.core.adapter import AdapterConfig

CONFIG = AdapterConfig(rank=2, alpha=1.0, seed=0)


def tensors(value: float) -> Tensors:
    return {"q_proj.A": np.full((1, 3, 2), value, np.float32)}


STEPPED = AdapterState(CONFIG, tensors(1), 7, tensors(2), tensors(3), tensors(4))


def values(found: Tensors) -> list[float]:
    """The number in every place of each tensor."""
    return [float(np.unique(each).item()) for each in found.values()]


def test_the_bytes_in_host_memory_are_those_of_all_tensors() -> None:
    adapter = CachedAdapter(CONFIG, rank_bucket=8, device_bytes=100)
    adapter.keep(STEPPED)
    assert adapter.host_bytes == 4 * 6 * 4  # four groups of six float32 numbers
    assert adapter.stored() is STEPPED


def test_a_state_is_read_back_from_the_file_which_goes_when_it_is_forgotten(
    tmp_path: Path,
) -> None:
    file = SpillFile.write(tmp_path / "1", STEPPED)
    adapter = CachedAdapter(CONFIG, rank_bucket=8, device_bytes=100, file=file)
    found = adapter.stored()
    assert (found.config, found.step) == (CONFIG, 7)
    assert values(found.weights) + values(found.accumulator) == [1, 4]
    adapter.discard()
    assert adapter.file is None and list(tmp_path.iterdir()) == []


def test_an_adapter_that_is_nowhere_has_no_state() -> None:
    with pytest.raises(AssertionError, match="on its way"):
        CachedAdapter(CONFIG, rank_bucket=8, device_bytes=100).stored()


def test_a_resumable_copy_has_the_optimizer_only_after_a_step() -> None:
    whole = resumable_copy(STEPPED)
    assert whole.step == 7
    assert [values(each) for each in (whole.first_moment, whole.second_moment)] == [[2], [3]]
    assert values(whole.accumulator) == [4]
    fresh = resumable_copy(AdapterState(CONFIG, tensors(1), 0, tensors(2), tensors(3)))
    assert (fresh.step, fresh.first_moment, fresh.second_moment) == (0, {}, {})
    bare = resumable_copy(AdapterState(CONFIG, tensors(1), 7))
    assert bare.step == 0


def test_changes_of_the_original_do_not_reach_the_copies() -> None:
    original = AdapterState(CONFIG, tensors(1), 7, tensors(2), tensors(3), tensors(4))
    copies = [
        resumable_copy(original),
        part_of_state(original, optimizer=True, accumulator=True),
    ]
    for group in (original.weights, original.first_moment, original.accumulator):
        group["q_proj.A"][:] = 9
    for copy in copies:
        groups = (copy.weights, copy.first_moment, copy.accumulator)
        assert [values(each) for each in groups] == [[1], [2], [4]]


def test_a_part_of_the_state_has_what_was_asked_for() -> None:
    weights = part_of_state(STEPPED, optimizer=False, accumulator=False)
    assert (weights.step, weights.first_moment, weights.accumulator) == (0, {}, {})
    assert values(weights.weights) == [1]
    with_gradient = part_of_state(STEPPED, optimizer=False, accumulator=True)
    assert (with_gradient.step, values(with_gradient.accumulator)) == (0, [4])


def test_an_optimizer_without_moments_is_saved_with_zeros() -> None:
    part = part_of_state(AdapterState(CONFIG, tensors(1)), optimizer=True, accumulator=False)
    assert values(part.first_moment) + values(part.second_moment) == [0, 0]
    assert part.first_moment["q_proj.A"].shape == (1, 3, 2)
