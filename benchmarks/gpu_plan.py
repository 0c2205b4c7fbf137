"""Predict the cost of a model's programs on an absent GPU.

    make gpu-plan ARGS="qwen3-0.6b qwen3-8b --device h200"

Compiles every program for the GPU (see ``scripts/gpu_compile``) and reads its optimised module: the
kernels that one call launches, its temporary memory, the milliseconds that a roofline predicts by
group, and copies of at least 16 MiB with their places. Nothing is measured.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from scripts.gpu_compile.devices import GPUS
from scripts.gpu_compile.forecast import Forecast, Load, forecasts
from scripts.gpu_compile.roofline import Group
from scripts.gpu_compile.shapes import MODELS
from tuneserve_engine.backend.jax.memory.planner import DoesNotFit, gib
from tuneserve_engine.backend.jax.sampling.adapter_slot_table import adapter_slot_count
from tuneserve_engine.backend.jax.target import compiling_for

PROGRAMS = ("train_micro_batch", "score_micro_batch", "decode")
COLUMNS = (
    "Model", "Program", "Kernels", "Temporary", *Group, "Total ms", "Tokens/s",
    "MFU, or share of the weight limit",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_plan", description=__doc__)
    parser.add_argument("model", nargs="+", choices=MODELS)
    parser.add_argument("--device", choices=GPUS, default="h200")
    parser.add_argument("--program", action="append", choices=PROGRAMS, help="default: all")
    parser.add_argument("--rank", type=int, choices=(8, 32, 128), default=32)
    parser.add_argument("--max-rank", type=int, choices=(8, 32, 128), help="default: the rank")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--chunk", type=int, help="tokens of a chunk, if not the planner's")
    parser.add_argument("--datum-tokens", type=int, default=1024)
    parser.add_argument("--context", type=int, default=1024, help="tokens before those decoded")
    parser.add_argument("--slots", type=int, default=8, help="decode slots")
    parser.add_argument("--adapters", type=int, help="adapters in use by the decode slots")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--top", type=int, default=0, help="list the most expensive kernels")
    options = parser.parse_args(arguments)
    most = adapter_slot_count(options.slots, is_shared=True)
    if options.adapters is not None and not 1 <= options.adapters <= most:
        parser.error(f"--adapters is {options.adapters}; {options.slots} slots use 1 to {most}")
    load = Load(
        tokens=options.tokens,
        datum_tokens=options.datum_tokens,
        context=options.context,
        slots=options.slots,
        adapters=options.adapters,
        rank=options.rank,
        max_rank=options.max_rank,
        chunk=options.chunk,
    )
    print(f"{GPUS[options.device].name}, rank {load.rank}, *predicted*")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    status = 0
    with compiling_for("gpu"):
        for model in options.model:
            config = MODELS[model]
            config = replace(config, layers=options.layers or config.layers)
            names = options.program or PROGRAMS
            try:
                for found in forecasts(model, config, GPUS[options.device], load, names):
                    print(*lines(model, found, options.top), sep="\n", flush=True)
            except DoesNotFit as error:
                print(f"{model}: {error}", file=sys.stderr)
                status = 1
    return status


def lines(model: str, found: Forecast, top: int) -> Iterator[str]:
    """Yield a row of the table, and below it the places of large copies and expensive kernels."""
    cost = found.cost
    cells = [model, found.program, f"{cost.kernels:,}", gib(found.temp_bytes)]
    cells += [f"{cost.seconds[group] * 1e3:.1f}" for group in Group]
    cells += [f"{cost.total_s * 1e3:.1f}", f"{found.rate:,.0f}", f"{found.share:.1%}"]
    yield f"| {' | '.join(cells)} |"
    for place, count in cost.copies.most_common(top or None):
        yield f"    copied: {gib(count)} {place}"
    for place, seconds in cost.places.most_common(top):
        yield f"    {seconds * 1e3:.2f} ms {place}"


if __name__ == "__main__":
    sys.exit(main())
