"""The arrays of a state under the names that they have in files."""

import numpy as np
import pytest

from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.core.adapter import AdapterConfig

CONFIG = AdapterConfig(2, 4.0, 1)


def array(*numbers: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array(numbers, np.float32)


def test_a_state_is_the_same_after_a_turn_through_its_tensors() -> None:
    state = AdapterState(
        CONFIG,
        {"q_proj.A": array(1, 2), "q_proj.B": array(3)},
        step=7,
        first_moment={"q_proj.A": array(4, 5)},
        accumulator={"q_proj.B": array(6)},
    )
    tensors = state.to_tensors()
    assert list(tensors) == [
        "weights/q_proj.A",
        "weights/q_proj.B",
        "first_moment/q_proj.A",
        "accumulator/q_proj.B",
    ]
    assert AdapterState.from_tensors(CONFIG, 7, tensors) == state
    assert state.nbytes == 4 * 6


@pytest.mark.parametrize("name", ["q_proj.A", "moment/q_proj.A"])
def test_a_tensor_of_another_name_is_refused(name: str) -> None:
    with pytest.raises((KeyError, ValueError)):
        AdapterState.from_tensors(CONFIG, 1, {name: array(1)})
