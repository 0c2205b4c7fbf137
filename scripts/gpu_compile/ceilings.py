"""Check that programs launch no more kernels and take no more memory than they once did.

    make gpu-compile        # after all programs compile

Training of two models at their full depth, rank 32, for an H200. Both figures are counted in the
compiled program; a ceiling is some 1 % above what the program needed when it was set. A change that
lowers a figure lowers its ceiling, too. Temporary memory also has to fit the planner's room.
"""

import sys
from dataclasses import dataclass

from scripts.gpu_compile.devices import GPUS
from scripts.gpu_compile.forecast import Forecast, Load, forecasts
from scripts.gpu_compile.shapes import MODELS
from scripts.gpu_compile.target import as_on_a_gpu

_PROGRAM = "train_micro_batch"


@dataclass(frozen=True)
class Ceiling:
    """Limits for one call of a program, on a micro-batch of 8,192 tokens."""

    kernels: int
    temp_bytes: int


CEILINGS = {
    "qwen3-0.6b": Ceiling(kernels=24_600, temp_bytes=1_640_000_000),
    "qwen3-8b": Ceiling(kernels=30_000, temp_bytes=1_730_000_000),
}


def violations(model: str, found: Forecast, ceiling: Ceiling) -> list[str]:
    """Return a line for every limit that the program exceeds."""
    compared = (
        ("kernels", found.cost.kernels, ceiling.kernels),
        ("bytes of temporary memory", found.temp_bytes, ceiling.temp_bytes),
        ("bytes of temporary memory", found.temp_bytes, found.planned_bytes),
    )
    return [
        f"{model} {found.program}: {value:,} {what}, the limit is {limit:,}"
        for what, value, limit in compared
        if value > limit
    ]


def main() -> int:
    found = []
    with as_on_a_gpu():
        for model, ceiling in CEILINGS.items():
            for each in forecasts(model, MODELS[model], GPUS["h200"], Load(), (_PROGRAM,)):
                kernels = f"{each.cost.kernels:,} of {ceiling.kernels:,} kernels"
                temp = f"{each.temp_bytes:,} of {ceiling.temp_bytes:,} bytes"
                temp += f", planned {each.planned_bytes:,}"
                print(f"{model} {each.program}: {kernels}, {temp}", flush=True)
                found += violations(model, each, ceiling)
    print("\n".join(found) or "no program is above its ceiling")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
