"""The check of a device, whose kernels are interpreted here."""

import json
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import pytest

from tuneserve_engine.backend.jax import device_check
from tuneserve_engine.backend.jax.device_check import (
    MOST_ERROR,
    adapter_error,
    attention_error,
    product_flops,
)


def test_the_kernels_agree_with_numpy_to_the_rounding_of_bfloat16() -> None:
    """Rounding to 8 bits moves a number by up to 2^-8 of its size, on average by 0.4 of that."""
    for error in (attention_error(), adapter_error()):
        assert 2.0**-11 < error < 2.0**-8 < MOST_ERROR


def test_a_kernel_that_leaves_something_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, add = device_check.attend_blocks, device_check.add_deltas

    def without_the_first_block(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
        return attend(q, k, v.at[0].set(0), *rest, **options)

    def of_another_slot(base: Any, x: Any, names: Any, lora: Any) -> Any:
        return add(base, x, names, lora._replace(slot=1 - lora.slot))

    monkeypatch.setattr(device_check, "attend_blocks", without_the_first_block)
    monkeypatch.setattr(device_check, "add_deltas", of_another_slot)
    assert attention_error() > MOST_ERROR and adapter_error() > MOST_ERROR


def test_a_kernel_that_returns_no_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "add_deltas", lambda base, *_: [base[0] * jnp.nan])
    assert not adapter_error() <= MOST_ERROR


def test_a_cpu_is_asked_for_a_product_alone() -> None:
    assert product_flops(64, "float32") > 0
    command = [sys.executable, "-m", device_check.__name__]
    told = subprocess.run(command, capture_output=True, check=True, text=True)
    found = json.loads(told.stdout)
    assert found.pop("flops") > 0
    assert found == {"size": 1024, "dtype": "float32", "errors": {}, "most_error": MOST_ERROR}
