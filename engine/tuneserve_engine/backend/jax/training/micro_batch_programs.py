"""The programs that run micro-batches, and those that allocate their workspace."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from tuneserve_engine.backend.jax.adapters.arrays import TargetShapes, target_shapes
from tuneserve_engine.backend.jax.mesh import OWN, WHOLE, DeviceMesh, Parts
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.programs.registry import Program, ProgramRegistry
from tuneserve_engine.backend.jax.training.adapter_slots import AdapterSlots, new_adapter_slots
from tuneserve_engine.backend.jax.training.programs import (
    TrainedMicroBatch,
    score_micro_batch,
    space_shapes,
    train_micro_batch,
)
from tuneserve_engine.backend.jax.training.rounds import round_specs, scores_of_all
from tuneserve_engine.core.shapes import StaticShapes

_TRAINED = TrainedMicroBatch(WHOLE, OWN, OWN)  # type: ignore[arg-type]
_BY = "by rank bucket, targets per token and blocks"


class MicroBatchPrograms:
    """The programs of a round: ``score`` and ``train``, by whether a datum is divided.

    The model is in evaluation mode afterwards.
    """

    def __init__(
        self, programs: ProgramRegistry, model: Decoder, static_shapes: StaticShapes
    ) -> None:
        self._static_shapes = static_shapes
        self._mesh = programs.mesh
        of_all = partial(scores_of_all, devices=self._mesh.count)
        may_divide = static_shapes.devices_per_datum > 1
        model.train()  # type: ignore[no-untyped-call]
        self.train = {
            is_divided: programs.add_program(
                "train_divided_datum" if is_divided else "train_micro_batch",
                of_all(_for_parts(train_micro_batch, is_divided)),
                use=f"forward_backward {_BY}",
                model=model,
                donate=(0, 1),
                parts=Parts((OWN, OWN, WHOLE, OWN), _TRAINED),
            )
            for is_divided in (False, True)[: 1 + may_divide]
        }
        model.eval()  # type: ignore[no-untyped-call]
        self.score = {
            is_divided: programs.add_program(
                "score_divided_datum" if is_divided else "score_micro_batch",
                of_all(_for_parts(score_micro_batch, is_divided)),
                use=f"forward {_BY}",
                model=model,
                parts=Parts((WHOLE, OWN), WHOLE),
            )
            for is_divided in self.train
        }
        # Programs keep it, so it must not keep a trainer, which has the buffers.
        shapes = target_shapes(model.config)
        self._specs_of_space = cache(partial(_specs_of_space, model, shapes, static_shapes))
        self.empty_space = cache(partial(_empty_space, programs, self._specs_of_space))

    def declare(
        self, rank_bucket: int, adapter_slots: Any, gradient_slots: Any, order: int
    ) -> None:
        """Declare the programs of a rank bucket; the specs are those of its slots."""
        blocks = self._static_shapes.micro_batch_tokens // self._static_shapes.block
        for targets in self._static_shapes.target_buckets:
            device_batch = round_specs(self._static_shapes, targets, self._mesh.count)
            key = rank_bucket, targets, blocks
            arguments = gradient_slots, adapter_slots, device_batch
            space = self._mesh, self._specs_of_space, blocks
            specs = partial(_train_specs, *space, arguments)
            for is_divided, train in self.train.items():
                late = order + (targets > 1) + 2 * is_divided
                train.declare_later(key, specs, order=late)
                self.score[is_divided].declare(key, adapter_slots, device_batch, order=late + 1)


def new_slots(shapes: TargetShapes, static_shapes: StaticShapes, rank_bucket: int) -> AdapterSlots:
    """Return empty slots for the requests of a batch."""
    return new_adapter_slots(shapes, rank_bucket, static_shapes.slots(rank_bucket))


def _for_parts(program: Callable[..., Any], is_divided: bool) -> Callable[..., Any]:
    return partial(program, is_divided=True) if is_divided else program


def _specs_of_space(
    model: Decoder, shapes: TargetShapes, static_shapes: StaticShapes, blocks: int
) -> Any:
    """Return the specs of the workspace for ``blocks`` blocks. Tracing them takes time.

    It has room for the highest rank bucket, so that one workspace serves all of them.
    """
    empty = partial(new_slots, shapes, static_shapes, static_shapes.max_rank)
    return space_shapes(model, jax.eval_shape(empty), blocks)


def _empty_space(
    programs: ProgramRegistry, specs_of_space: Callable[[int], Any], blocks: int
) -> Program:
    """Return a new program without arguments, whose result is a workspace of zeros."""

    def empty() -> Any:
        specs = specs_of_space(blocks)
        return jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), specs)

    return programs.add_program(
        "empty_space", empty, use="forward_backward by blocks", parts=Parts((), OWN)
    )


def _train_specs(
    mesh: DeviceMesh,
    specs_of_space: Callable[[int], Any],
    blocks: int,
    arguments: tuple[Any, ...],
) -> tuple[Any, ...]:
    return (mesh.of_all(specs_of_space(blocks)), *arguments)
