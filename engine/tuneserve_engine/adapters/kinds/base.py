"""The interface of a kind of adapter: trained arrays that stand for a low-rank change of weights.

The model computes with low-rank pairs (A, B) and does not know the kinds. A kind defines the arrays
that its adapters train, the pair that the arrays stand for, and the constraint on the arrays after
each step. Its functions use operators only, so that they run on NumPy and on JAX arrays, under
``jit`` and ``vjp``: autodiff pulls the gradient of the pair back to the kind's own arrays.

Dimension key: L layers, D inputs of a projection, F its outputs, K directions of a decomposition, r
an adapter's rank for a target, R the rank that it is padded to.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tuneserve_engine.core.adapter import AdapterConfig

FORM = "form"
"""The option that chooses a variant of a kind."""
Array = Any
"""An array of NumPy or of JAX."""
Parts = Mapping[str, Array]
"""The arrays of one target, by the kind's names for them."""
TargetShapes = Mapping[str, tuple[int, ...]]
"""The shape of each target: [L, D, F], or [D, F] for the unembedding."""


class SvdFactors(NamedTuple):
    """The singular triples of one target's base weight, the weakest first: W [F, D] = Σ u s v.

    ``trainable_mask`` is 1 on the adapter's triples and 0 on the others. Directions are rows. The
    longer of ``u`` and ``v`` has all directions of the weight, the shorter at least R.
    """

    u: Array  # [L, K, F]
    s: Array  # [L, K]
    v: Array  # [L, K, D]
    trainable_mask: Array  # [K]

    def lowest(self, rank: int) -> tuple[Array, Array, Array]:
        """Return U0 [L, R, F], S0 [L, R] and V0 [L, R, D]: zero beyond the adapter's own rank."""
        mask = self.trainable_mask[:rank]
        rows = mask[None, :, None]
        return (
            self.u[..., :rank, :] * rows,
            self.s[..., :rank] * mask[None],
            self.v[..., :rank, :] * rows,
        )


@runtime_checkable  # the tests check the types of arguments
class AdapterKind(Protocol):
    """A way to train a low-rank change of weights. Its instances have no state."""

    @property
    def name(self) -> str:
        """The name by which clients choose the kind."""
        ...

    @property
    def program(self) -> str:
        """The name of the computation from arrays to pair.

        Adapters of one program have arrays of the same shapes, and their pairs are computed in the
        same way. With an empty program, the arrays are the pair.
        """
        ...

    @property
    def needs_decomposition(self) -> bool:
        """Whether the kind's functions need ``frozen``, the base weight's decomposition."""
        ...

    @property
    def options(self) -> Mapping[str, str]:
        """The options that clients may set: names and descriptions."""
        ...

    def validated_options(self, config: AdapterConfig, shapes: TargetShapes) -> AdapterConfig:
        """Return the configuration with the highest rank of its targets, and without the targets
        that this kind does not train.

        Raises ``UserError`` for options that the kind does not accept.
        """
        ...

    def rank(self, config: AdapterConfig, shape: tuple[int, ...]) -> int:
        """Return the rank of the pair for a target of this shape."""
        ...

    def scale(self, config: AdapterConfig) -> float:
        """Return the factor of x A B."""
        ...

    def parameter_shapes(self, shape: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the arrays trained for a target, padded to the rank.

        Returns an empty dictionary if the kind never trains a target of this shape.
        """
        ...

    def initial(
        self, config: AdapterConfig, index: int, shape: tuple[int, ...], frozen: SvdFactors | None
    ) -> Parts:
        """Return a fresh adapter's NumPy arrays for the ``index``-th target.

        The change of weights that they stand for is exactly zero.
        """
        ...

    def lora_pair(self, parts: Parts, frozen: SvdFactors | None) -> tuple[Array, Array]:
        """Return A [L, D, R] and B [L, R, F]."""
        ...

    def project(self, parts: Parts, frozen: SvdFactors | None) -> Parts:
        """Project the arrays, or gradients of them, to the nearest allowed ones."""
        ...


def parameters(kind: AdapterKind, config: AdapterConfig, shapes: TargetShapes) -> int:
    """Return the number of parameters that an adapter of this configuration trains."""
    return sum(
        math.prod(part)
        for target in config.targets
        for part in kind.parameter_shapes(
            shapes[target], kind.rank(config, shapes[target])
        ).values()
    )


def adapter_bytes(kind: AdapterKind, shapes: TargetShapes, rank: int) -> int:
    """Return the bytes of an adapter, padded to the rank, on the device.

    All numbers are float32: the kind's weights and two moments of them, and the gradient of the
    pair.
    """
    own = sum(
        math.prod(part)
        for shape in shapes.values()
        for part in kind.parameter_shapes(shape, rank).values()
    )
    pairs = sum(math.prod(layers) * (i + o) * rank for *layers, i, o in shapes.values())
    return 4 * (3 * own + pairs)


def decomposition_bytes(shapes: TargetShapes, max_rank: int) -> int:
    """Return the bytes of the decompositions of the layers' weights on the device, in float32.

    All adapters that need the decompositions share them.
    """
    return 4 * sum(
        math.prod(part)
        for shape in shapes.values()
        for part in decomposition_shapes(shape, max_rank).values()
    )


def decomposition_shapes(shape: tuple[int, ...], max_rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of ``u``, ``s`` and ``v`` on the device; none without layers."""
    if len(shape) < 3:
        return {}
    layers, inputs, outputs = shape
    all_of_them = max(min(inputs, outputs), max_rank)
    by_u = all_of_them if outputs > inputs else max_rank
    by_v = all_of_them if inputs > outputs else max_rank
    return {
        "u": (layers, by_u, outputs),
        "s": (layers, max_rank),
        "v": (layers, by_v, inputs),
    }


def mask_size(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the size of ``SvdFactors.trainable_mask`` on the device."""
    return max(shapes["u"][-2], shapes["v"][-2])
