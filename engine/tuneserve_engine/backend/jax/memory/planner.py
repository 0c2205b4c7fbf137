"""The plan of a worker's device memory, made once from the model's shape before anything is loaded.

Plain arithmetic. Everything that the device will ever hold is a line with its formula, so a refusal
can show its reason. Sizes follow from the device's kind and its whole memory, never from the memory
that is free at the moment. So the same machine with the same settings always gets the same plan,
which matters because bits depend on parts of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from tuneserve_engine.backend.jax.memory.footprint import Footprint
from tuneserve_engine.backend.jax.memory.sizes import EngineShape, Line
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.weight_shapes import most_parts
from tuneserve_engine.backend.jax.sampling.kv_pages import least_pages, most_pages
from tuneserve_engine.core.backend_options import DType, PlanRequest, Remat
from tuneserve_engine.core.shapes import StaticShapes, longest_bin

_RANK_BUCKETS = StaticShapes.rank_buckets
_REQUEST_SLOTS = StaticShapes.request_slots
_CHUNK_TOKENS, _CPU_CHUNK_TOKENS = 2048, StaticShapes.chunk
_MICRO_BATCH_TOKENS, _CPU_MICRO_BATCH_TOKENS = 8192, StaticShapes.requested_tokens
_LEAST_SLOTS = 4
_FASTEST_FIRST: tuple[Remat, ...] = ("dots", "attention", "full")
_QUARTER = 3  # halves of the KV pages: all, a half and a quarter
_KEPT_FREE = 16
"""One part in this many stays free, for fragmentation and for needs of programs beside arrays."""


class DoesNotFit(ValueError):
    """Not even the smallest plan fits; the message has the arithmetic and the settings to lower."""


@dataclass(frozen=True)
class Device:
    """A kind of device, and the parts of its memory and of the host's that a worker may take."""

    kind: str  # JAX's name of the platform
    memory_bytes: int  # of each device
    host_bytes: int  # host memory for adapters that are not on the device
    count: int = 1  # devices of this machine

    @classmethod
    def cpu(cls, machine_bytes: int, count: int = 1) -> "Device":
        """Return a CPU, which is device and host at once.

        The operating system and other processes need some of the machine's memory. JAX can divide a
        CPU into several devices.
        """
        return cls("cpu", machine_bytes // 2, machine_bytes // 4, count)

    @classmethod
    def accelerator(
        cls, kind: str, memory_bytes: int, machine_bytes: int, count: int = 1
    ) -> "Device":
        return cls(kind, memory_bytes, machine_bytes // 2, count)

    def bytes_of_each(self, devices: int) -> int:
        """Return the memory of each of so many devices of a worker."""
        return self.memory_bytes // devices if self.kind == "cpu" else self.memory_bytes


@dataclass(frozen=True)
class Plan:
    """The decisions, and the arithmetic behind them.

    The lines are those of each of the worker's ``devices``, and add up to ``device_bytes``.
    """

    static_shapes: StaticShapes
    dtype: DType
    remat: Remat
    sample_rows: int
    kv_pages: int
    snapshot_bytes: int  # limit of the snapshots on the device
    device: Device
    device_bytes: int
    adapter_device_bytes: int
    adapter_host_bytes: int
    lines: tuple[Line, ...]
    memory: Mapping[str, float]
    """The lines summed by use, with the names of ``metric_names.WORKER_METRICS``."""
    devices: int = 1
    trains: bool = True


def plan(config: ModelConfig, device: Device, request: PlanRequest) -> Plan:
    """Return the best plan that fits. Raises ``DoesNotFit``.

    If memory is short, the planner first gives up room for snapshots, which can be read again from
    their files. Then it gives up long micro-batches, then three quarters of the KV pages with which
    all decode slots could be as long as the context, then the fastest ``remat``, then further KV
    pages, then slots, and high ranks last. If the longest datum fits no device even then, the
    devices divide datums that are longer than a micro-batch, and the choice begins anew. A worker
    that only samples has no part of training; the memory that is left is for snapshots. With
    ``devices`` auto, it takes the fewest devices on which the model fits, of one, two, four and so
    on.
    """
    if request.devices != "auto":
        if request.devices > device.count:
            raise DoesNotFit(_too_few(device, request.devices))
        counts = [request.devices]
    else:
        counts = [2**power for power in range(device.count.bit_length())]
    refusal: DoesNotFit | None = None
    for divides, devices in product((False, True), counts):
        try:
            return _plan(config, device, request, devices, devices if divides else 1)
        except DoesNotFit as error:
            refusal = error
    assert refusal is not None
    raise refusal


def _power_of_two_to(count: int) -> int:
    """Return the largest power of two that is at most ``count``."""
    return 1 << (count.bit_length() - 1)


def _plan(
    config: ModelConfig, device: Device, request: PlanRequest, devices: int, per_datum: int
) -> Plan:
    """Return the best plan for so many devices, of which so many divide a datum."""
    if devices > 1 and all(parts % devices for parts in most_parts(config).values()):
        raise DoesNotFit(
            f"devices is {devices}, among which no weight of this base model can be divided; set "
            f"devices to {_power_of_two_to(devices - 1)}"
        )
    device_bytes = request.device_memory_bytes or device.bytes_of_each(devices)
    host_bytes = request.adapter_host_bytes
    if host_bytes is None:
        host_bytes = device.host_bytes
    for shape in _shapes(config, device, request, devices, per_datum):
        footprint = Footprint(config, shape)
        left = device_bytes - device_bytes // _KEPT_FREE - footprint.bytes
        if request.adapter_device_bytes is not None:
            left = min(left, request.adapter_device_bytes)
        snapshots = left // 2 if request.sample_only else 0
        adapters = left - snapshots
        if adapters < footprint.batch_adapter_bytes:
            continue
        free = device_bytes - footprint.bytes - adapters - snapshots
        return Plan(
            static_shapes=shape.static_shapes,
            dtype=shape.dtype,
            remat=shape.remat,
            sample_rows=shape.sample_rows,
            kv_pages=shape.kv_pages,
            snapshot_bytes=footprint.sampling.snapshot_bytes + snapshots,
            device=device,
            device_bytes=device_bytes,
            adapter_device_bytes=adapters,
            adapter_host_bytes=host_bytes,
            lines=(
                *footprint.lines,
                *([Line("further snapshots", "what is left", snapshots)] if snapshots else ()),
                Line("adapters", footprint.adapters_held(adapters), adapters),
                Line("kept free", "fragmentation, and further needs of programs", free),
            ),
            memory=_by_use(footprint, adapters, snapshots, free),
            devices=devices,
            trains=not request.sample_only,
        )
    raise DoesNotFit(_refusal(footprint, device, device_bytes, request))


def _by_use(footprint: Footprint, adapters: int, snapshots: int, free: int) -> dict[str, float]:
    base = footprint.base.bytes
    sampling = sum(line.bytes for line in footprint.sampling.lines)
    return {
        "memory_base_model_bytes": base,
        "memory_training_bytes": footprint.bytes - base - sampling,
        "memory_sampling_bytes": sampling + snapshots,
        "memory_adapters_bytes": adapters,
        "memory_free_bytes": free,
    }


def _shapes(
    config: ModelConfig, device: Device, request: PlanRequest, devices: int, per_datum: int
) -> Iterator[EngineShape]:
    """Yield every shape that the settings leave open, best first."""
    is_cpu = device.kind == "cpu"
    default_dtype: DType = "float32" if is_cpu else "bfloat16"
    dtype = default_dtype if request.dtype == "auto" else request.dtype
    context = min(request.max_context_tokens, config.context_length)
    chunk = request.chunk_tokens or (_CPU_CHUNK_TOKENS if is_cpu else _CHUNK_TOKENS)
    remats = _FASTEST_FIRST if request.remat == "auto" else (request.remat,)
    default_tokens = _CPU_MICRO_BATCH_TOKENS if is_cpu else _MICRO_BATCH_TOKENS
    if request.sample_only:
        yield from _shapes_to_train(config, device, request, devices, per_datum)
    rows = request.sample_rows
    snapshots = _halves(None, rows, 1)
    context_shapes = StaticShapes(context, chunk=chunk)
    pages = _halves(None, most_pages(context_shapes, rows), least_pages(context_shapes))
    # Bits depend on the packing of a bin.
    least = max(-(-context // per_datum), longest_bin(chunk))
    lengths = _halves(request.batch_tokens, default_tokens, least)
    # A shorter micro-batch makes more datums long ones, which take longer if they are divided.
    groups = [lengths] if per_datum == 1 else [[length] for length in lengths]
    for ranks, least_slots in _rank_buckets(request.max_rank):
        choices = (
            (slots, *rest)
            for slots in _halves(request.request_slots, _REQUEST_SLOTS, least_slots)
            for group in groups
            for rest in (
                *product(remats, pages[:_QUARTER], group, snapshots),
                *product(remats[-1:], pages[_QUARTER:], group[-1:], snapshots[-1:]),
            )
        )
        for slots, remat, held, tokens, kept in choices:
            static_shapes = StaticShapes(
                context,
                chunk=chunk,
                requested_tokens=tokens,
                request_slots=slots,
                rank_buckets=ranks,
                devices_per_datum=per_datum,
            )
            yield EngineShape(
                *(static_shapes, remat, rows, kept, dtype, device.kind, held, devices),
                trains=not request.sample_only,
            )


def _shapes_to_train(
    config: ModelConfig, device: Device, request: PlanRequest, devices: int, per_datum: int
) -> Iterator[EngineShape]:
    """Yield shapes of a worker that trains on such a device, for one that only samples.

    Programs, bits and the ranks of adapters are then those of that worker. There are none if it
    would not fit.
    """
    try:
        asked = replace(request, sample_only=False)
        found = _plan(config, device, asked, devices, per_datum)
    except DoesNotFit:
        return
    rows = found.sample_rows
    for pages, kept in ((most_pages(found.static_shapes, rows), rows), (found.kv_pages, 1)):
        yield EngineShape(
            *(found.static_shapes, found.remat, rows, kept, found.dtype),
            *(device.kind, pages, devices),
            trains=False,
        )


def _rank_buckets(max_rank: int | None) -> list[tuple[tuple[int, ...], int]]:
    """Return choices of rank buckets, each with the fewest slots that it may be combined with.

    If a rank was set, it is the highest bucket. Otherwise all buckets come first, then fewer,
    without the highest: fewer buckets are better than fewer slots.
    """
    if max_rank is not None:
        return [((*(rank for rank in _RANK_BUCKETS if rank < max_rank), max_rank), 1)]
    counts = range(len(_RANK_BUCKETS), 0, -1)
    return [(_RANK_BUCKETS[:count], 1 if count == 1 else _LEAST_SLOTS) for count in counts]


def _halves(asked: int | None, default: int, least: int) -> list[int]:
    """Return the value asked for, or else the default and halves of it down to ``least``."""
    if asked is not None:
        return [asked]
    sizes = [max(default, least)]
    while sizes[-1] > least:
        sizes.append(max(sizes[-1] // 2, least))
    return sizes


def _too_few(device: Device, devices: int) -> str:
    """Return the reason why a worker cannot have so many devices here."""
    hint = f"; JAX_NUM_CPU_DEVICES={devices} divides a CPU into as many, to try it"
    return (
        f"devices is {devices}; one machine has {device.count} of kind {device.kind} here; "
        f"set devices to at most {device.count}{hint if device.kind == 'cpu' else ''}"
    )


def _refusal(footprint: Footprint, device: Device, device_bytes: int, request: PlanRequest) -> str:
    """Return the reason why the smallest plan does not fit."""
    unit = footprint.batch_adapter_bytes
    if (asked := request.adapter_device_bytes) is not None and asked < unit:
        return (
            f"adapter_device_bytes is {asked}; the adapters of one batch take {unit} bytes; raise "
            "it, or lower request_slots or max_rank"
        )
    lines = (
        *footprint.lines,
        Line("adapters of one batch", "", unit),
        Line("kept free", "", device_bytes // _KEPT_FREE),
    )
    needed = sum(line.bytes for line in lines)
    parts = "\n".join(f"  {line.name}: {gib(line.bytes)}" for line in lines)
    devices = footprint.shape.devices
    each = f"the {device.kind}'s" if devices == 1 else f"each of {devices} {device.kind}s'"
    doubled = 2 * _power_of_two_to(devices)
    more = f"set devices to {doubled}; " if doubled <= device.count else ""
    return (
        f"the base model needs at least {gib(needed)} of {each} memory, and "
        f"{gib(device_bytes)} is available:\n{parts}\nChoose a smaller base model or dtype "
        f"bfloat16; lower max_context_tokens ({request.max_context_tokens}) or sample_rows "
        f"({request.sample_rows}), or any batch_tokens, chunk_tokens, request_slots and max_rank "
        f"that you have set; {more}or raise device_memory_bytes if the device has more"
    )


def gib(count: int) -> str:
    """Return the bytes in a readable unit."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} bytes"
