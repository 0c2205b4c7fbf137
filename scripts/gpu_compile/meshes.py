"""Check what each of several GPUs holds and exchanges of a model that does not fit one.

    make gpu-compile        # which also compiles every program

Training and decoding, rank 32, for 2, 4 and 8 H200s. Per device, the bytes of a program's arguments
and of its temporary memory may differ by 5 % from the plan. Donated arrays have to be those of the
results. Devices may exchange weights and, of decoding, values of a layer: nothing as large as the
tape, the adapter slots or the pages. If they divide a datum, they also exchange keys and values of
a layer.
"""

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod

from scripts.gpu_compile.devices import GPUS
from scripts.gpu_compile.shapes import MODELS
from tuneserve_engine.backend.jax.memory.footprint import Footprint
from tuneserve_engine.backend.jax.memory.planner import Device, Plan, gib, plan
from tuneserve_engine.backend.jax.memory.sizes import EngineShape
from tuneserve_engine.backend.jax.precompile.absent_gpu import AbsentGpu
from tuneserve_engine.backend.jax.precompile.closed_set import worker_programs
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry, Specialization
from tuneserve_engine.backend.jax.target import compiling_for
from tuneserve_engine.core.backend_options import PlanRequest

LONG = 65_536
"""A context of which a device has room for a part only, for a 70B on 4."""
MESHES = (
    ("qwen3-32b", 2, None),
    ("llama-70b", 4, None),
    ("llama-70b", 8, None),
    ("llama-70b", 4, LONG),
)
RANK = 32
_TOLERANCE = 0.05
_USABLE_SHARE, _HOST_BYTES = 0.92, 2**38
_THREADS = 2
_COLLECTIVE = re.compile(
    r"= (\S.*?) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-[a-z]+)(?:-start)?\("
)
_SHAPE = re.compile(r"(f32|bf16|s32|u32|pred|f16)\[([\d,]*)\]")
_ITEM = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "f16": 2}


@dataclass(frozen=True)
class Checked:
    """A program on several devices: bytes of each, and the largest array that they exchange."""

    model: str
    devices: int
    program: str
    bytes: int
    planned: int
    exchanged: int
    exchangeable: int
    kinds: frozenset[str]
    is_in_place: bool

    def __str__(self) -> str:
        return (
            f"{self.model} on {self.devices}, {self.program}: {gib(self.bytes)} per device, "
            f"planned {gib(self.planned)}; {', '.join(sorted(self.kinds))} of up to "
            f"{gib(self.exchanged)}"
        )

    @property
    def faults(self) -> Iterator[str]:
        if abs(self.bytes / self.planned - 1) > _TOLERANCE:
            yield f"{self}: more than {_TOLERANCE:.0%} from the plan"
        if self.exchanged > self.exchangeable:
            yield f"{self}: more than {gib(self.exchangeable)}"
        if not self.is_in_place:
            yield f"{self}: donated arrays are copied"


def found_plan(model: str, devices: int, context: int | None = None) -> Plan:
    """Return the plan of a worker on so many H200s, with a context of so many tokens."""
    usable = int(_USABLE_SHARE * GPUS["h200"].memory_bytes)
    device = Device.accelerator("gpu", usable, _HOST_BYTES, devices)
    asked = PlanRequest(max_rank=RANK, devices=devices)
    if context is None:
        return plan(MODELS[model], device, asked)
    config = replace(MODELS[model], context_length=context)
    return plan(config, device, replace(asked, max_context_tokens=context))


def checks(model: str, devices: int, context: int | None) -> Iterator[Checked]:
    """Compile training and decoding for so many H200s, and yield the findings.

    With a context, compile the training on parts of a datum alone.
    """
    config, found = MODELS[model], found_plan(model, devices, context)
    target = AbsentGpu(GPUS["h200"].description, devices)
    programs = worker_programs(config, found, ProgramRegistry(None, target.mesh))
    shape = EngineShape(
        found.static_shapes, found.remat, found.sample_rows, 1, "bfloat16", "gpu",
        found.kv_pages, devices,
    )  # fmt: skip
    footprint = Footprint(config, shape)
    slots = footprint.adapter_slots(RANK).bytes
    training = (
        footprint.base.bytes + slots + footprint.tape.bytes + footprint.layer_gradients.bytes
        + sum(line.bytes for line in footprint.temporaries)
    )  # fmt: skip
    sampling = footprint.sampling
    decoding = (
        footprint.base.bytes + sampling.caches.bytes + sampling.drawing.bytes
        + sampling.decode_adapters.bytes * RANK // sum(found.static_shapes.rank_buckets)
    )  # fmt: skip
    weights = config.intermediate * config.hidden * shape.item
    values = found.sample_rows * config.intermediate * shape.item
    wanted = {
        f"train_micro_batch ({RANK}, 1, ": (training, weights),
        f"decode {RANK}": (decoding, values),
    }
    if context is not None:
        of_keys = 4 * context * config.kv_heads * config.head_dim  # float32 gradients
        wanted = {f"train_divided_datum ({RANK}, 1, ": (training, max(weights, of_keys))}
    assert found.static_shapes.devices_per_datum == (1 if context is None else devices)
    for name, limits in wanted.items():
        (program,) = (each for each in programs.shapes() if each.name.startswith(name))
        yield _checked(program, target, (model, devices), limits)


def _checked(
    program: Specialization, target: AbsentGpu, of: tuple[str, int], limits: tuple[int, int]
) -> Checked:
    with target.lowering():
        lowered = program.lowered(target.spec)
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    exchanges = [found for line in (compiled.as_text() or "").splitlines()
                 if (found := _COLLECTIVE.search(line))]  # fmt: skip
    sizes = [
        prod(int(n) for n in numbers.split(",") if n) * _ITEM[kind]
        for found in exchanges
        for kind, numbers in _SHAPE.findall(found[1])
    ]
    return Checked(
        *of,
        program.name,
        memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        limits[0],
        max(sizes),
        limits[1],
        frozenset(found[2] for found in exchanges),
        memory.alias_size_in_bytes >= 0.99 * memory.output_size_in_bytes,
    )


def main() -> int:
    faults: list[str] = []
    with compiling_for("gpu"), ThreadPoolExecutor(_THREADS) as pool:
        for found in pool.map(lambda mesh: list(checks(*mesh)), MESHES):
            for each in found:
                print(each, flush=True)
                faults += each.faults
    print("\n".join(faults) or "no device holds or exchanges more than planned")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
