"""What a kind of adapter is: arrays of its own that stand for a change of weights of low rank.

The model computes with pairs (A, B) of low rank and knows no kinds. A kind says which arrays its
adapters train, which pair they stand for, and what has to hold for them after every step. Its
functions use operators only, so that they run on NumPy's arrays and on JAX's, under ``jit`` and
``vjp``: the gradient of the pair is pulled back to the kind's own arrays by autodiff.

Dimension key: L layers, D inputs of a projection, F its outputs, K directions of a decomposition, r
an adapter's rank for a target, R the rank that it is padded to.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from tuneserve_engine.adapters import AdapterConfig

FORM = "form"
"""The option that chooses among the variants of a kind."""
Array = Any
"""NumPy's or JAX's."""
Parts = Mapping[str, Array]
"""One target's arrays by the kind's names for them."""
TargetShapes = Mapping[str, tuple[int, ...]]
"""[L, D, F] of every target; [D, F] of the unembedding."""


class Frozen(NamedTuple):
    """One target's base weight W [F, D] = Σ u s v over its singular triples, the weakest first, and
    how many of them are the adapter's: ``kept`` is 1 on those, 0 on the others.

    Directions are rows. The longer of ``u`` and ``v`` has all directions of the weight, the shorter
    at least R.
    """

    u: Array  # [L, K, F]
    s: Array  # [L, K]
    v: Array  # [L, K, D]
    kept: Array  # [K]

    def lowest(self, rank: int) -> tuple[Array, Array, Array]:
        """U0 [L, R, F], S0 [L, R] and V0 [L, R, D]: zero beyond the adapter's own rank."""
        kept = self.kept[:rank]
        rows = kept[None, :, None]
        return (
            self.u[..., :rank, :] * rows,
            self.s[..., :rank] * kept[None],
            self.v[..., :rank, :] * rows,
        )


class Kind(Protocol):
    """One way to train a change of low rank. Its instances have no state."""

    @property
    def name(self) -> str:
        """What clients ask for."""
        ...

    @property
    def program(self) -> str:
        """Adapters of one program have arrays of the same shapes, and pairs that are made alike;
        if it is empty, their arrays are the pair."""
        ...

    @property
    def needs_decomposition(self) -> bool:
        """Whether its functions are given ``frozen``."""
        ...

    @property
    def options(self) -> Mapping[str, str]:
        """What clients may set, by name, and what each does."""
        ...

    def resolved(self, config: AdapterConfig, shapes: TargetShapes) -> AdapterConfig:
        """The configuration with the highest rank of its targets, and without targets that this
        kind does not train. Raises ``UserError`` for options that it does not take."""
        ...

    def rank(self, config: AdapterConfig, shape: tuple[int, ...]) -> int:
        """Of the pair of a target of this shape."""
        ...

    def scale(self, config: AdapterConfig) -> float:
        """What x A B is multiplied with."""
        ...

    def parts(self, shape: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays that it trains of a target, padded to the rank; none if it never
        trains a target of this shape."""
        ...

    def initial(
        self, config: AdapterConfig, index: int, shape: tuple[int, ...], frozen: Frozen | None
    ) -> Parts:
        """NumPy arrays of a fresh adapter, whose pair is exactly nothing, for the ``index``-th
        target."""
        ...

    def pair(self, parts: Parts, frozen: Frozen | None) -> tuple[Array, Array]:
        """A [L, D, R] and B [L, R, F]."""
        ...

    def project(self, parts: Parts, frozen: Frozen | None) -> Parts:
        """What is nearest to these arrays, or to gradients of them, and is allowed."""
        ...


def parameters(kind: Kind, config: AdapterConfig, shapes: TargetShapes) -> int:
    """Numbers that an adapter of this configuration trains."""
    return sum(
        math.prod(part)
        for target in config.targets
        for part in kind.parts(shapes[target], kind.rank(config, shapes[target])).values()
    )


def adapter_bytes(kind: Kind, shapes: TargetShapes, rank: int) -> int:
    """What an adapter padded to the rank takes on the device, float32: weights and two moments as
    the kind has them, and the gradient of its pair."""
    own = sum(
        math.prod(part) for shape in shapes.values() for part in kind.parts(shape, rank).values()
    )
    pairs = sum(math.prod(layers) * (i + o) * rank for *layers, i, o in shapes.values())
    return 4 * (3 * own + pairs)


def decomposition_bytes(shapes: TargetShapes, max_rank: int) -> int:
    """What the decompositions of the layers' weights take on the device, float32: they are shared
    by all adapters that need them."""
    return 4 * sum(
        math.prod(part)
        for shape in shapes.values()
        for part in decomposition_shapes(shape, max_rank).values()
    )


def decomposition_shapes(shape: tuple[int, ...], max_rank: int) -> dict[str, tuple[int, ...]]:
    """Of ``u``, ``s`` and ``v`` on the device; none for a target that has no layers."""
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
