"""A step of kinds of adapters other than LoRA: the directions that it changes, and its memory."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.adapters import osft_case
from tests.engine.adapters.osft_case import base_of, change, config_of, leaks
from tests.support.compiled import memory_of
from tuneserve_engine.adapters.kinds import KINDS
from tuneserve_engine.backend.jax.adapters.arrays import (
    LORA,
    LoraWeights,
    TrainingAdapter,
    in_tree,
    part_shapes,
)
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.training.adamw import step_scalars
from tuneserve_engine.backend.jax.training.kind_programs import (
    KindPrograms,
    kind_step,
    specs_of,
    step_specs,
)
from tuneserve_engine.core.adapter import UNEMBED, AdamwParams, AdapterConfig
from tuneserve_engine.core.shapes import StaticShapes

RANK = 32
WIDE = {
    "q_proj": (4, 128, 128),
    "k_proj": (4, 128, 64),
    "gate_proj": (4, 128, 384),
    "down_proj": (4, 384, 128),
    UNEMBED: (128, 1024),
}
"""Square and rectangular shapes, whose sides are far larger than the rank."""


def size(shape: tuple[int, ...]) -> int:
    return 4 * math.prod(shape)


@pytest.mark.parametrize("shape", [osft_case.WIDE, osft_case.TALL], ids=["wide", "tall"])
@pytest.mark.parametrize("form", ["factors", "short_fixed", "core"])
def test_steps_leave_the_strong_directions_alone(form: str, shape: tuple[int, int]):
    kind, base, rank = KINDS["osft"][form], base_of(shape), osft_case.RANK
    frozen, random = base.frozen(rank), np.random.default_rng(3)
    fresh = kind.initial(config_of(rank), 0, base.shape, frozen)
    weights = {part: {"q_proj": array} for part, array in fresh.items()}
    first = second = jax.tree.map(np.zeros_like, weights)
    step = jax.jit(partial(kind_step, kind, {"q_proj": base.shape}))
    layers, inputs, outputs = base.shape
    for number in range(1, 6):
        a, b = (
            random.standard_normal(pair).astype(np.float32)
            for pair in ((layers, inputs, rank), (layers, rank, outputs))
        )
        gradient = LoraWeights({"q_proj": a}, {"q_proj": b})
        scalars = step_scalars(AdamwParams(learning_rate=1e-2, weight_decay=0.1), number)
        stepped = step(weights, first, second, gradient, scalars, {"q_proj": frozen})
        weights, first, second = stepped.weights, stepped.first_moment, stepped.second_moment
    delta = change({part: of["q_proj"] for part, of in weights.items()}, frozen, rank)
    assert np.linalg.norm(delta) > 1e-3 * np.linalg.norm(base.w)
    assert max(leaks(delta, base, rank)) <= 1e-5


def test_pairs_alone_compile_one_program_which_is_no_surprise() -> None:
    kind, registry = KINDS["osft"]["core"], ProgramRegistry()
    programs = KindPrograms(registry, WIDE, StaticShapes(64, rank_buckets=(8, RANK)))
    registry.compile_ahead(1)
    assert registry.wait(60)
    options = {"form": "core"}
    config = AdapterConfig(5, 0.0, 0, train_unembed=False, kind="osft", options=options)
    frozen = jax.tree.map(jnp.zeros_like, step_specs(kind, WIDE, 8, RANK)[-1])
    own, pair = (
        in_tree(jax.tree.map(jnp.zeros_like, specs_of(part_shapes(WIDE, 8, each))))
        for each in (kind, LORA)
    )
    adapter = TrainingAdapter(config, WIDE, 8, own, own, own, pair, frozen)
    before = registry.compilations_after_ready
    programs.prepare_pairs(adapter)
    assert [each.name for each in registry.shapes()] == ["pairs_osft_core 8"]
    assert all(each.is_compiled for each in registry.shapes())
    programs.pairs(adapter)
    assert registry.compilations_after_ready == before
    assert not programs.is_prepared(kind)


@pytest.mark.acceptance("S4")
@pytest.mark.parametrize(
    ("form", "pairs"), [("factors", 2.0), ("short_fixed", 1.4), ("core", 1.06)]
)
def test_a_step_reuses_its_arguments_and_needs_little_more(form: str, pairs: float):
    """The temporary memory has the size of ``pairs`` pairs of the rank. The limit is four pairs."""
    kind = KINDS["osft"][form]
    programs = KindPrograms(ProgramRegistry(), WIDE, StaticShapes(64, rank_buckets=(RANK,)))
    programs._declare(kind)
    (step,) = programs._steps[kind.program].shapes()
    memory = memory_of(step.lowered(lambda x: x))
    own = sum(size(part) for s in WIDE.values() for part in kind.parameter_shapes(s, RANK).values())
    pair = sum(size((*layers, i + o, RANK)) for *layers, i, o in WIDE.values())
    assert memory.alias_size_in_bytes == 3 * own + pair
    assert memory.temp_size_in_bytes <= pairs * pair
