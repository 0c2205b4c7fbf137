"""The memory of GPUs agrees with XLA's descriptions of them."""

import pytest

from scripts.gpu_compile.devices import GPUS
from tuneserve_engine.core.gpus import GPU_MIB


@pytest.mark.parametrize("name", GPUS)
def test_the_memory_is_that_of_the_compiler_s_description(name: str) -> None:
    """The driver keeps some of it to itself."""
    assert GPU_MIB[name] * 2**20 == pytest.approx(GPUS[name].memory_bytes, rel=0.03)
