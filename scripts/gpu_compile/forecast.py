"""Predict the programs of training and decoding of one model on one GPU."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scripts.gpu_compile.devices import Gpu
from scripts.gpu_compile.hlo import Module
from scripts.gpu_compile.programs import Task, closed_set
from scripts.gpu_compile.roofline import Cost, Work, cost
from tuneserve_engine.backend.jax.attention.page_table import pages_per_round
from tuneserve_engine.backend.jax.memory.footprint import Footprint
from tuneserve_engine.backend.jax.memory.planner import Device, Plan, plan
from tuneserve_engine.backend.jax.memory.sizes import EngineShape
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.precompile.absent_gpu import AbsentGpu
from tuneserve_engine.backend.jax.sampling.adapter_slot_table import adapter_slot_count
from tuneserve_engine.backend.jax.sampling.programs import STEPS_PER_DISPATCH
from tuneserve_engine.backend.jax.training.head_chunks import head_chunk_blocks
from tuneserve_engine.core.backend_options import PlanRequest

_USABLE_SHARE = 0.92
"""The share of a GPU's memory that JAX may take: XLA_PYTHON_CLIENT_MEM_FRACTION."""
_HOST_BYTES = 2**38


@dataclass(frozen=True)
class Load:
    """The work that is predicted.

    A micro-batch of ``tokens`` in datums of ``datum_tokens``, all of them trained on, with adapters
    that train the unembedding; and decoding after ``context`` tokens with ``slots`` decode slots,
    which use ``adapters`` different adapters.
    """

    tokens: int = 8192
    datum_tokens: int = 1024
    context: int = 1024
    slots: int = 8
    adapters: int | None = None  # that decode together; as many as can unless given
    rank: int = 32
    max_rank: int | None = None  # of the worker; as high as the load's unless given
    chunk: int | None = None  # tokens of a chunk; the planner's unless given


@dataclass(frozen=True)
class Forecast:
    """The predicted cost of one call of a program. ``temp_bytes`` are exact."""

    program: str
    temp_bytes: int
    planned_bytes: int  # the planner's room for its temporary memory
    cost: Cost
    rate: float  # tokens per second
    share: float  # of the GPU's operations in training (MFU), of its weight limit in decoding


def forecasts(
    model: str, config: ModelConfig, gpu: Gpu, load: Load, names: Iterable[str]
) -> Iterator[Forecast]:
    """Compile the named programs of the load's rank, and yield the cost of each.

    Raises ``DoesNotFit`` if the model does not fit the GPU.
    """
    found = _plan(config, gpu, load)
    target = AbsentGpu(gpu.description)
    for task in closed_set(model, config, found, is_all=False):
        name = task.name.removeprefix(f"{model} ")
        program, _, key = name.partition(" ")
        if program in names and key.strip("(").split(",")[0] == str(load.rank):
            yield _forecast(name, task, target, gpu, config, found, load)


def plan_request(load: Load) -> PlanRequest:
    """Return the choices of a worker that is made for this load."""
    return PlanRequest(
        dtype="bfloat16",
        max_rank=load.max_rank or load.rank,
        batch_tokens=load.tokens,
        chunk_tokens=load.chunk,
        sample_rows=load.slots,
    )


def _plan(config: ModelConfig, gpu: Gpu, load: Load) -> Plan:
    usable = int(_USABLE_SHARE * gpu.memory_bytes)
    return plan(config, Device.accelerator("gpu", usable, _HOST_BYTES), plan_request(load))


def _forecast(  # noqa: PLR0913
    name: str, task: Task, target: AbsentGpu, gpu: Gpu, config: ModelConfig, found: Plan, load: Load
) -> Forecast:
    with target.lowering():
        lowered = task.lower(target.spec)
    compiled = lowered.compile()
    expected = cost(Module.parse(compiled.as_text() or ""), gpu, work(config, found, load))
    temp_bytes = int(compiled.memory_analysis().temp_size_in_bytes)
    footprint, planned = _footprint(config, found), planned_bytes(config, found, name)
    if name.startswith("decode"):
        steps = STEPS_PER_DISPATCH / expected.total_s
        limit = gpu.bandwidth / _weight_bytes(config, footprint)
        return Forecast(name, temp_bytes, planned, expected, steps * load.slots, steps / limit)
    rate = load.tokens / expected.total_s
    flops = token_flops(config, load.datum_tokens, is_trained=name.startswith("train"))
    return Forecast(name, temp_bytes, planned, expected, rate, rate * flops / gpu.flops)


def planned_bytes(config: ModelConfig, found: Plan, program: str) -> int:
    """Return the bytes that the planner counts for the temporary memory of the named program."""
    footprint = _footprint(config, found)
    lines = (footprint.sampling.drawing,) if program.startswith("decode") else footprint.temporaries
    return sum(line.bytes for line in lines)


def work(config: ModelConfig, found: Plan, load: Load) -> Work:
    """Return the rounds and branches of every loop and conditional under this load."""
    shapes = found.static_shapes
    head_blocks = head_chunk_blocks(shapes.block, shapes.chunk, config.vocab_size, "gpu")
    pages = shapes.block * pages_per_round("gpu")
    adapters = load.adapters or adapter_slot_count(load.slots, is_shared=True)
    position_bytes = 2 * 2 * config.kv_heads * config.head_dim  # a key and a value, bfloat16
    return Work(
        rounds={
            "chunks": math.ceil(load.tokens / shapes.chunk),
            "head_chunks": math.ceil(load.tokens / (head_blocks * shapes.block)),
            "head_gradient": 1,
            "trained_head": head_blocks,
            "first_blocks": 1,
            "pages": (load.context - 1 + STEPS_PER_DISPATCH) // pages + 1,
            "steps": STEPS_PER_DISPATCH,
        },
        is_taken=dict.fromkeys(
            ("gspo", "top_k", "top_p", "top_tokens", "logit_edits", "token_masks"), False
        ),
        attention_flops=2 * config.heads * config.head_dim * load.tokens * load.datum_tokens,
        page_bytes=load.slots * load.context * position_bytes,
        adapters=adapters,
        chunk_adapters=math.ceil(shapes.chunk / load.datum_tokens),
    )


def token_flops(config: ModelConfig, datum_tokens: int, *, is_trained: bool) -> float:
    """Return the useful operations per token, as MFU counts them (PaLM, appendix B).

    A product with a weight costs two per parameter in the forward pass and two in the backward
    pass: the weights are frozen, so their gradients are not counted. Causal attention costs twice
    as much in the backward pass as in the forward pass. Adapters count nothing.
    """
    layer = 2 * config.hidden * (config.heads + config.kv_heads) * config.head_dim
    layer += 3 * config.hidden * config.intermediate
    weights = config.layers * layer + config.vocab_size * config.hidden
    attention = 2.0 * config.layers * config.heads * config.head_dim * datum_tokens
    return 4.0 * weights + 3 * attention if is_trained else 2.0 * weights + attention


def _footprint(config: ModelConfig, found: Plan) -> Footprint:
    shape = EngineShape(
        found.static_shapes, found.remat, found.sample_rows, 1, "bfloat16", "gpu", found.kv_pages
    )
    return Footprint(config, shape)


def _weight_bytes(config: ModelConfig, footprint: Footprint) -> int:
    """Return the bytes that a decoding step has to read: every weight but the embedding's rows."""
    embedding = 0 if config.tied_embeddings else 2 * config.vocab_size * config.hidden
    return footprint.base.bytes - embedding
