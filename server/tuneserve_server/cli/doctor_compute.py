"""Check the results of the device. ``device_check`` computes them."""

import json
import subprocess
from typing import Any

from tuneserve_server.cli.finding import Environment, Finding, last_line, run_python

_LIMIT_S = 90.0
_NO_ROOM = ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", "STATUS_ALLOC_FAILED", "STATUS_NOT_INITIALIZED")
"""Errors of XLA, CUDA and cuBLAS on a device whose memory is taken."""
_SETTINGS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_TRACEBACK_FILTERING": "off"}
"""Otherwise JAX takes most of the memory, and puts a note of its own behind an error."""


def check_compute(environment: Environment, limit_s: float = _LIMIT_S) -> Finding:
    """Check the speed of a product and the results of kernels, in a separate process."""
    environment = {**environment, **_SETTINGS}
    try:
        ran = run_python(["-m", "tuneserve_engine.backend.jax.device_check"], environment, limit_s)
    except subprocess.TimeoutExpired:
        text = f"a product and small kernels took over {limit_s:.0f} s; is the device overloaded?"
        return Finding("compute", "WARN", text)
    if ran.returncode != 0 and any(error in ran.stderr for error in _NO_ROOM):
        text = "not checked: the device has too little free memory; a worker may be using it"
        return Finding("compute", "WARN", text)
    if ran.returncode != 0:
        text = f"a small computation failed: {last_line(ran)}; check the driver and JAX's plugin"
        return Finding("compute", "FAIL", text)
    return describe(json.loads(ran.stdout.splitlines()[-1]))


def describe(found: dict[str, Any]) -> Finding:
    """Return the finding about the output of ``device_check``."""
    most = found["most_error"]
    wrong = {name: error for name, error in found["errors"].items() if not error <= most}
    if wrong:
        errors = ", ".join(f"{name}: {error:.2g}" for name, error in wrong.items())
        return Finding(
            "compute",
            "FAIL",
            f"kernels differ from NumPy: {errors} of the norm, the limit is {most}; do not train "
            "on this device; install the versions of requirements/cuda.txt, or report it",
        )
    size, rate = f"{found['size']:,}", found["flops"] / 1e12
    text = f"{rate:.3g} TFLOP/s in a product of {size} x {size} matrices, {found['dtype']}"
    kernels = " and ".join(found["errors"])
    return Finding("compute", "OK", text + (f"; {kernels} agree with NumPy" if kernels else ""))
