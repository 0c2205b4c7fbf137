"""The time that a GPU spends in each kernel, from JAX's profiler."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax

_NUMBERS = re.compile(r"(?:_\d+)+$")
"""The end of a kernel's name: XLA numbers the kernels that it names alike."""


def kernel_times(work: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """Run ``work``, and return the milliseconds and the launches of its kernels by name.

    XLA launches no CUDA graphs while it is profiled, so a kernel has its usual time, but the gaps
    between kernels do not.
    """
    milliseconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="tuneserve-bench-") as folder:
        with jax.profiler.trace(folder):
            work()
        (file,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue  # what XLA derives from the streams
                for event in line.events:
                    name = _NUMBERS.sub("", event.name)
                    milliseconds[name] += event.duration_ns / 1e6
                    launches[name] += 1
    return milliseconds, launches
