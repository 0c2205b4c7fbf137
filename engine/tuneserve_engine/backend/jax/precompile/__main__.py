"""``tuneserve compile``: compile the programs of a worker with the current settings into a folder.

    python -m tuneserve_engine.backend.jax.precompile [--json] [--out DIR [--device h200]]

No weights are loaded, and no program runs. A worker that finds the folder as its ``compile_cache``
compiles none of them.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tuneserve_engine.core.errors import REFUSED
from tuneserve_engine.core.gpus import DEVICE_KINDS, DRIVERS
from tuneserve_engine.settings.worker import WorkerSettings

if TYPE_CHECKING:  # JAX reads the environment that ``main`` sets
    from tuneserve_engine.backend.jax.precompile.absent_gpu import AbsentGpu
    from tuneserve_engine.backend.jax.programs.registry import Specialization

_REASON_CHARS = 300


@dataclass(frozen=True)
class Result:
    """One program: whether it was compiled now or before, the seconds, and why it failed."""

    name: str
    is_new: bool = False
    seconds: float = 0.0
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.name}: {self.error}"
        how = f"{self.seconds:.1f} s" if self.is_new else "already compiled"
        return f"{self.name}: {how}"


@dataclass(frozen=True)
class Compilation:
    """The programs of one worker, the folder for them, and the results as each program ends."""

    folder: Path
    program_id: str
    results: Iterator[Result]

    def print_text(self) -> int:
        """Print a line per program and a summary; return the exit status."""
        began_s, done = time.monotonic(), []
        print(f"programs of {self.program_id}", flush=True)
        for result in self.results:
            done.append(result)
            print(result, file=sys.stderr if result.error else sys.stdout, flush=True)
        new, failed = sum(each.is_new for each in done), sum(bool(each.error) for each in done)
        seconds = time.monotonic() - began_s
        print(
            f"{len(done)} programs in {self.folder}: {new} compiled in {seconds:.0f} s, "
            f"{len(done) - new - failed} already compiled, {failed} failed"
        )
        return 1 if failed else 0

    def print_json(self) -> int:
        """Print an object when all programs have ended; return the exit status."""
        done = list(self.results)
        facts = {
            "folder": str(self.folder),
            "program_id": self.program_id,
            "programs": [asdict(each) for each in done],
        }
        print(json.dumps(facts, indent=2))
        return 1 if any(each.error for each in done) else 0


def main() -> int:
    """Compile, print a line per program, and return the exit status.

    It is 1 if a program cannot be compiled or kept, and 2 if the settings cannot be used here.
    """
    parser = argparse.ArgumentParser(prog="tuneserve compile")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=DEVICE_KINDS)
    parser.add_argument("--driver", choices=DRIVERS)
    asked = parser.parse_args()
    if asked.driver and not asked.device:
        parser.error("--driver is that of an absent GPU: add --device, or leave it out")
    if asked.device and not asked.out:
        parser.error("--device compiles for another machine: add --out with a directory for it")
    if asked.device:  # a GPU that happens to be here is not needed, and a worker may be using it
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from tuneserve_engine.backend.jax.target import compiling_for

    with compiling_for("gpu") if asked.device else nullcontext():
        try:
            settings = WorkerSettings()
            folder = asked.out or settings.compile_cache_dir
            compilation = _start(settings, folder, asked.device, asked.driver or max(DRIVERS))
        except (ValueError, OSError, RuntimeError) as error:
            print(f"tuneserve compile: {error}", file=sys.stderr)
            return REFUSED
        return compilation.print_json() if asked.json else compilation.print_text()


def _start(settings: WorkerSettings, folder: Path, gpu: str | None, driver: str) -> Compilation:
    """Plan the worker, and return its programs, which are compiled as results are asked for."""
    import jax

    from tuneserve_engine.backend.jax.fingerprint import (
        NumericChoices,
        ask_for_float32,
        program_id,
    )
    from tuneserve_engine.backend.jax.memory.device import default_device, named_gpu
    from tuneserve_engine.backend.jax.memory.planner import plan
    from tuneserve_engine.backend.jax.memory.report import config_folder
    from tuneserve_engine.backend.jax.mesh import DeviceMesh
    from tuneserve_engine.backend.jax.model.weights import read_config
    from tuneserve_engine.backend.jax.precompile.absent_gpu import AbsentGpu, description
    from tuneserve_engine.backend.jax.precompile.closed_set import worker_programs
    from tuneserve_engine.backend.jax.programs.cache import ProgramCache, is_marked, mark
    from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry

    base_model = config_folder(settings.base_model, settings.base_model_revision)
    config, device = read_config(base_model), named_gpu(gpu) if gpu else default_device()
    found = plan(config, device, settings.plan_request)
    target, absent, mesh = None, None, DeviceMesh(jax.local_devices()[: found.devices])
    if gpu:
        target = AbsentGpu(description(gpu, driver), found.devices)
        absent, mesh = f"{DEVICE_KINDS[gpu]}; driver {driver}", target.mesh
        mark(folder)
    ask_for_float32(found.dtype)
    shapes, rows = found.static_shapes, found.sample_rows
    choices = NumericChoices(
        found.dtype, shapes, found.remat, rows, is_marked(folder), found.devices
    )
    id_ = program_id(base_model, choices, absent_gpu=absent)
    kept = ProgramCache(folder, id_, min_free_bytes=settings.min_free_bytes)
    programs = worker_programs(config, found, ProgramRegistry(kept, mesh))
    return Compilation(folder, id_, _compile_all(programs.shapes(), target))


def _compile_all(shapes: list["Specialization"], target: "AbsentGpu | None") -> Iterator[Result]:
    """Compile the programs into their cache, in threads, and yield each result as it ends."""

    def compile_one(shape: "Specialization") -> Result:
        began_s = time.monotonic()
        try:
            with target.lowering() if target else nullcontext():
                is_new = shape.keep(target.spec if target else None)
        except Exception as error:  # of any kind: other programs can still be compiled
            reason = (str(error).splitlines() or [""])[0][:_REASON_CHARS]
            return Result(shape.name, error=f"{type(error).__name__}: {reason}")
        return Result(shape.name, is_new=is_new, seconds=time.monotonic() - began_s)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ordered = sorted(shapes, key=lambda shape: shape.order)
        for done in as_completed([pool.submit(compile_one, shape) for shape in ordered]):
            yield done.result()


if __name__ == "__main__":
    sys.exit(main())
