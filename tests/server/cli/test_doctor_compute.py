"""The check of the results of a device."""

import os
import subprocess

import pytest

from tuneserve_server.cli import doctor_compute
from tuneserve_server.cli.doctor_compute import check_compute, describe
from tuneserve_server.cli.finding import Finding, run_python

COMPUTED = {"size": 4096, "dtype": "bfloat16", "flops": 7.004e14, "most_error": 0.01}


@pytest.mark.parametrize(
    ("errors", "level", "words"),
    [
        ({}, "OK", "700 TFLOP/s in a product of 4,096 x 4,096 matrices, bfloat16"),
        ({"attention": 0.002, "adapters": 0.01}, "OK", "; attention and adapters agree with NumPy"),
        ({"attention": 0.002, "adapters": 0.5}, "FAIL", "adapters: 0.5 of the norm, the limit is"),
        ({"attention": float("nan")}, "FAIL", "attention: nan of the norm"),
    ],
)
def test_what_the_device_computes_is_compared(
    errors: dict[str, float], level: str, words: str
) -> None:
    found = describe({**COMPUTED, "errors": errors})
    assert (found.name, found.level) == ("compute", level) and words in found.text


def test_a_device_that_computes_nothing_fails_unless_it_is_full_or_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ran(stderr: str) -> Finding:
        done = subprocess.CompletedProcess([], 1, stdout="", stderr=stderr)
        monkeypatch.setattr(doctor_compute, "run_python", lambda *_: done)
        return check_compute({})

    refused = ran("Traceback\nptxas too old")
    assert refused.level == "FAIL" and "failed: ptxas too old; check the driver" in refused.text
    full = ran("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory")
    assert full.level == "WARN" and "a worker may be using it" in full.text
    monkeypatch.undo()
    slow = check_compute({**os.environ}, 0.01)
    assert slow.level == "WARN" and "took over 0 s" in slow.text


def test_the_error_of_a_failed_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, JAX puts a note of its own behind the error of a compiled function."""
    program = "import jax; jax.jit(lambda x: x + None)(1)"
    monkeypatch.setattr(
        doctor_compute, "run_python", lambda _, *rest: run_python(["-c", program], *rest)
    )
    found = check_compute({**os.environ})
    assert found.level == "FAIL" and "NoneType" in found.text
