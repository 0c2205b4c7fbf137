"""Check that programs launch no more kernels and take no more memory than they once did.

    make gpu-compile        # which also compiles every program

Training and decoding of two models at their full depth, rank 32, for an H200. A micro-batch of the
smaller model is one chunk, so that layers without a loop over chunks are checked, too. Both
figures are counted in the compiled program, whose need was up to 1 % below the ceiling when it was
set. A change that lowers a figure lowers its ceiling, too. Temporary memory also has to fit the
planner's room, which may be 10 % larger. Decoding may not copy or turn an array of 16 MiB or more.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from scripts.gpu_compile.devices import GPUS
from scripts.gpu_compile.forecast import Forecast, Load, forecasts
from scripts.gpu_compile.shapes import MODELS
from tuneserve_engine.backend.jax.target import compiling_for

_WITHOUT_COPIES = "decode"
_THREADS = 2


@dataclass(frozen=True)
class Ceiling:
    """Limits for one call of a program: training on 8,192 tokens, or decoding in 8 slots."""

    kernels: int
    temp_bytes: int
    chunk: int | None = None  # tokens; the planner's choice unless given


CEILINGS = {
    ("qwen3-8b", "train_micro_batch"): Ceiling(kernels=17_660, temp_bytes=1_676_000_000),
    ("qwen3-0.6b", "train_micro_batch"): Ceiling(
        kernels=3_510, temp_bytes=1_597_000_000, chunk=8192
    ),
    ("qwen3-8b", "decode"): Ceiling(kernels=3_660, temp_bytes=35_500_000),
    ("qwen3-0.6b", "decode"): Ceiling(kernels=2_890, temp_bytes=34_600_000),
}


def violations(model: str, found: Forecast, ceiling: Ceiling) -> list[str]:
    """Return a line for every limit that the program exceeds."""
    compared = (
        ("kernels", found.cost.kernels, ceiling.kernels),
        ("bytes of temporary memory", found.temp_bytes, ceiling.temp_bytes),
        ("bytes of temporary memory", found.temp_bytes, found.planned_bytes),
        ("planned bytes of temporary memory", found.planned_bytes, int(1.1 * found.temp_bytes)),
    )
    lines = [
        f"{model} {found.program}: {value:,} {what}, the limit is {limit:,}"
        for what, value, limit in compared
        if value > limit
    ]
    copies = found.cost.copies if found.program.startswith(_WITHOUT_COPIES) else {}
    lines += [
        f"{model} {found.program}: copies {count:,} bytes, {place}"
        for place, count in copies.items()
    ]
    return lines


def main() -> int:
    failed = []
    with compiling_for("gpu"), ThreadPoolExecutor(_THREADS) as pool:
        results = pool.map(_forecast, CEILINGS, CEILINGS.values())
        for ((model, _), ceiling), found in zip(CEILINGS.items(), results, strict=True):
            kernels = f"{found.cost.kernels:,} of {ceiling.kernels:,} kernels"
            temp = f"{found.temp_bytes:,} of {ceiling.temp_bytes:,} bytes"
            temp += f", planned {found.planned_bytes:,}"
            print(f"{model} {found.program}: {kernels}, {temp}", flush=True)
            failed += violations(model, found, ceiling)
    print("\n".join(failed) or "no program is above its ceiling")
    return 1 if failed else 0


def _forecast(key: tuple[str, str], ceiling: Ceiling) -> Forecast:
    model, program = key
    load = Load(chunk=ceiling.chunk)
    (found,) = forecasts(model, MODELS[model], GPUS["h200"], load, (program,))
    return found


if __name__ == "__main__":
    sys.exit(main())
