"""Programs for kinds of adapters other than LoRA: their (A, B) pairs, and their optimizer step.

Dimension key: L layers, R rank bucket, K directions of a decomposition.
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tuneserve_engine.adapters.kinds import KINDS
from tuneserve_engine.adapters.kinds.base import (
    AdapterKind,
    SvdFactors,
    decomposition_shapes,
    mask_size,
)
from tuneserve_engine.backend.jax.adapters.arrays import (
    LORA,
    LoraWeights,
    PartShapes,
    TargetShapes,
    TrainingAdapter,
    Weights,
    by_target,
    in_tree,
    part_shapes,
)
from tuneserve_engine.backend.jax.programs.registry import Program, ProgramRegistry
from tuneserve_engine.backend.jax.specs import spec
from tuneserve_engine.backend.jax.training.adamw import (
    SteppedAdapter,
    StepScalars,
    adamw,
    step_scalars,
)
from tuneserve_engine.core.adapter import UNEMBED, AdamwParams
from tuneserve_engine.core.shapes import StaticShapes

FrozenOfTargets = dict[str, SvdFactors] | None


class KindPrograms:
    """Two programs for every kind of adapter whose arrays are not the pairs (A, B) themselves.

    They are declared and compiled when an adapter of the kind is first asked for, so that tenants
    without such adapters do not wait for them.
    """

    def __init__(
        self, programs: ProgramRegistry, shapes: TargetShapes, static_shapes: StaticShapes
    ) -> None:
        self._programs = programs
        self._shapes = shapes
        self._static_shapes = static_shapes
        self._pairs: dict[str, Program] = {}
        self._steps: dict[str, Program] = {}
        self._prepared: set[str] = set()
        self._lock = threading.Lock()
        for kind in (kind for forms in KINDS.values() for kind in forms.values() if kind.program):
            name = kind.program
            if name not in self._pairs:
                use = f"adapters of {kind.name} by rank bucket"
                self._pairs[name] = programs.add_program(
                    f"pairs_{name}", partial(pairs_of, kind, shapes), use=use
                )
                self._steps[name] = programs.add_program(
                    f"step_{name}", partial(kind_step, kind, shapes), use=use, donate=(0, 1, 2, 3)
                )

    def pairs(self, adapter: TrainingAdapter) -> LoraWeights:
        """Return the pairs that the model computes with."""
        if not adapter.kind.program:
            return adapter.weights  # type: ignore[return-value]
        run = self._pairs[adapter.kind.program]
        pairs: LoraWeights = run(adapter.rank_bucket, adapter.weights, adapter.frozen)
        return pairs

    def step(self, adapter: TrainingAdapter) -> Callable[..., SteppedAdapter] | None:
        """Return ``adamw_step`` for the adapter's kind; None for one whose arrays are the pairs."""
        program = adapter.kind.program
        if not program:
            return None

        def run(*args: Any) -> SteppedAdapter:
            stepped: SteppedAdapter = self._steps[program](
                adapter.rank_bucket, *args, adapter.frozen
            )
            return stepped

        return run

    def prepare(self, kind: AdapterKind) -> None:
        """Compile the kind's programs if that is not done; concurrent callers wait."""
        if not kind.program:
            return
        with self._lock:
            if kind.program not in self._prepared:
                self._declare(kind)
                self._programs.compile_on_demand(
                    [*self._pairs[kind.program].shapes(), *self._steps[kind.program].shapes()]
                )
                self._prepared.add(kind.program)

    def prepare_pairs(self, adapter: TrainingAdapter) -> None:
        """Compile the one program that ``pairs`` needs, if an adapter of the kind is not trained.

        It waits neither for other programs nor for ``prepare``.
        """
        if adapter.kind.program and adapter.kind.program not in self._prepared:
            self._declare_pairs(adapter.kind, adapter.rank_bucket, order=0)
            pairs = self._pairs[adapter.kind.program].shape(adapter.rank_bucket)
            self._programs.compile_on_demand([pairs])

    def is_prepared(self, kind: AdapterKind) -> bool:
        return not kind.program or kind.program in self._prepared

    def _declare(self, kind: AdapterKind) -> None:
        for order, rank_bucket in enumerate(self._static_shapes.rank_buckets):
            specs = self._declare_pairs(kind, rank_bucket, order)
            self._steps[kind.program].declare(rank_bucket, *specs, order=order)

    def _declare_pairs(self, kind: AdapterKind, rank_bucket: int, order: int) -> tuple[Any, ...]:
        """Declare the pairs of one rank bucket; return ``step_specs``."""
        specs = step_specs(kind, self._shapes, rank_bucket, self._static_shapes.max_rank)
        own, *_, frozen = specs
        self._pairs[kind.program].declare(rank_bucket, own, frozen, order=order)
        return specs


def step_specs(
    kind: AdapterKind, shapes: TargetShapes, rank_bucket: int, max_rank: int
) -> tuple[Any, ...]:
    """Return specs of the arguments of ``kind_step`` after ``shapes``, to compile it with."""
    own = in_tree(specs_of(part_shapes(shapes, rank_bucket, kind)))
    pairs = in_tree(specs_of(part_shapes(shapes, rank_bucket, LORA)))
    frozen = None
    if kind.needs_decomposition:
        frozen = {
            name: frozen_spec(decomposition_shapes(shape, max_rank))
            for name, shape in shapes.items()
            if name != UNEMBED
        }
    return own, own, own, pairs, step_scalars(AdamwParams(), 1), frozen


def pairs_of(
    kind: AdapterKind, shapes: TargetShapes, weights: Weights, frozen: FrozenOfTargets
) -> LoraWeights:
    """Return the pairs, padded like the weights; zeros for what the kind does not train."""
    parts = by_target(weights)
    a, b = {}, {}
    with jax.default_matmul_precision("highest"):
        for name, own in parts.items():
            a[name], b[name] = kind.lora_pair(own, frozen[name] if frozen else None)
    rank = next(iter(a.values())).shape[-1]
    for name in [name for name in shapes if name not in parts]:
        padded = LORA.parameter_shapes(shapes[name], rank)
        a[name], b[name] = jnp.zeros(padded["A"]), jnp.zeros(padded["B"])
    return LoraWeights(a, b)


def kind_step(  # noqa: PLR0913
    kind: AdapterKind,
    shapes: TargetShapes,
    weights: Weights,
    first_moment: Weights,
    second_moment: Weights,
    accumulator: LoraWeights,
    scalars: StepScalars,
    frozen: FrozenOfTargets,
) -> SteppedAdapter:
    """Take one AdamW step on the accumulated gradient of the pairs.

    The gradient is pulled back to the kind's own arrays and projected before it is clipped, so that
    clipping, moments and the reported norm see the gradient that is used. The new weights are
    projected again, because AdamW divides each entry by a different number and so leaves the
    projection's space.
    """
    _, pull = jax.vjp(lambda own: pairs_of(kind, shapes, own, frozen), weights)
    (gradient,) = pull(accumulator)
    gradient = _projected(kind, gradient, frozen)
    new, mean, square, norm = adamw(weights, first_moment, second_moment, gradient, scalars)
    empty = jax.tree.map(jnp.zeros_like, accumulator)
    return SteppedAdapter(_projected(kind, new, frozen), mean, square, empty, norm)


def _projected(kind: AdapterKind, weights: Weights, frozen: FrozenOfTargets) -> Weights:
    found: dict[str, dict[str, Any]] = {}
    # For every dtype of the base model: in TF32, projections leave 4e-4 of what they remove.
    with jax.default_matmul_precision("highest"):
        for name, own in by_target(weights).items():
            for part, x in kind.project(own, frozen[name] if frozen else None).items():
                found.setdefault(part, {})[name] = x
    projected: Weights = in_tree(found)
    return projected


def specs_of(shapes: PartShapes) -> dict[str, dict[str, Any]]:
    """Return specs of float32 arrays of these shapes, to compile with."""
    return {
        part: {name: spec(shape, np.float32) for name, shape in of.items()}
        for part, of in shapes.items()
    }


def frozen_spec(shapes: Mapping[str, tuple[int, ...]]) -> SvdFactors:
    """Return ``SvdFactors`` of array specs; the mask is as long as the longer side."""
    size = mask_size(shapes)
    u, s, v = (spec(shapes[part], np.float32) for part in "usv")
    return SvdFactors(u, s, v, spec((size,), np.float32))
