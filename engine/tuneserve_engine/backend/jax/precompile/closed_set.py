"""A worker's closed set of programs, from shapes alone: no weights or other arrays exist."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tuneserve_engine.adapters.kinds.base import AdapterKind
from tuneserve_engine.backend.jax.memory.planner import Plan
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.sampling.programs import Programs
from tuneserve_engine.backend.jax.training.trainer import Trainer
from tuneserve_engine.core.backend_options import Remat


class _Weight(jax.ShapeDtypeStruct):
    """A stand-in for a weight. The engine reads it as a whole, or (shapes only) by layer."""

    def __getitem__(self, index: Any) -> Any:
        return self if index is Ellipsis else jnp.zeros(self.shape[1:], self.dtype)


def worker_programs(
    config: ModelConfig,
    plan: Plan,
    programs: ProgramRegistry | None = None,
    *,
    remat: Remat | None = None,
    kinds: Iterable[AdapterKind] = (),
) -> ProgramRegistry:
    """Return the programs that a worker with this plan compiles ahead.

    They are added to ``programs``, which is for the plan's devices; by default, to a new registry
    for JAX's default device. ``remat`` is the plan's unless given. ``kinds`` are kinds of adapters
    other than LoRA, whose programs a worker compiles at the first request for them.
    """
    programs = programs or ProgramRegistry()
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=plan.dtype))
    state = nnx.state(decoder)
    nnx.update(decoder, jax.tree.map(_stand_in, state))
    decoder.remat = remat or plan.remat
    decoder.use_shapes(plan.static_shapes)
    trainer = Trainer(programs, decoder, plan.static_shapes)
    if plan.trains:
        trainer.declare()
    slots, pages = plan.sample_rows, plan.kv_pages
    Programs(programs, decoder, plan.static_shapes, slots=slots, pages=pages)
    for kind in kinds:
        trainer.prepare(kind)
    return programs


def _stand_in(weight: Any) -> _Weight:
    return _Weight(weight.shape, weight.dtype)  # type: ignore[no-untyped-call]
