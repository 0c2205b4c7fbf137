"""The GPUs to compile for: their descriptions for the compiler, and their rates."""

from dataclasses import dataclass

from tuneserve_engine.backend.jax.precompile.absent_gpu import description


@dataclass(frozen=True)
class Gpu:
    """A GPU. Rates are those of its data sheet, for dense products and for memory."""

    name: str
    flops: float  # per second, of products in bfloat16
    bandwidth: float  # bytes per second
    processors: int
    memory_bytes: int
    description: str
    """XLA's ``GpuTargetConfigProto``, as text."""


GPUS = {
    "h200": Gpu("H200", 989e12, 4.8e12, 132, 151_397_597_184, description("h200")),
    "h100": Gpu("H100", 989e12, 3.35e12, 132, 84_942_979_072, description("h100")),
    "l40s": Gpu("L40S", 362e12, 0.864e12, 142, 47_697_362_944, description("l40s")),
}
