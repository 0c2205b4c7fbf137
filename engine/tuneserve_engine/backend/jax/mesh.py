"""The devices that share one base model, and the part that each of them has of an array.

They are a mesh of one axis. An array is *whole* on every device, or each device has its *own* part
of it: of a weight, some of its outputs; of the buffers of training, those of its own micro-batch.

A program that mixes own and whole arrays runs on every device on that device's parts, and only
what it names is exchanged (``whole``). JAX would otherwise choose what to exchange, and gather all
of the tape. On one device, programs are what they would be without a mesh.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

DEVICES = "devices"
"""The mesh's axis."""
WHOLE, OWN = PartitionSpec(), PartitionSpec(DEVICES)  # type: ignore[no-untyped-call]
"""The parts of devices: all of an array, or an equal share of axis 0."""


class Parts(NamedTuple):
    """The parts of a program's arguments and results on each device: trees of ``PartitionSpec``.

    A node may stand for all leaves below it. ``on_each`` says whether the program is written for
    the parts of one device. Otherwise it is written for whole arrays, and XLA divides it.
    """

    arguments: tuple[Any, ...]
    results: Any
    on_each: bool = True


class DeviceMesh:
    """The devices of one base model, one by default."""

    def __init__(self, devices: Sequence[jax.Device] = ()) -> None:
        self.devices = tuple(devices) or (jax.local_devices()[0],)
        self._mesh = Mesh(np.array(self.devices), (DEVICES,))
        self.is_of_one_process = all(
            device.process_index == jax.process_index() for device in self.devices
        )

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def abstract(self) -> jax.sharding.AbstractMesh:
        """The mesh without its devices, to lower for."""
        mesh: jax.sharding.AbstractMesh = self._mesh.abstract_mesh
        return mesh

    def sharding(self, parts: Any) -> Any:
        """Return the shardings of a tree of ``PartitionSpec``."""
        return jax.tree.map(
            lambda spec: NamedSharding(self._mesh, spec),
            parts,
            is_leaf=lambda each: isinstance(each, PartitionSpec),
        )

    def put(self, tree: Any, part: PartitionSpec = WHOLE) -> Any:
        """Put host arrays on the devices: whole on each, or in parts.

        Of several processes, each has the whole arrays and puts them on its own devices. They need
        not do so at the same time.
        """
        if self.count == 1:
            return jax.device_put(tree)
        sharding = NamedSharding(self._mesh, part)
        if self.is_of_one_process:
            return jax.device_put(tree, sharding)
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__), tree
        )

    def of_all(self, specs: Any) -> Any:
        """Return the specs of arrays of which every device has a part like ``specs``."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self.count * x.shape[0], *x.shape[1:]), x.dtype),  # type: ignore[no-untyped-call]
            specs,
        )

    def part_of(self, shape: Sequence[int], most_parts: int | None) -> PartitionSpec:
        """Return the part of a weight of this shape that each device has.

        Devices share its last axis, its outputs, if these can be divided evenly; ``most_parts`` is
        as in ``model.weight_shapes``. Otherwise the weight is whole on each.
        """
        if most_parts is None or not self.divides(most_parts):
            return WHOLE
        return PartitionSpec(*[None] * (len(shape) - 1), DEVICES)  # type: ignore[no-untyped-call]

    def divides(self, parts: int) -> bool:
        """Return whether the devices share what has at most this many parts."""
        return self.count > 1 and parts % self.count == 0

    def placed(
        self, function: Callable[..., Any], parts: Parts | None
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return the function to compile, and the options of ``jax.jit`` that place its arrays.

        Without ``parts``, all of them are whole on each device.
        """
        if self.count == 1:
            return function, {}
        arguments, results = (WHOLE, WHOLE) if parts is None else parts[:2]
        if parts is not None and parts.on_each:
            function = self.on_each(function, parts)
        options = {
            "in_shardings": self.sharding(arguments),
            "out_shardings": self.sharding(results),
        }
        return function, options

    def on_each(self, function: Callable[..., Any], parts: Parts) -> Callable[..., Any]:
        """Return the function of parts as one of arrays, for several devices."""
        each: Callable[..., Any] = jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=parts.arguments,
            out_specs=parts.results,
            check_vma=False,  # loops of a device's own length hide that results are whole
        )
        return each


def process_devices(count: int) -> list[jax.Device]:
    """Return the first devices of each process, so that there are ``count`` together."""
    processes = jax.process_count()
    of_each = count // processes
    return [device for each in range(processes) for device in jax.local_devices(each)[:of_each]]


def of_all(tree: Any) -> Any:
    """Return every device's array, one after the other along axis 0, for each array of the tree.

    For programs that run on every device.
    """
    with jax.named_scope("of_all"):
        return jax.tree.map(lambda x: jax.lax.all_gather(x, DEVICES, tiled=True), tree)


def own(x: Array, size: int) -> Array:
    """Return this device's part, of this size along the last axis, of an array that is whole.

    For programs that run on every device.
    """
    if x.shape[-1] == size:
        return x
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(DEVICES) * size, size, -1)


def whole(x: Array, size: int) -> Array:
    """Return the array with all of ``size`` along the last axis, gathered if this is a part of it.

    For programs that run on every device.
    """
    if x.shape[-1] == size:
        return x
    # Gathered along a new first axis. Along the last one, XLA on a GPU would first turn all layers.
    parts = jax.lax.all_gather(x, DEVICES)
    return jnp.moveaxis(parts, 0, -2).reshape(*x.shape[:-1], size)
