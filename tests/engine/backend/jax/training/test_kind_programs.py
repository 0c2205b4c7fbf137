"""The memory of a compiled step for kinds of adapters other than LoRA."""

import math

import pytest

from tuneserve_engine.adapters.kinds import KINDS
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.training.kind_programs import KindPrograms
from tuneserve_engine.core.adapter import UNEMBED
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
    memory = step.compiled().memory_analysis()
    own = sum(size(part) for s in WIDE.values() for part in kind.parameter_shapes(s, RANK).values())
    pair = sum(size((*layers, i + o, RANK)) for *layers, i, o in WIDE.values())
    assert memory.alias_size_in_bytes == 3 * own + pair
    assert memory.temp_size_in_bytes <= pairs * pair
