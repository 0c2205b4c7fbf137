"""OSFT, orthogonal subspace fine-tuning (Nayak et al., https://arxiv.org/abs/2504.07097).

The strong singular directions of each weight are frozen, the weak ones are trained.

With U0, S0, V0 the weakest r triples of the base weight W, an adapter of the form ``factors`` has
U, S and V of its own and changes W by ΔW = U S V - U0 S0 V0. U stays orthogonal to the strong left
directions and V to the strong right ones, so that ΔW never touches either. On the shorter side of
W, the remaining directions have dimension r, and V0 (or U0) is a basis of them: therefore ΔW is
exactly a pair of rank r with one factor frozen. The model computes with this pair, for training and
for sampling, and the pair is exported.

``short_fixed`` trains the pair's other factor itself; ``core`` trains C [r, r] of ΔW = U0 C V0.

Arrays have a row for each direction: the transpose Uᵀ of the U above is stored as ``U`` [r, F], and
X as [r, N]. With columns, a CPU would transpose them at each product.

Dimension key: as in ``kinds.base``.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tuneserve_engine.adapters.kinds.base import FORM, Array, Parts, SvdFactors, TargetShapes
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import UserError

RATIO = "unfreeze_ratio"
FORMS = ("factors", "short_fixed", "core")


class Osft:
    """OSFT in one of its forms.

    The unembedding, the embedding and the norms are frozen, because all tenants share them.
    """

    name = "osft"
    needs_decomposition = True
    options: Mapping[str, str] = {
        RATIO: "share of every weight's singular directions that is trained, above 0 and below 1; "
        "without it, the rank says how many they are",
        FORM: "which arrays are trained: 'factors' (U, S and V; the default), 'short_fixed' (the "
        "longer side only) or 'core' (rank x rank numbers)",
    }

    def __init__(self, form: str) -> None:
        self.form = form
        self.program = f"osft_{form}"

    def validated_options(self, config: AdapterConfig, shapes: TargetShapes) -> AdapterConfig:
        options = {**config.options, FORM: self.form}  # explicit and default form compare equal
        config = replace(config, train_unembed=False, options=options)
        _check_ratio(config)
        if not config.targets:
            raise UserError(
                "this adapter trains nothing: train_attn and train_mlp are both false, and osft "
                "leaves the unembedding as it is; set one of the two to true"
            )
        missing = [name for name in config.targets if name not in shapes]
        if missing:
            raise UserError(
                f"no worker has told the shape of {missing[0]}, of which osft needs to know how "
                "many directions it has; ask again when a worker of this release runs"
            )
        directions = {name: min(shapes[name][-2:]) for name in config.targets}
        smallest = min(directions, key=lambda name: directions[name])
        if directions[smallest] < 2:
            raise UserError(
                f"{smallest} of this base model has one singular direction; osft freezes one at "
                "least and trains one at least: use lora"
            )
        largest = max(directions, key=lambda name: directions[name])
        if RATIO not in config.options and config.rank >= directions[largest]:
            raise UserError(
                f"rank is {config.rank}, and no weight has more than {directions[largest]} "
                f"singular directions ({largest}): nothing would be frozen; choose at most "
                f"{directions[largest] - 1}"
            )
        ranks = [self.rank(config, shapes[name]) for name in config.targets]
        return replace(config, rank=max(ranks))

    def rank(self, config: AdapterConfig, shape: tuple[int, ...]) -> int:
        """Return the number of trained directions: at least one, and at most all but one.

        The number of trained directions is rounded, not of frozen ones: 1 - 0.9 is not 0.1.
        """
        directions = min(shape[-2:])
        asked = config.options.get(RATIO)
        rank = config.rank if asked is None else round(float(asked) * directions)
        return min(max(rank, 1), directions - 1)

    def scale(self, config: AdapterConfig) -> float:
        return 1.0

    def parameter_shapes(self, shape: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
        if len(shape) < 3:
            return {}
        layers, inputs, outputs = shape
        if self.form == "core":
            return {"C": (layers, rank, rank)}
        if self.form == "short_fixed":
            return {"X": (layers, rank, max(inputs, outputs))}
        return {"U": (layers, rank, outputs), "S": (layers, rank), "V": (layers, rank, inputs)}

    def initial(
        self, config: AdapterConfig, index: int, shape: tuple[int, ...], frozen: SvdFactors | None
    ) -> Parts:
        rank = self.rank(config, shape)
        if self.form != "factors":
            return {
                name: np.zeros(part, np.float32)
                for name, part in self.parameter_shapes(shape, rank).items()
            }
        u, s, v = _given(frozen).lowest(rank)
        return {"U": u, "S": s, "V": v}

    def lora_pair(self, parts: Parts, frozen: SvdFactors | None) -> tuple[Array, Array]:
        frozen = _given(frozen)
        u0, s0, v0 = frozen.lowest(next(iter(parts.values())).shape[1])
        if _is_tall(frozen):
            return v0.mT, self._longer(parts, s0, ("V", v0), ("U", u0))
        return self._longer(parts, s0, ("U", u0), ("V", v0)).mT, u0

    def _longer(
        self, parts: Parts, s0: Array, short: tuple[str, Array], long: tuple[str, Array]
    ) -> Array:
        """Return the pair's factor on the longer side of the weight, [L, R, N]."""
        if self.form == "short_fixed":
            return parts["X"]
        if self.form == "core":
            core = parts["C"]  # from V0 to U0
            return (core.mT if long[0] == "U" else core) @ long[1]
        turned = short[1] @ (parts[short[0]] - short[1]).mT
        return _change(turned, parts["S"], s0, parts[long[0]], long[1])

    def project(self, parts: Parts, frozen: SvdFactors | None) -> Parts:
        frozen = _given(frozen)
        if self.form == "core":
            return parts
        if self.form == "factors":
            return {**parts, "U": left(parts["U"], frozen), "V": right(parts["V"], frozen)}
        return {"X": (left if _is_tall(frozen) else right)(parts["X"], frozen)}


def left(x: Array, frozen: SvdFactors) -> Array:
    """Return x [L, R, F] without the strong left directions.

    On the shorter side of the weight, projects on the weak directions: they are a basis of the
    remaining space. On the longer side, subtracts the strong directions: the remaining space has
    more than the weak directions. The mask applies to coefficients, so that no copy of the
    directions is made.
    """
    is_longer = frozen.u.shape[-1] > frozen.v.shape[-1]
    return _projected(x, frozen.u, frozen.trainable_mask, is_longer)


def right(x: Array, frozen: SvdFactors) -> Array:
    """Return x [L, R, D] without the strong right directions; see ``left``."""
    is_longer = frozen.v.shape[-1] > frozen.u.shape[-1]
    return _projected(x, frozen.v, frozen.trainable_mask, is_longer)


def _projected(x: Array, directions: Array, kept: Array, is_longer: bool) -> Array:
    """Project x [L, R, N] on the weak directions of [L, K, N], or remove the strong ones.

    The coefficients have a row for each direction: XLA on a CPU takes longer for their transpose.
    """
    if is_longer:
        strong = 1 - kept[: directions.shape[-2]]
        coefficients = (directions @ x.mT) * strong[None, :, None]
        return x - coefficients.mT @ directions
    rank = x.shape[-2]
    weak = directions[..., :rank, :]
    coefficients = (weak @ x.mT) * kept[None, :rank, None]
    return coefficients.mT @ weak


def _change(turned: Array, s: Array, s0: Array, long: Array, long0: Array) -> Array:
    """Return (I + turned) S long - S0 long0: [L, R, R], [L, R] and [L, R, N] to [L, R, N].

    Computed as a sum of differences. For a fresh adapter all differences are exactly zero, however
    a device multiplies matrices (NumPy multiplies a matrix with its own transpose by another
    routine), and no change is lost in rounding beside the weights.
    """
    by_long = s0[..., None] * (long - long0) + (s - s0)[..., None] * long
    return by_long + (turned * s[..., None, :]) @ long


def _check_ratio(config: AdapterConfig) -> None:
    asked = config.options.get(RATIO, "0.5")
    try:
        is_within = 0 < float(asked) < 1
    except ValueError:
        is_within = False
    if not is_within:
        raise UserError(
            f"{RATIO} is {asked[:64]!r}; it must be a number above 0, where nothing would be "
            "trained, and below 1, where nothing would be frozen: for that, ask for lora"
        )


def _given(frozen: SvdFactors | None) -> SvdFactors:
    assert frozen is not None, "osft works with the base weight's decomposition"
    return frozen


def _is_tall(frozen: SvdFactors) -> bool:
    """Return whether W [F, D] has at least as many outputs as inputs."""
    return bool(frozen.u.shape[-1] >= frozen.v.shape[-1])
