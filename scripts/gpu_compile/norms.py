"""Compare the kernels of the norms in scoring and in training, as compiled for an absent GPU.

A sum on a GPU depends on the kernel that computes it. Training and scoring have the same logprobs
only if their norms are the same kernels, whatever training keeps for its backward pass.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple, get_args

from scripts.gpu_compile.hlo import Computation, Instruction, Module
from scripts.gpu_compile.programs import Task, closed_set, largest_plan
from scripts.gpu_compile.shapes import MODELS
from tuneserve_engine.backend.jax.precompile.absent_gpu import AbsentGpu
from tuneserve_engine.core.backend_options import Remat

_METADATA = re.compile(r", metadata=\{[^}]*\}")
_NAME = re.compile(r"%[\w.-]+")
_BACKWARD = re.compile(r"transpose\(|rematted_computation")


class Kernel(NamedTuple):
    """A kernel that takes a root: its operations, without names, and how it is cut into tiles.

    If another kernel computes the sum under the root, its operations and tiles are included.
    """

    operations: str
    tiles: str


class Comparison(NamedTuple):
    """How many kernels of norms in the scoring program the training program has as well."""

    programs: str  # their remat, and the tokens of a chunk
    equal: int
    total: int

    def __str__(self) -> str:
        count = f"{self.equal} of {self.total}"
        return f"{self.programs}: {count} kernels of norms in scoring are in training too"


def norms(hlo: str) -> set[Kernel]:
    """Return the kernels of an optimised module that take a root in its forward pass."""
    module = Module.parse(hlo)
    return {
        _kernel(module, each, computation)
        for computation in module.computations.values()
        for each in computation.values()
        if each.opcode == "fusion" and _takes_a_root(_fused(module, each))
    }


def _takes_a_root(fused: Computation) -> bool:
    return any(
        each.opcode == "rsqrt" and not _BACKWARD.search(each.rest) for each in fused.values()
    )


def _kernel(module: Module, at: Instruction, computation: Computation) -> Kernel:
    parts = [at]
    if not _sums(_fused(module, at)):
        made = (computation[name] for name in at.operands)
        parts += [x for x in made if x.opcode == "fusion" and _sums(_fused(module, x))]
    return Kernel(
        "\n".join(_operations(_fused(module, part)) for part in parts),
        "\n".join(part.attribute(r"backend_config=(\{.*\})") or "" for part in parts),
    )


def _fused(module: Module, at: Instruction) -> Computation:
    (called,) = at.called("calls")
    return module.computations[called]


def _sums(fused: Computation) -> bool:
    return any(each.opcode == "reduce" for each in fused.values())


def _operations(fused: Computation) -> str:
    """Return the computation's text with numbers in place of names, and without its sources."""
    text = "\n".join(f"%{x.name} = {x.type} {x.opcode}({x.rest}" for x in fused.values())
    numbers: dict[str, str] = {}
    return _NAME.sub(
        lambda found: numbers.setdefault(found[0], f"%{len(numbers)}"), _METADATA.sub("", text)
    )


def comparisons(model: str, layers: int, target: AbsentGpu) -> Iterator[Comparison]:
    """Compile scoring and training under each ``remat``, and compare their norms.

    Programs have the planner's chunks, in a loop, or one chunk for the whole micro-batch.
    """
    config = replace(MODELS[model], layers=layers)
    found = largest_plan(config, 8)
    whole = largest_plan(config, 8, found.static_shapes.micro_batch_tokens)
    for plan, remat in product((found, whole), get_args(Remat)):
        tasks = closed_set(model, config, plan, is_all=False, remat=remat)
        of_program = {"score_micro_batch": set[Kernel](), "train_micro_batch": set[Kernel]()}
        for task in tasks:
            for program in of_program:
                if program in task.name:
                    of_program[program] |= norms(_optimised(task, target))
        scoring, training = of_program.values()
        yield compared(f"remat={remat}, chunk {plan.static_shapes.chunk}", scoring, training)


def compared(programs: str, scoring: set[Kernel], training: set[Kernel]) -> Comparison:
    equal = sum(" reduce(" in kernel.operations for kernel in scoring & training)
    return Comparison(programs, equal, len(scoring))


def _optimised(task: Task, target: AbsentGpu) -> str:
    with target.lowering():
        lowered = task.lower(target.spec)
    return lowered.compile().as_text() or ""


def report(comparisons: Iterable[Comparison]) -> int:
    """Print one line per ``remat``; return the exit status, which is 1 unless all are equal."""
    found = list(comparisons)
    print(*found, sep="\n")
    return 0 if found and all(0 < each.equal == each.total for each in found) else 1
