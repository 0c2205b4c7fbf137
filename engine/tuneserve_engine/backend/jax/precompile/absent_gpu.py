"""An absent GPU, for which JAX lowers and compiles."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from tuneserve_engine.backend.jax.mesh import WHOLE, DeviceMesh
from tuneserve_engine.core.gpus import DRIVERS

_H200 = Path(__file__).with_name("h200.txtpb")
_HOPPER = "major: 9\n    feature_extension: ACCELERATED_FEATURES"
_ADA = "major: 8\n    minor: 9"
_OTHERS = {
    "h100": {
        "memory_bandwidth": "3352320000000",
        "device_memory_size": "84942979072",
        "name": '"NVIDIA H100 80GB HBM3"',
        "device_description_str": '"NVIDIA H100 80GB HBM3"',
    },
    "l40s": {
        "shared_memory_per_core": "102400",
        "threads_per_core_limit": "1536",
        "core_count": "142",
        "memory_bandwidth": "864000000000",
        "l2_cache_size": "100663296",
        "clock_rate_ghz": "2.52",
        "device_memory_size": "47697362944",
        "shared_memory_per_block_optin": "101376",
        "platform_version": '"Compute Capability 8.9"',
        "name": '"NVIDIA L40S"',
        "device_description_str": '"NVIDIA L40S"',
    },
}
"""Values in which the description of another GPU differs from the H200's."""


_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def description(gpu: str, driver: str = max(DRIVERS)) -> str:
    """Return a GPU as XLA's compiler takes it: a ``GpuTargetConfigProto``, as text."""
    text = _H200.read_text(encoding="utf-8")
    assert _HOPPER in text
    if gpu == "l40s":
        text = text.replace(_HOPPER, _ADA)
    changes = _OTHERS.get(gpu, {}) | {"driver_version": f'"{DRIVERS[driver]}"'}
    for key, value in changes.items():
        text, count = re.subn(rf"^( *{key}:).*$", rf"\1 {value}", text, flags=re.MULTILINE)
        assert count == 1, key
    return text


class AbsentGpu:
    """A GPU by its description, or several. Raises ``RuntimeError`` without JAX's CUDA plugin."""

    def __init__(self, description: str, count: int = 1) -> None:
        if not any(map(_is_installed, _PLUGINS)):
            raise RuntimeError(
                "JAX's CUDA plugin, which compiles for a GPU, is not installed; on Linux with "
                "Python 3.12 or later, install it: pip install '.[cuda]' in a clone"
            )
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=description, topology=f"1x1x{count}"
        )
        self.mesh = DeviceMesh(topology.devices)

    def spec(self, x: Any) -> Any:
        """Return the spec of an array or a number on this device.

        Programs for several devices have the parts of their arguments themselves.
        """
        sharding = self.mesh.sharding(WHOLE) if self.mesh.count == 1 else None
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding)  # type: ignore[no-untyped-call]

    @contextmanager
    def lowering(self) -> Iterator[None]:
        """Make this thread lower for these devices."""
        with jax.sharding.use_abstract_mesh(self.mesh.abstract):
            yield


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
