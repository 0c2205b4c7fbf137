"""Compile the engine's programs for a GPU on a machine without one.

The compiler is JAX's CUDA plugin, without a CUDA library. It refuses the same programs as on a GPU.
Programs do not run, so nothing is measured. The output has one line per program: its name, ok or
error, seconds, and bytes of temporary memory. The exit status is 1 if a program was refused.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from scripts.gpu_compile import norms
from scripts.gpu_compile.ceilings import CEILINGS
from scripts.gpu_compile.devices import GPUS
from scripts.gpu_compile.programs import Task, attention, closed_set, largest_plan
from scripts.gpu_compile.shapes import GROUPS, HEAD_DIMS, MODELS
from tuneserve_engine.backend.jax.precompile.absent_gpu import AbsentGpu
from tuneserve_engine.backend.jax.target import compiling_for

_SMALL = "qwen3-0.6b"
_USUAL = (_SMALL, "qwen3-8b")
_LEAST_RANK, _MAX_RANK = 8, 128
_REASON_CHARS = 300

Compile = Callable[[Task], int]
"""A function that compiles a program and returns the bytes of temporary memory that it needs."""


@dataclass(frozen=True)
class Result:
    name: str
    seconds: float
    temp_bytes: int = 0
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.name}  error  {self.seconds:.1f} s  {self.error}"
        return f"{self.name}  ok  {self.seconds:.1f} s  {self.temp_bytes:,} bytes"


def tasks(
    models: Iterable[str], *, layers: int, is_full: bool, with_kernels: bool, is_ci: bool = False
) -> Iterator[Task]:
    """Yield the programs to compile.

    These are all programs of the smallest model. Of the other models, unless ``is_full``, they are
    the programs that are compiled ahead for the lowest rank bucket and one target per position.
    Float32 kernels are compiled for the ends of the groups only, unless ``is_full``.

    With ``is_ci``, ``ceilings`` runs too: the programs that it compiles are left out for the other
    models, and lower rank buckets and micro-batches with one target per position for the smallest.
    Then kernels are compiled for the last group only, in bfloat16 for the first, too.
    """
    if with_kernels:
        last = GROUPS[-1:]
        groups = {"bfloat16": GROUPS, "float32": (GROUPS if is_full else GROUPS[:1] + last)}
        if is_ci:
            groups = {"bfloat16": GROUPS[:1] + last, "float32": last}
        for dtype, several in groups.items():
            yield from attention(HEAD_DIMS, dtype, several)
    for model in models:
        is_all = is_full or model == _SMALL
        config = replace(MODELS[model], layers=layers)
        found = largest_plan(config, _MAX_RANK if is_all else _LEAST_RANK)
        for task in closed_set(model, config, found, is_all=is_all):
            if not is_ci or _is_for_ci(task.name):
                yield task


def _is_for_ci(name: str) -> bool:
    model, program, *key = name.split(" ", 2)
    numbers = [int(number) for number in re.findall(r"\d+", " ".join(key))]
    if model != _SMALL:
        return (model, program) not in CEILINGS
    is_largest = not numbers or numbers[0] == _MAX_RANK
    return is_largest and not (program.endswith("_micro_batch") and numbers[1] == 1)


def compiled(tasks: Iterable[Task], compile_one: Compile, threads: int) -> Iterator[Result]:
    """Compile the tasks in threads, and yield the result of each as it ends."""

    def one(task: Task) -> Result:
        began_s = time.perf_counter()
        try:
            temp_bytes = compile_one(task)
        except Exception as error:  # of tracing or of the compiler: either way, it would not run
            reason = (str(error).splitlines() or [""])[0][:_REASON_CHARS]
            return Result(
                task.name,
                time.perf_counter() - began_s,
                error=f"{type(error).__name__}: {reason}",
            )
        return Result(task.name, time.perf_counter() - began_s, temp_bytes)

    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(one, tasks)


def report(results: Iterable[Result], gpu: str) -> int:
    """Print one line per result and a summary; return the exit status."""
    count, refused, began_s = 0, [], time.perf_counter()
    for result in results:
        count += 1
        print(result, flush=True)
        if result.error:
            refused.append(result)
    print(
        f"{count} programs compiled for an {gpu} in {time.perf_counter() - began_s:.0f} s", end=""
    )
    print(
        f"; {len(refused)} refused: {', '.join(each.name for each in refused)}" if refused else ""
    )
    return 1 if refused or not count else 0


def compile_for(target: AbsentGpu) -> Compile:
    """Return the function that compiles a program for the device."""

    def compile_one(task: Task) -> int:
        with target.lowering():
            lowered = task.lower(target.spec)
        return int(lowered.compile().memory_analysis().temp_size_in_bytes)

    return compile_one


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_compile", description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="default: two of them")
    parser.add_argument("--device", choices=GPUS, default="h200")
    parser.add_argument("--layers", type=int, default=2, help="layers of each model; default: 2")
    parser.add_argument("--full", action="store_true", help="every program of every model")
    parser.add_argument("--no-kernels", action="store_true", help="skip the attention kernels")
    parser.add_argument("--only", default="", help="only programs whose name contains this")
    parser.add_argument("--list", action="store_true", help="only print the names of the programs")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--norms", action="store_true", help="only compare the norms' kernels")
    options = parser.parse_args(arguments)
    if options.norms and (options.model or options.full or options.only or options.list):
        parser.error("--norms compiles its own programs; it takes --layers only")
    with compiling_for("gpu"):
        if options.norms:
            return norms.report(
                norms.comparisons(
                    _SMALL, options.layers, AbsentGpu(GPUS[options.device].description)
                )
            )
        asked = tasks(
            options.model or (MODELS if options.full else _USUAL),
            layers=options.layers,
            is_full=options.full,
            with_kernels=not options.no_kernels,
            is_ci=vars(options) == vars(parser.parse_args(["--list"] if options.list else [])),
        )
        asked = (task for task in asked if options.only in task.name)
        if options.list:
            print(*(task.name for task in asked), sep="\n")
            return 0
        results = compiled(
            asked, compile_for(AbsentGpu(GPUS[options.device].description)), options.threads
        )
        return report(results, GPUS[options.device].name)


if __name__ == "__main__":
    sys.exit(main())
