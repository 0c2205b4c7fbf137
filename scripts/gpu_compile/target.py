"""An absent GPU, for which JAX lowers and compiles."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from scripts.gpu_compile.devices import Gpu
from tuneserve_engine.backend.jax.target import compiling_for


class Target:
    """One GPU. Raises ``RuntimeError`` without JAX's CUDA plugin."""

    def __init__(self, gpu: Gpu) -> None:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=gpu.description, topology="1x1x1"
        )
        mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
        self._mesh = mesh.abstract_mesh
        self._sharding = NamedSharding(mesh, PartitionSpec())

    def spec(self, x: Any) -> Any:
        """Return the spec of an array or a number on this device."""
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=self._sharding)

    @contextmanager
    def lowering(self) -> Iterator[None]:
        """Make this thread lower for this device."""
        with jax.sharding.use_abstract_mesh(self._mesh):
            yield


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Make the engine choose as if JAX had found a GPU.

    It then takes the attention kernels, and exact float32 products.
    """
    with compiling_for("gpu"):
        yield
