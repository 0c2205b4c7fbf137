"""Print the table of the least GPU memory for published models, for docs/guides/gpu-sizing.md.

The figures are those of the memory plan, which needs no GPU: the smallest memory, in whole GiB,
with which ``tuneserve plan`` finds a plan for adapters of rank 32.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from scripts.gpu_compile.shapes import MODELS
from tuneserve_engine.backend.jax.memory.planner import Device, DoesNotFit, plan
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.core.backend_options import DType, PlanRequest

GIB = 2**30
CONTEXTS = 4_096, 32_768
LARGEST_GIB = 1_024
DTYPES: tuple[DType, ...] = "bfloat16", "float32"


def requests(dtype: DType) -> list[PlanRequest]:
    """Return what the columns of the table ask for."""
    asked = [
        PlanRequest(dtype=dtype, max_context_tokens=context, max_rank=32) for context in CONTEXTS
    ]
    return [*asked, replace(asked[0], sample_only=True)]


def fits(config: ModelConfig, request: PlanRequest, gib: int) -> bool:
    """Return whether there is a plan for a GPU with so much memory."""
    try:
        plan(config, Device.accelerator("gpu", gib * GIB, LARGEST_GIB * GIB), request)
    except DoesNotFit:
        return False
    return True


def least_gib(config: ModelConfig, request: PlanRequest) -> int:
    """Return the least memory with which there is a plan, in GiB."""
    return bisect_left(range(LARGEST_GIB), True, key=lambda gib: fits(config, request, gib))


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    contexts = " | ".join(f"training, context {context:,}" for context in CONTEXTS)
    yield f"| Model | Type | {contexts} | only sampling, context {CONTEXTS[0]:,} |"
    yield "|---|---|---|---|---|"
    for name, config in MODELS.items():
        for dtype in DTYPES:
            cells = [f"{least_gib(config, each)} GiB" for each in requests(dtype)]
            yield f"| {' | '.join([name, dtype, *cells])} |"


if __name__ == "__main__":
    print("\n".join(rows()))
