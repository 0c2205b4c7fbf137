"""Run OSFT's projections on eight devices and print errors and communication as JSON.

Errors are against float64. Run this in its own process, because the number of CPU devices is fixed
when the first array is made:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.engine.adapters.osft_devices
"""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.engine.adapters.osft_case import Base, base_of
from tuneserve_engine.adapters.kinds.base import SvdFactors
from tuneserve_engine.adapters.kinds.osft import left, right

LAYERS, LONG, SHORT, RANK = 4, 256, 128, 64
LAYOUTS = {
    "both on the large dimension": ("large", "large"),
    "both on the rank": ("rank", "rank"),
    "basis whole": ("rank", ""),
    "crossed": ("large", "rank"),
}
"""The layouts of the projected array and of the basis."""


def main() -> None:
    mesh = Mesh(np.array(jax.devices()), ("device",))
    figures: dict[str, Any] = {"devices": len(jax.devices()), "control": _control(mesh)}
    for side, shape in {"longer": (LONG, SHORT), "shorter": (SHORT, LONG)}.items():
        for project in (left, right):
            name = f"{project.__name__}, {side}"
            tall = shape if project is left else shape[::-1]
            figures[name] = {
                layout: _figures(project, tall, mesh, *places) for layout, places in LAYOUTS.items()
            }
    print(json.dumps(figures))


def _figures(
    project: Callable[..., Any], shape: tuple[int, int], mesh: Mesh, x_on: str, basis_on: str
) -> dict[str, float]:
    base = _base(shape)
    strong_u, strong_v = base.strong(RANK)
    size = shape[0] if project is left else shape[1]
    x = np.random.default_rng(5).standard_normal((LAYERS, RANK, size)).astype(np.float32)
    strong = strong_u.mT if project is left else strong_v
    expected = x - (x @ strong.mT) @ strong

    def place(array: np.ndarray, on: str) -> jax.Array:
        dimension = {"large": 2, "rank": 1, "": None}[on]
        spec = P(*("device" if each == dimension else None for each in range(array.ndim)))
        return jax.device_put(array, NamedSharding(mesh, spec))

    frozen = base.frozen(RANK)
    basis, other = ("u", "v") if project is left else ("v", "u")
    placed = {basis: place(getattr(frozen, basis), basis_on)}
    placed |= {name: place(getattr(frozen, name), "") for name in (other, "s", "trainable_mask")}
    given = place(x, x_on), SvdFactors(**placed)
    compiled = jax.jit(project, out_shardings=given[0].sharding).lower(*given).compile()
    found = np.asarray(compiled(*given))
    program = compiled.as_text()
    return {
        "error": float(np.abs(found - expected).max()),
        "all_reduce": len(re.findall(r" all-reduce(?:-start)?\(", program)),
        "all_gather": len(re.findall(r" all-gather(?:-start)?\(", program)),
        "other": len(re.findall(r" (?:all-to-all|collective-permute|reduce-scatter)", program)),
    }


@cache
def _base(shape: tuple[int, int]) -> Base:
    return base_of(shape, LAYERS)


def _control(mesh: Mesh) -> float:
    """The remaining strong directions if each device holds different rows of dV and of V_h, and
    adds up the blocks of all devices.
    """
    base = _base((LONG, LONG))
    _, strong = base.strong(RANK)
    x = np.random.default_rng(6).standard_normal((LAYERS, RANK, LONG)).astype(np.float32)

    def blocks(x: jax.Array, strong: jax.Array) -> jax.Array:
        return x - jax.lax.psum(x @ strong.mT, "device") @ strong

    rows = P(None, "device")
    summed = jax.shard_map(blocks, mesh=mesh, in_specs=(rows, rows), out_specs=rows)
    found = np.asarray(jax.jit(summed)(x, strong.astype(np.float32)), np.float64)
    return float(np.linalg.norm(found @ strong.mT) / np.linalg.norm(x))


if __name__ == "__main__":
    main()
