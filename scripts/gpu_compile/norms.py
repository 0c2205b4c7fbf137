"""Compare the kernels of the norms in scoring and in training, as compiled for an absent GPU.

A sum on a GPU depends on the kernel that computes it. Training and scoring have the same logprobs
only if their norms are the same kernels, whatever training keeps for its backward pass.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple, get_args

from scripts.gpu_compile.programs import Task, closed_set, largest_plan
from scripts.gpu_compile.shapes import MODELS
from scripts.gpu_compile.target import Target
from tuneserve_engine.core.backend_options import Remat

_COMPUTATION = re.compile(r"^(%[\w.-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_FUSION = re.compile(r" fusion\(.*?calls=(%[\w.-]+).*?(?:backend_config=(\{.*\}))?$", re.MULTILINE)
_METADATA = re.compile(r", metadata=\{[^}]*\}")
_NAME = re.compile(r"%[\w.-]+")
_BACKWARD = re.compile(r"transpose\(|rematted_computation")


class Kernel(NamedTuple):
    """A kernel that takes a root: its operations, without names, and how it is cut into tiles."""

    operations: str
    tiles: str


class Comparison(NamedTuple):
    """How many kernels of norms in the scoring program the training program has as well.

    A kernel that takes the root of another kernel's sum does not count as equal.
    """

    remat: str
    equal: int
    total: int

    def __str__(self) -> str:
        count = f"{self.equal} of {self.total}"
        return f"remat={self.remat}: {count} kernels of norms in scoring are in training too"


def norms(hlo: str) -> set[Kernel]:
    """Return the kernels of an optimised module that take a root in its forward pass."""
    computations = dict(_COMPUTATION.findall(hlo))
    fused = ((computations.get(name, ""), tiles) for name, tiles in _FUSION.findall(hlo))
    return {Kernel(_without_names(body), tiles) for body, tiles in fused if _takes_a_root(body)}


def _takes_a_root(body: str) -> bool:
    return any(" rsqrt(" in line and not _BACKWARD.search(line) for line in body.splitlines())


def _without_names(body: str) -> str:
    numbers: dict[str, str] = {}
    return _NAME.sub(
        lambda found: numbers.setdefault(found[0], f"%{len(numbers)}"), _METADATA.sub("", body)
    )


def comparisons(model: str, layers: int, target: Target) -> Iterator[Comparison]:
    """Compile scoring and training under each ``remat``, and compare their norms."""
    for remat in get_args(Remat):
        config = replace(MODELS[model], layers=layers)
        tasks = closed_set(model, config, largest_plan(config, 8), is_all=False, remat=remat)
        of_program = {"score_micro_batch": set[Kernel](), "train_micro_batch": set[Kernel]()}
        for task in tasks:
            for program in of_program:
                if program in task.name:
                    of_program[program] |= norms(_optimised(task, target))
        scoring, training = of_program.values()
        yield compared(remat, scoring, training)


def compared(remat: str, scoring: set[Kernel], training: set[Kernel]) -> Comparison:
    equal = sum(" reduce(" in kernel.operations for kernel in scoring & training)
    return Comparison(remat, equal, len(scoring))


def _optimised(task: Task, target: Target) -> str:
    with target.lowering():
        lowered = task.lower(target.spec)
    return lowered.compile().as_text() or ""


def report(comparisons: Iterable[Comparison]) -> int:
    """Print one line per ``remat``; return the exit status, which is 1 unless all are equal."""
    found = list(comparisons)
    print(*found, sep="\n")
    return 0 if found and all(0 < each.equal == each.total for each in found) else 1
