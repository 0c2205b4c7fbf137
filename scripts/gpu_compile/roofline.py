"""Predict the cost of an optimised module on a GPU: kernels, time by group, and large copies.

A roofline: a kernel takes as long as its arithmetic or its memory, whichever is longer, and then
comes a gap. Kernels of adapters in training take as long as both; those in decoding, and products
of few rows, need a while to start. A ``Gpu`` has the rates of its data sheet. The shares of them
below are chosen so that the times of training and decoding Qwen3-0.6B and 8B are near those
measured on an H200 (docs/gpu.md). For other GPUs they are assumptions.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from scripts.gpu_compile.devices import Gpu
from scripts.gpu_compile.hlo import Computation, Instruction, Module

LARGE_BYTES = 16 * 2**20
"""The size from which a copy or transpose is listed."""

_PRODUCT_SHARE, _ATTENTION_SHARE, _BANDWIDTH_SHARE = 0.8, 0.22, 0.83
_ADAPTER_SHARE = 0.3
"""The share of the full rate that kernels of adapters reach in training, while they multiply: they
do not read at the same time. They multiply parts of bfloat16: three products if one factor is
bfloat16, and six of float32."""
_DECODED_ROWS, _DECODED_START_S = 64, 4e-6
"""The most rows of a product that is bound by reading its weights, and the time before it reads at
the full rate."""
_SHARED_SHARE, _SHARED_START_S = 0.42, 3e-6
"""The share of the bandwidth that kernels of adapters reach in decoding, and the time before it."""
_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.85), (64, 128, 0.65), (64, 64, 0.45))
"""A product's tiles, and the share of the full rate that each reaches."""
_KERNEL_S, _GAP_S, _LOOP_S, _CONDITIONAL_S = 1.5e-6, 1.7e-6, 12e-6, 10e-6
"""The least time of a kernel; the time between two; a round of a loop whose end the host reads from
the device; a conditional that the host reads."""
_BACKWARD_ATTENTION = 2.5
"""Operations of attention's two backward kernels per operation of the forward kernel: five products
for two (FlashAttention-2). Each of the two kernels counts half."""

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
    "partition-id", "replica-id", "fusion-done", "copy-done", "async-done",
}  # fmt: skip
_SLICES = {"dynamic-slice", "slice", "gather"}
_VIEWS = {"bitcast", "reshape"}
_INDEXED = {"dynamic-slice", "gather", "scatter", "dynamic-update-slice", "sort"}
_LOOP_OR_BRANCH = re.compile(r"(?:^|/)([^/]+)/(?:while|cond)$")


class Group(StrEnum):
    PRODUCTS = "products"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    INDEXED = "gather and scatter"
    LAUNCHES = "launches"


@dataclass(frozen=True)
class Work:
    """The work of one call of a program. Its names are ``jax.named_scope``s of the engine.

    ``rounds`` are the rounds of loops whose number the device decides. ``is_taken`` says which
    conditionals hold. ``attention_flops`` are those of one call of the kernel's forward pass.
    ``page_bytes`` are read by one call of the kernel of attention over pages. ``adapters`` are in
    use by decoding, and ``chunk_adapters`` by a chunk in training.
    """

    rounds: Mapping[str, int] = field(default_factory=dict)
    is_taken: Mapping[str, bool] = field(default_factory=dict)
    attention_flops: float = 0.0
    page_bytes: float = 0.0
    adapters: int = 1
    chunk_adapters: int = 1


@dataclass
class Cost:
    """The cost of one call of a program."""

    kernels: int = 0
    seconds: Counter[Group] = field(default_factory=Counter)
    flops: float = 0.0
    places: Counter[str] = field(default_factory=Counter)
    """Seconds by kernel, named by its group, its result and its place in the traced program."""
    copies: Counter[str] = field(default_factory=Counter)
    """Bytes of every copy or transpose of at least ``LARGE_BYTES``, by its place."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def cost(module: Module, gpu: Gpu, work: Work) -> Cost:
    """Return the cost of one call. Raises ``LookupError`` for a loop without a name in ``work``."""
    walk = _Walk(module, gpu, work)
    walk.computation(module.entry, 1)
    return walk.cost


class _Walk:
    """Follows a module as the device runs it, and adds up."""

    def __init__(self, module: Module, gpu: Gpu, work: Work) -> None:
        self._module, self._gpu, self._work = module, gpu, work
        self.cost = Cost()

    def computation(self, name: str, times: int) -> None:
        computation = self._module.computations[name]
        for each in computation.values():
            if each.opcode not in _FREE:
                self._instruction(each, computation, times)

    def _instruction(self, at: Instruction, computation: Computation, times: int) -> None:
        match at.opcode:
            case "while":
                self._loop(at, times)
            case "conditional":
                self._branch(at, times)
            case "call":
                (called,) = at.called("to_apply")
                self.computation(called, times)
            case "fusion" | "fusion-start" | "async-start":
                self._fusion(at, times)
            case "custom-call":
                self._custom(at, computation, times)
            case _:
                group = Group.INDEXED if at.opcode in _INDEXED else Group.ELEMENTWISE
                self._kernel(at, group, times, _bytes_alone(at, computation))
                if at.opcode in ("copy", "copy-start", "transpose"):
                    self._copied(at, times, at.bytes)

    def _loop(self, at: Instruction, times: int) -> None:
        (body,), (condition,) = at.called("body"), at.called("condition")
        known = at.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        rounds = int(known) if known else self._named(self._work.rounds, at)
        if not known:
            self.cost.seconds[Group.LAUNCHES] += times * (rounds + 1) * _LOOP_S
            self.computation(condition, times * (rounds + 1))
        self.computation(body, times * rounds)

    def _branch(self, at: Instruction, times: int) -> None:
        branches = at.called("branch_computations") or (
            *at.called("false_computation"),
            *at.called("true_computation"),
        )
        self.cost.seconds[Group.LAUNCHES] += times * _CONDITIONAL_S
        self.computation(branches[self._named(self._work.is_taken, at)], times)

    @staticmethod
    def _named(names: Mapping[str, int], at: Instruction) -> int:
        found = _LOOP_OR_BRANCH.search(at.source)
        name = found[1] if found else at.source
        if name not in names:
            raise LookupError(
                f"the {at.opcode} {at.source!r} is in the scope {name!r}, whose rounds or branch "
                f"are not known; known are: {', '.join(names)}"
            )
        return names[name]

    def _fusion(self, at: Instruction, times: int) -> None:
        (called,) = at.called("calls")
        fused = self._module.computations[called]
        if at.opcode == "async-start":
            self.computation(called, times)
            return
        if library := [each for each in fused.values() if each.opcode == "custom-call"]:
            self._custom(library[0], fused, times)
            return
        inner = list(fused.values())
        moved, flops = _bytes_of_fusion(self._module, called), _flops_of_fusion(inner)
        opcodes = {each.opcode for each in inner}
        root = self._module.root(called)
        group = Group.ELEMENTWISE
        if flops:
            group = Group.PRODUCTS
        elif opcodes & {"gather", "scatter", "sort"} or root.opcode in _INDEXED:
            group = Group.INDEXED
        self._kernel(at, group, times, moved, flops)
        if group is Group.ELEMENTWISE and opcodes & {"transpose", "copy", "concatenate"}:
            self._copied(at, times, _bytes_written(self._module, called))

    def _custom(self, at: Instruction, computation: Computation, times: int) -> None:
        target = at.attribute(r'custom_call_target="([^"]+)"') or ""
        if "gemm" in target or "matmul" in target:
            batch, m, n, k = _product(at, computation)
            # The second result is room for the library, which it need not touch.
            moved = at.arrays[0].bytes + sum(computation[name].bytes for name in at.operands)
            is_float32 = any(computation[x].arrays[0].dtype == "f32" for x in at.operands[:2])
            seconds = _product_s(self._gpu, batch, m, n, k) * (2 if is_float32 else 1)
            if m <= _DECODED_ROWS:
                seconds = max(seconds, _DECODED_START_S + self._read_s(moved))
            self._kernel(at, Group.PRODUCTS, times, moved, 2.0 * batch * m * n * k, seconds)
        elif "paged_attention" in at.source:
            moved = at.bytes + self._work.page_bytes
            self._kernel(at, Group.ATTENTION, times, moved)
        elif "merged_attention" in at.source or "rotate_and_write" in at.source:
            # Pages, which are results as well, are written in a few places only.
            pages = {
                each.shape for each in at.arrays if len(each.shape) == 4 and len(at.arrays) > 1
            }
            arrays = (*at.arrays, *(computation[name].arrays[0] for name in at.operands))
            moved = float(sum(each.bytes for each in arrays if each.shape not in pages))
            self._kernel(at, Group.ATTENTION, times, moved)
        elif "shared_lora" in at.source:
            self._shared_lora(at, computation, times)
        elif found := re.search("block_lora_[a-z]+", at.source):
            self._block_lora(at, computation, times, found[0])
        elif "triton" in target or "mosaic" in target:
            share = _BACKWARD_ATTENTION / 2 if "attention_backward" in at.source else 1.0
            flops = self._work.attention_flops * share
            moved = _bytes_of_a_layer(at, computation)
            seconds = flops / (_ATTENTION_SHARE * self._gpu.flops)
            self._kernel(at, Group.ATTENTION, times, moved, flops, seconds)
        else:
            self._kernel(at, Group.ELEMENTWISE, times, at.bytes)

    def _shared_lora(self, at: Instruction, computation: Computation, times: int) -> None:
        """Count the adapters in use of one layer, and all other operands.

        Adapters are the operands with three axes: slots of all layers, and a matrix. Their
        operations are too few to count.
        """
        operands = [computation[name].arrays[0] for name in at.operands]
        matrices = [each.bytes / each.shape[0] for each in operands if len(each.shape) == 3]
        moved = at.bytes + sum(each.bytes for each in operands if len(each.shape) != 3)
        moved += self._work.adapters * sum(matrices)
        seconds = _SHARED_START_S + moved / (_SHARED_SHARE * self._gpu.bandwidth)
        self._kernel(at, Group.PRODUCTS, times, moved, seconds=seconds)

    def _block_lora(
        self, at: Instruction, computation: Computation, times: int, kernel: str
    ) -> None:
        """Count the adapters in use of one layer, and all other operands and results.

        Adapters, or their gradients, are operands with three axes: slots of all layers, and a
        matrix. Gradients are results as well, read and written. Other operands with three axes are
        [c, S, _], for c blocks of S tokens.
        """
        operands = [computation[name].arrays[0] for name in at.operands]
        are_gradients = kernel == "block_lora_gradient"
        outs = [] if are_gradients else list(at.arrays)
        first = outs[0] if outs else next(each for each in operands if len(each.shape) == 4)
        tokens = first.shape[:2] if len(first.shape) == 3 else first.shape[-3:-1]
        matrices = [x for x in operands if len(x.shape) == 3]
        banks = [each for each in matrices if each.shape[:2] != tokens]
        lefts = [each for each in matrices if each.shape[:2] == tokens]
        numbers = sum(bank.size / bank.shape[0] for bank in banks)
        moved = float(sum(each.bytes for each in (*operands, *outs) if each not in banks))
        moved += 4 * numbers * self._work.chunk_adapters * (2 if are_gradients else 1)
        is_narrow = kernel != "block_lora_expand" and all(x.dtype == "bf16" for x in lefts)
        flops = 2.0 * math.prod(tokens) * numbers * (3 if is_narrow else 6)
        seconds = self._read_s(moved) + flops / (_ADAPTER_SHARE * self._gpu.flops)
        self._kernel(at, Group.PRODUCTS, times, moved, flops, seconds)

    def _read_s(self, moved: float) -> float:
        """Return the seconds of reading and writing so many bytes."""
        return moved / (_BANDWIDTH_SHARE * self._gpu.bandwidth)

    def _kernel(  # noqa: PLR0913
        self,
        at: Instruction,
        group: Group,
        times: int,
        moved: float,
        flops: float = 0.0,
        seconds: float = 0.0,
    ) -> None:
        busy = max(
            self._read_s(moved),
            seconds or flops / (_PRODUCT_SHARE * 0.75 * self._gpu.flops),
        )
        self.cost.kernels += times
        self.cost.flops += times * flops
        self.cost.seconds[group] += times * busy
        self.cost.seconds[Group.LAUNCHES] += times * (max(_KERNEL_S - busy, 0.0) + _GAP_S)
        shown = " ".join(str(each) for each in at.arrays)
        self.cost.places[f"{group}: {shown} {at.source}"] += times * (max(_KERNEL_S, busy) + _GAP_S)

    def _copied(self, at: Instruction, times: int, written: int) -> None:
        if written >= LARGE_BYTES:
            shown = " ".join(str(each) for each in at.arrays)
            self.cost.copies[f"{shown} {at.source}"] += times * written


def _bytes_alone(at: Instruction, computation: Computation) -> int:
    """Return the bytes that an instruction of its own reads and writes."""
    if at.opcode == "dynamic-update-slice":
        return 2 * computation[at.operands[1]].bytes
    read = sum(computation[name].bytes for name in at.operands)
    return at.bytes + (min(read, at.bytes) if at.opcode in _SLICES else read)


def _bytes_of_a_layer(at: Instruction, computation: Computation) -> float:
    """Return the bytes of the blocks that a call of attention writes.

    Its results can be buffers of all layers. Its operand with the fewest rows has one per block.
    """
    operands = (computation[name].arrays[0].shape for name in at.operands)
    blocks = min((shape[0] for shape in operands if len(shape) > 1), default=math.inf)
    return sum(each.bytes * min(blocks / each.shape[0], 1.0) for each in at.arrays)


def _bytes_of_fusion(module: Module, name: str) -> int:
    """Return the bytes that a fused kernel reads and writes.

    Of an array that is only sliced or indexed, it reads what it takes.
    """
    computation = module.computations[name]
    uses: dict[str, list[tuple[Instruction, int]]] = {}
    for each in computation.values():
        for place, operand in enumerate(each.operands):
            uses.setdefault(operand, []).append((each, place))

    def read(whole: Instruction, at: Instruction) -> int:
        taken = 0
        for user, place in uses.get(at.name, ()):
            if user.opcode in _VIEWS and not user.is_root:
                taken += read(whole, user)
            elif user.opcode in _SLICES and place == 0:
                taken += user.bytes
            elif not (user.opcode in ("dynamic-update-slice", "scatter") and place == 0):
                return whole.bytes
        return min(taken, whole.bytes)

    parameters = (each for each in computation.values() if each.opcode == "parameter")
    return sum(read(each, each) for each in parameters) + _bytes_written(module, name)


def _bytes_written(module: Module, name: str) -> int:
    """Return the bytes that a fused kernel writes: the update of an array updated in place."""
    computation = module.computations[name]

    def written(at: Instruction) -> int:
        if at.opcode == "tuple":
            return sum(written(computation[operand]) for operand in at.operands)
        if at.opcode in _VIEWS:
            return written(computation[at.operands[0]])
        if at.opcode == "dynamic-update-slice":
            return computation[at.operands[1]].bytes
        if at.opcode == "scatter":
            return computation[at.operands[-1]].bytes
        return at.bytes

    return written(module.root(name))


def _flops_of_fusion(inner: list[Instruction]) -> float:
    types = {each.name: each for each in inner}
    total = 0.0
    for each in inner:
        if each.opcode == "dot":
            left = types[each.operands[0]].arrays[0]
            over = _dimensions(each.attribute(r"lhs_contracting_dims=\{([\d,]*)\}"))
            total += 2.0 * each.arrays[0].size * math.prod(left.shape[axis] for axis in over)
    return total


def _product(at: Instruction, computation: Computation) -> tuple[int, int, int, int]:
    """Return the batch and M, N, K of a product by a library."""
    left, right = (computation[name].arrays[0] for name in at.operands[:2])

    def extent(which: str) -> int:
        axes = _dimensions(at.attribute(rf'"lhs_{which}_dimensions":\[([^\]]*)\]'))
        return math.prod(left.shape[axis] for axis in axes)

    batch, k = extent("batch"), extent("contracting")
    return batch, left.size // (batch * k), right.size // (batch * k), k


def _dimensions(text: str | None) -> tuple[int, ...]:
    return tuple(int(each.strip().strip('"')) for each in (text or "").split(",") if each.strip())


def _product_s(gpu: Gpu, batch: int, m: int, n: int, k: int) -> float:
    """Return the seconds of a bfloat16 product: whole waves of tiles, K split if there are few."""
    rate = _PRODUCT_SHARE * gpu.flops / gpu.processors
    times = []
    for rows, columns, share in _TILES:
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        tile_s = 2 * rows * columns * k / (rate * share)
        times.append(math.ceil(tiles / gpu.processors) * tile_s)
        splits = (s for s in (2, 4, 8, 16, 32) if tiles * s <= gpu.processors and k >= 512 * s)
        times += [tile_s / split + _KERNEL_S for split in splits]
    return min(times)
