"""Failures on the device: some calls can be retried, and some failures need a new process."""

import gc
import weakref

import jax
import numpy as np
import pytest

from tests.support.adapters import bits, random_state
from tests.support.adapters import on_device as adapter_of
from tuneserve_engine.backend.base import DeviceFailed, OutOfMemory
from tuneserve_engine.backend.jax.adapters.arrays import arrays_of
from tuneserve_engine.backend.jax.device_errors import translate_device_errors
from tuneserve_engine.backend.jax.training.adamw import start_step
from tuneserve_engine.core.adapter import AdamwParams
from tuneserve_engine.core.errors import UserError

FULL = "RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes."


def failing(error: Exception):
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_successful_call_returns_its_value():
    assert translate_device_errors(divmod, 7, 3) == (2, 1)


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError(FULL), MemoryError(FULL)])
def test_a_device_without_room_is_out_of_memory(error: Exception):
    with pytest.raises(OutOfMemory, match=r"no room: .*allocating 64 bytes"):
        translate_device_errors(failing(error))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS", DeviceFailed),
        ("UNAVAILABLE: the device is gone", DeviceFailed),
        ("INVALID_ARGUMENT: the program has a flaw", jax.errors.JaxRuntimeError),
    ],
)
def test_device_failures_are_distinguished_from_programs_that_cannot_run(
    message: str, expected: type[Exception]
):
    with pytest.raises(expected, match=message.split(": ")[1]):
        translate_device_errors(failing(jax.errors.JaxRuntimeError(message)))


def test_other_exceptions_pass_unchanged():
    with pytest.raises(UserError, match="too long"):
        translate_device_errors(
            failing(UserError("too long")), donated=[jax.device_put(np.ones(3))]
        )


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError(FULL),
        jax.errors.JaxRuntimeError("INVALID_ARGUMENT: a flaw"),
        MemoryError(),
        TypeError("a mistake of ours"),
    ],
)
def test_after_a_step_has_started_every_failure_is_a_device_failure(error: Exception):
    adapter, other = adapter_of(random_state(2)), adapter_of(random_state(3))

    def step_then_fail() -> None:
        start_step(adapter, AdamwParams())
        raise error

    with pytest.raises(DeviceFailed, match="had begun to change an adapter") as failed:
        translate_device_errors(step_then_fail, donated=[arrays_of(other), arrays_of(adapter)])
    assert failed.value.__cause__ is error


def test_a_step_that_finds_no_room_before_it_starts_leaves_the_adapter():
    adapter = adapter_of(random_state(2))
    before = bits(adapter)
    with pytest.raises(OutOfMemory):
        translate_device_errors(
            failing(jax.errors.JaxRuntimeError(FULL)), donated=arrays_of(adapter)
        )
    assert bits(adapter) == before


def test_out_of_memory_holds_no_reference_to_the_failed_call():
    class Array:
        pass

    seen = []

    def fail() -> None:
        array = Array()
        seen.append(weakref.ref(array))
        raise jax.errors.JaxRuntimeError(FULL)

    with pytest.raises(OutOfMemory) as failed:
        translate_device_errors(fail)
    gc.collect()
    assert failed.value.__cause__ is None and failed.value.__context__ is None
    assert seen[0]() is None
