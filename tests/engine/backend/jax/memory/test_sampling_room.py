"""The planner counts what sampling holds, and no less than its programs need."""

from dataclasses import dataclass, replace
from typing import Any

from tests.engine.backend.jax.memory.footprint_case import (
    DTYPES,
    EVERY_SHAPE,
    MODELS,
    QWEN3,
    SHAPES,
    STATIC_SHAPES,
    decoder,
    footprint,
    size,
)
from tests.support.compiled import memory_of
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.sampling.kv_pages import most_pages
from tuneserve_engine.backend.jax.sampling.logit_edits import no_edits
from tuneserve_engine.backend.jax.sampling.programs import Programs
from tuneserve_engine.backend.jax.sampling.token_masks import no_masks
from tuneserve_engine.core.shapes import StaticShapes

ROWS = 5


@dataclass(frozen=True)
class Sampling:
    """The sampler's programs, for the highest ranks."""

    programs: Programs

    @classmethod
    def of(cls, config: ModelConfig, static_shapes: StaticShapes, dtype: Any) -> "Sampling":
        model, pages = (
            decoder(config, dtype, static_shapes=static_shapes),
            most_pages(static_shapes, ROWS),
        )
        return cls(Programs(ProgramRegistry(), model, static_shapes, slots=ROWS, pages=pages))

    def arguments(self, name: str, which: int = -1) -> list[int]:
        """The bytes of each argument."""
        return [size(specs) for specs in self._shape(name, which)._specs()]

    def takes(self, name: str) -> int:
        """The bytes that the program needs while it runs, its results included."""
        memory = memory_of(self._shape(name).lowered(lambda x: x))
        returned = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return int(memory.temp_size_in_bytes + returned)

    def _shape(self, name: str, which: int = -1) -> Any:
        return getattr(self.programs, name).shapes()[which]


@MODELS
@DTYPES
def test_sampling_has_unstacked_layers_kv_pages_and_an_adapter_per_decode_slot(
    config: ModelConfig, dtype: Any
) -> None:
    counted = footprint(config, dtype=dtype, sample_rows=ROWS, snapshots=3).sampling
    sampling = Sampling.of(config, STATIC_SHAPES, dtype)
    pages, weights, *_ = sampling.arguments("decode")
    slots = sum(sampling.arguments("decode", which)[2] for which in range(2))
    *_, snapshot = sampling.arguments("set_slot_adapter")
    *_, empty = sampling.arguments("set_slot_adapter", which=0)
    scale = 4
    assert counted.unstacked.bytes == weights
    assert counted.caches.bytes == pages
    assert counted.decode_adapters.bytes == slots - 2 * ROWS * scale  # each rank bucket has its own
    assert counted.snapshot_bytes == 3 * (snapshot - scale)
    assert counted.snapshots.bytes == counted.snapshot_bytes + empty - scale


@EVERY_SHAPE
def test_logit_edits_have_a_copy_per_rank_bucket_and_one_in_progress(name: str, dtype: Any) -> None:
    """A dispatch also has the drawn tokens twice: those before it, and with those of the dispatch.

    The rest of a state's arrays are some bytes per row, except for the page table.
    """
    config, static_shapes = SHAPES[name]
    counted = footprint(config, dtype=dtype, static_shapes=static_shapes, sample_rows=ROWS)
    edits = no_edits(ROWS, static_shapes.context_length)
    arrays = len(static_shapes.rank_buckets) + 1
    line = counted.sampling.logit_edits
    assert line in counted.sampling.lines
    assert line.bytes == arrays * (size(edits) - edits.asked.nbytes) + 2 * edits.drawn.nbytes
    state = Sampling.of(config, static_shapes, dtype).arguments("decode")[3]
    sent = size(edits) + size(no_masks(ROWS, config.vocab_size))
    assert sent <= state <= sent + ROWS * (64 + 4 * static_shapes.context_length)


@EVERY_SHAPE
def test_token_masks_have_a_copy_per_rank_bucket_and_one_in_progress(name: str, dtype: Any) -> None:
    config, static_shapes = SHAPES[name]
    counted = footprint(config, dtype=dtype, static_shapes=static_shapes, sample_rows=ROWS)
    masks = no_masks(ROWS, config.vocab_size)
    line = counted.sampling.token_masks
    assert line in counted.sampling.lines
    assert line.bytes == (len(static_shapes.rank_buckets) + 1) * masks.words.nbytes
    assert 8 * masks.words.nbytes >= ROWS * config.vocab_size


def test_decode_slots_of_a_gpu_share_adapter_slots() -> None:
    """By hand: 16 at most, on a CPU one per decode slot."""
    few, many = (footprint(QWEN3, sample_rows=rows).sampling for rows in (8, 64))
    one = few.decode_adapters.bytes // 8
    on_a_gpu = (replace(each, shape=replace(each.shape, device_kind="gpu")) for each in (few, many))
    assert many.decode_adapters.bytes == 64 * one
    assert [each.decode_adapters.bytes for each in on_a_gpu] == [8 * one, 16 * one]


def test_a_gpu_has_no_second_copy_of_the_layers() -> None:
    on_a_cpu, on_a_gpu = (
        {
            line.name
            for line in replace(counted, shape=replace(counted.shape, device_kind=kind)).lines
        }
        for counted in [footprint(QWEN3)]
        for kind in ("cpu", "gpu")
    )
    assert on_a_cpu - on_a_gpu == {"layers for sampling"}


@EVERY_SHAPE
def test_programs_of_sampling_need_no_more_extra_memory_than_planned(name: str, dtype: Any) -> None:
    config, static_shapes = SHAPES[name]
    counted = footprint(config, dtype=dtype, static_shapes=static_shapes, sample_rows=ROWS)
    room, sampling = counted.sampling, Sampling.of(config, static_shapes, dtype)
    wide = sum(line.bytes for line in counted.wide_copies)
    assert sampling.takes("prefill") <= room.prompt.bytes + counted.chunk.bytes + wide
    assert sampling.takes("decode") <= room.drawing.bytes + wide
    assert sampling.takes("score") <= room.scoring.bytes + wide
    assert sampling.takes("copy") <= room.caches.bytes // 2 + wide
