"""The descriptions of GPUs that programs are compiled for."""

import re

import pytest

from scripts.gpu_compile.devices import GPUS
from tuneserve_engine.backend.jax.precompile.absent_gpu import description
from tuneserve_engine.core.gpus import DEVICE_KINDS, DRIVERS, GPU_MIB


def value(text: str, name: str) -> str:
    (found,) = re.findall(rf"^ *{name}: (.*)$", text, re.MULTILINE)
    return str(found).strip('"')


@pytest.mark.parametrize("gpu", DEVICE_KINDS)
def test_a_gpu_is_described_with_its_own_values(gpu: str) -> None:
    text = description(gpu)
    assert value(text, "device_description_str").startswith(DEVICE_KINDS[gpu])
    assert int(value(text, "device_memory_size")) == GPUS[gpu].memory_bytes
    assert int(value(text, "core_count")) == GPUS[gpu].processors
    assert GPUS[gpu].memory_bytes / 2**20 == pytest.approx(GPU_MIB[gpu], rel=0.02)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_driver_is_described_by_its_cuda(driver: str) -> None:
    assert value(description("h200", driver), "driver_version") == DRIVERS[driver]
