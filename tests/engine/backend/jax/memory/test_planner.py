"""The planner chooses the best plan that fits."""

import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from scripts.gpu_compile import shapes as gpu_shapes
from tests.engine.backend.jax.memory.footprint_case import QWEN3
from tuneserve_engine.backend.jax.memory.footprint import Footprint
from tuneserve_engine.backend.jax.memory.planner import Device, DoesNotFit, Plan, plan
from tuneserve_engine.backend.jax.memory.sizes import EngineShape
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.core.backend_options import PlanRequest
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.telemetry.metric_names import WORKER_METRICS

MODEL = replace(
    QWEN3, vocab_size=8192, hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64,
    intermediate=1536, context_length=2048,
)  # fmt: skip
GIB = 2**30
LARGE = Device("cpu", 64 * GIB, 16 * GIB)


def planned(memory: int = 64 * GIB, config: ModelConfig = MODEL, **settings: Any) -> Plan:
    return plan(config, LARGE, PlanRequest(device_memory_bytes=memory, **settings))


@cache
def downwards(percent: int = 2, **settings: Any) -> list[Plan]:
    """Plans for less and less memory, in steps of so many percent, until no plan fits."""
    plans: list[Plan] = []
    memory = 8 * GIB
    while True:
        try:
            plans.append(planned(memory, **settings))
        except DoesNotFit:
            return plans
        memory = memory * (100 - percent) // 100


def test_with_enough_memory_everything_has_its_default() -> None:
    found = planned()
    assert (found.remat, found.sample_rows) == ("dots", 8)
    assert found.static_shapes == StaticShapes(2048)
    assert found.adapter_host_bytes == 16 * GIB


def test_an_accelerator_has_longer_chunks_and_micro_batches() -> None:
    found = plan(MODEL, Device("gpu", 64 * GIB, GIB), PlanRequest())
    assert (found.static_shapes.chunk, found.static_shapes.micro_batch_tokens) == (2048, 8192)


@pytest.mark.parametrize(
    ("kind", "asked", "dtype"),
    [
        ("cpu", "auto", "float32"),
        ("gpu", "auto", "bfloat16"),
        ("gpu", "float32", "float32"),
        ("cpu", "bfloat16", "bfloat16"),
    ],
)
def test_the_default_dtype_is_float32_on_a_cpu_only(kind: str, asked: Any, dtype: str) -> None:
    found = plan(MODEL, Device(kind, 64 * GIB, GIB), PlanRequest(dtype=asked))
    assert found.dtype == dtype
    (base,) = (line.bytes for line in found.lines if line.name == "base weights")
    assert base % (4 if dtype == "float32" else 2) == 0
    other = plan(MODEL, Device("cpu", 64 * GIB, GIB), PlanRequest(dtype="float32"))
    assert other.lines[0].bytes == base * (1 if dtype == "float32" else 2)


def test_an_accelerator_with_less_memory_shortens_micro_batches_before_it_recomputes() -> None:
    """Qwen3-8B on 80 GB, of which JAX takes 0.92."""
    config = gpu_shapes.MODELS["qwen3-8b"]
    request = PlanRequest(dtype="bfloat16", max_rank=32)
    found = plan(config, Device.accelerator("gpu", int(0.92 * 84_942_979_072), GIB), request)
    assert (found.remat, found.static_shapes.micro_batch_tokens) == ("dots", 4096)


@pytest.mark.parametrize(
    ("name", "asked", "remat", "tokens"),
    [
        ("qwen3-8b", {"sample_rows": 256}, "dots", 256 * 1024),
        ("qwen3-32b", {"sample_rows": 32, "max_context_tokens": 8192}, "full", 4 * 8192),
    ],
)
def test_many_decode_slots_fit_an_h200_with_fewer_pages(
    name: str, asked: dict[str, int], remat: str, tokens: int
) -> None:
    """Beside training with rank 32, on 141 GB, of which JAX takes 0.92."""
    device = Device.accelerator("gpu", int(0.92 * 150_754_820_096), 256 * GIB)
    request = PlanRequest(dtype="bfloat16", max_rank=32, **asked)  # type: ignore[arg-type]
    found = plan(gpu_shapes.MODELS[name], device, request)
    assert found.remat == remat
    assert found.kv_pages * found.static_shapes.block >= tokens


def h200s(count: int) -> Device:
    return Device.accelerator("gpu", int(0.92 * 150_754_820_096), 256 * GIB, count)


@pytest.mark.parametrize(("name", "devices"), [("qwen3-8b", 1), ("llama-70b", 2)])
def test_auto_takes_the_fewest_devices_on_which_a_model_fits(name: str, devices: int) -> None:
    """A 70B needs 131 GiB for its weights alone, and an H200 has 129.2 GiB for JAX."""
    found = plan(gpu_shapes.MODELS[name], h200s(8), PlanRequest(devices="auto"))
    assert found.devices == devices
    assert sum(line.bytes for line in found.lines) == found.device_bytes


@pytest.mark.parametrize(
    ("name", "devices", "context", "divided", "tokens"),
    [
        ("qwen3-8b", 4, 131_072, 1, 131_072),
        ("llama-70b", 8, 32_768, 1, 32_768),  # with 8 of 32 slots
        ("qwen3-32b", 2, 65_536, 1, 65_536),
        ("llama-70b", 4, 65_536, 4, 16_384),
        ("llama-70b", 8, 131_072, 8, 16_384),
    ],
)
def test_devices_divide_a_long_datum_only_if_no_other_plan_fits(
    name: str, devices: int, context: int, divided: int, tokens: int
) -> None:
    config = replace(gpu_shapes.MODELS[name], context_length=131_072)
    asked = PlanRequest(max_rank=32, devices=devices, max_context_tokens=context)
    found = plan(config, h200s(8), asked)
    shapes = found.static_shapes
    assert (shapes.devices_per_datum, shapes.micro_batch_tokens) == (divided, tokens)
    # Keys and values of 8 heads in bfloat16, their float32 gradients and one that is exchanged.
    lines = {line.name: line.bytes for line in found.lines}
    counted = context * 8 * 128 * (2 * 2 + 2 * 4 + 2 * 4) if divided > 1 else None
    assert lines.get("keys and values of a divided datum") == counted


def test_auto_takes_more_devices_before_they_divide_a_datum() -> None:
    config = replace(gpu_shapes.MODELS["llama-70b"], context_length=131_072)
    for context, devices, divided in ((32_768, 4, 1), (65_536, 4, 4)):
        asked = PlanRequest(max_rank=32, devices="auto", max_context_tokens=context)
        found = plan(config, h200s(8), asked)
        assert (found.devices, found.static_shapes.devices_per_datum) == (devices, divided)


def test_more_devices_hold_less_of_the_weights_each_and_the_same_of_adapters() -> None:
    """Qwen3-8B: of 15.26 GiB, both tables (2.32 GiB) and the norms are whole on each device."""
    config, sizes = gpu_shapes.MODELS["qwen3-8b"], {}
    for devices in (1, 2, 4, 8):
        found = plan(config, h200s(8), PlanRequest(max_rank=32, devices=devices))
        sizes[devices] = {line.name: line.bytes for line in found.lines}
    whole = 2 * (2 * config.vocab_size * config.hidden + config.hidden)
    whole += 2 * config.layers * (2 * config.hidden + 2 * config.head_dim)
    for devices, lines in sizes.items():
        shared = sizes[1]["base weights"] - whole
        assert lines["base weights"] == whole + shared // devices
        slots = "adapter and gradient slots, rank 32"
        assert lines[slots] == sizes[1][slots]
        pages = "KV pages"
        assert lines[pages] * devices == sizes[1][pages]


def test_heads_that_devices_cannot_share_are_whole_on_each() -> None:
    """Four heads of 64 values are two tiles: 2 devices share them, 8 only the hidden values."""
    config = replace(MODEL, hidden=1024)
    sizes = [
        {
            line.name: line.bytes
            for line in plan(config, Device("cpu", 64 * GIB, GIB, 8), PlanRequest(devices=n)).lines
        }
        for n in (2, 8)
    ]
    assert sizes[1]["KV pages"] == 2 * sizes[0]["KV pages"]


def test_devices_of_a_cpu_share_its_memory() -> None:
    found = plan(MODEL, Device("cpu", 64 * GIB, GIB, 4), PlanRequest(devices=4))
    assert found.device_bytes == 16 * GIB
    assert "weights of other devices" in {line.name for line in found.lines}


def test_more_devices_than_there_are_and_too_few_of_them_are_refused() -> None:
    with pytest.raises(
        DoesNotFit, match=r"devices is 3; one machine has 1 of kind cpu here; .* at most 1; JAX_"
    ):
        planned(devices=3)
    with pytest.raises(DoesNotFit, match=r"(?s)of each of 2 gpus' memory.*set devices to 4"):
        tiny = Device.accelerator("gpu", GIB, GIB, 4)
        plan(gpu_shapes.MODELS["qwen3-8b"], tiny, PlanRequest(devices=2))
    with pytest.raises(DoesNotFit, match=r"(?s)of each of 4 gpus' memory(?!.*set devices)"):
        plan(gpu_shapes.MODELS["qwen3-8b"], tiny, PlanRequest(devices="auto"))


def test_devices_that_would_share_nothing_are_refused() -> None:
    """Three devices divide neither heads nor tiles; eight, none of the four tiles of 512 values."""
    device = Device("cpu", 64 * GIB, GIB, 8)
    with pytest.raises(DoesNotFit, match=r"no weight .* can be divided; set devices to 2$"):
        plan(replace(MODEL, intermediate=1024), device, PlanRequest(devices=3))
    with pytest.raises(DoesNotFit, match=r"no weight .* can be divided; set devices to 4$"):
        plan(MODEL, device, PlanRequest(devices=8))


def test_a_worker_that_only_samples_gives_the_memory_of_training_to_snapshots() -> None:
    both, alone = planned(), planned(sample_only=True)
    assert (both.trains, alone.trains) == (True, False)
    assert alone.snapshot_bytes > both.snapshot_bytes + both.adapter_device_bytes / 3
    names = {line.name for line in both.lines} - {line.name for line in alone.lines}
    assert {"optimizer step", "gradients of a layer", "logits of a chunk, with gradient"} <= names
    assert alone.memory["memory_training_bytes"] == sum(
        line.bytes
        for line in alone.lines
        if line.name in ("a chunk in its layer", "layers for sampling")
    )
    limited = planned(sample_only=True, adapter_device_bytes=GIB)
    kept = limited.adapter_device_bytes + limited.snapshot_bytes - both.snapshot_bytes
    assert kept == GIB


@pytest.mark.parametrize(("gibibytes", "rows"), [(30, 8), (48, 8), (48, 128), (80, 8), (80, 256)])
def test_a_worker_that_only_samples_has_the_shapes_of_one_that_trains(
    gibibytes: int, rows: int
) -> None:
    """Programs, bits and the highest rank are named after them, also where memory is short."""
    device = Device.accelerator("gpu", int(0.92 * gibibytes * GIB), 64 * GIB)
    both, alone = (
        plan(gpu_shapes.MODELS["qwen3-8b"], device, PlanRequest(sample_only=only, sample_rows=rows))
        for only in (False, True)
    )
    for name in ("static_shapes", "dtype", "remat", "sample_rows"):
        assert getattr(alone, name) == getattr(both, name), name
    assert alone.memory["memory_training_bytes"] == 0  # kernels have room of their own
    assert alone.kv_pages >= both.kv_pages and alone.snapshot_bytes > both.snapshot_bytes


def test_a_worker_that_only_samples_fits_where_training_does_not() -> None:
    training, sampling = (downwards(max_rank=32, sample_only=only) for only in (False, True))
    assert sampling[-1].device_bytes < 0.9 * training[-1].device_bytes


def test_the_lines_add_up_to_the_whole_memory() -> None:
    for found in (
        *downwards(),
        planned(adapter_device_bytes=GIB),
        planned(sample_only=True),
    ):
        assert sum(line.bytes for line in found.lines) == found.device_bytes
        assert all(line.bytes > 0 and line.how for line in found.lines)
        assert sum(found.memory.values()) == found.device_bytes
        assert all(name in WORKER_METRICS and size > 0 for name, size in found.memory.items())
        (adapters,) = (line.bytes for line in found.lines if line.name == "adapters")
        assert adapters == found.adapter_device_bytes


def test_less_memory_costs_first_the_tape_then_slots_then_ranks() -> None:
    chosen = [
        (found.static_shapes.rank_buckets, found.static_shapes.request_slots, found.remat)
        for found in downwards()
    ]
    ranks = [len(classes) for classes, _, _ in chosen]
    assert ranks == sorted(ranks, reverse=True) and set(ranks) == {3, 2, 1}
    slowness = ["dots", "attention", "full"]
    for some in set(ranks):
        slots = [count for classes, count, _ in chosen if len(classes) == some]
        assert slots == sorted(slots, reverse=True)
        for count in set(slots):
            kept = [slowness.index(r) for c, n, r in chosen if (len(c), n) == (some, count)]
            assert kept == sorted(kept)
    assert {remat for _, _, remat in chosen} == set(slowness)
    assert chosen[-1] == ((8,), 1, "full")


def test_room_for_snapshots_shrinks_first_and_always_holds_one() -> None:
    counts = [
        (
            (each.static_shapes.rank_buckets, each.static_shapes.request_slots, each.remat),
            (each.static_shapes.micro_batch_tokens, each.kv_pages),
            snapshots(each),
        )
        for each in downwards()
    ]
    assert counts[0][2] == 8  # as many as are sampled together
    assert {count for *_, count in counts} == {8, 4, 2, 1}
    for same in {tuple(rest) for *rest, _ in counts}:
        falling = [count for *rest, count in counts if tuple(rest) == same]
        assert falling == sorted(falling, reverse=True)
    assert snapshots(planned(sample_rows=3)) == 3


def snapshots(found: Plan) -> float:
    """The number of snapshots of the highest rank that have room."""
    layer = 2 * (512 + 512) + 2 * (512 + 256) + 3 * (512 + 1536)
    per_rank = 4 * (8 * layer + 512 + 8192)
    return found.snapshot_bytes / (found.static_shapes.max_rank * per_rank)


def test_every_plan_has_room_for_the_adapters_of_a_batch() -> None:
    for found in downwards():
        static_shapes = found.static_shapes
        shape = EngineShape(static_shapes, found.remat, 8, 1, "float32", "cpu", found.kv_pages)
        assert found.adapter_device_bytes >= Footprint(MODEL, shape).batch_adapter_bytes


def test_a_micro_batch_is_shortened_only_to_fit_a_sequence_and_a_bin() -> None:
    for context, least in ((300, 1024), (2048, 2048)):
        lengths = {
            found.static_shapes.micro_batch_tokens
            for found in downwards(10, max_context_tokens=context)
        }
        assert max(lengths) == 4096 and min(lengths) == least


@pytest.mark.parametrize(
    "asked",
    [
        {"remat": "none"},
        {"remat": "attention"},
        {"remat": "full"},
        {"batch_tokens": 16_384},
        {"chunk_tokens": 128},
        {"request_slots": 16},
        {"adapter_device_bytes": GIB, "adapter_host_bytes": 0},
        {"max_context_tokens": 128},
    ],
)
def test_requested_settings_are_used(asked: dict[str, Any]) -> None:
    found = planned(**asked)
    kept = {
        "remat": found.remat,
        "batch_tokens": found.static_shapes.micro_batch_tokens,
        "chunk_tokens": found.static_shapes.chunk,
        "request_slots": found.static_shapes.request_slots,
        "adapter_device_bytes": found.adapter_device_bytes,
        "adapter_host_bytes": found.adapter_host_bytes,
        "max_context_tokens": found.static_shapes.context_length,
    }
    assert {name: kept[name] for name in asked} == asked


def test_more_requests_than_a_batch_can_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"request_slots\s+.*less than or equal to 32"):
        WorkerSettings(request_slots=33)


@pytest.mark.parametrize(
    ("max_rank", "classes"),
    [
        (4, (4,)),
        (8, (8,)),
        (16, (8, 16)),
        (32, (8, 32)),
        (64, (8, 32, 64)),
        (256, (8, 32, 128, 256)),
    ],
)
def test_the_maximum_rank_ends_the_buckets(max_rank: int, classes: tuple[int, ...]) -> None:
    assert planned(max_rank=max_rank).static_shapes.rank_buckets == classes


def test_a_requested_rank_is_not_dropped() -> None:
    assert {found.static_shapes.max_rank for found in downwards(max_rank=128)} == {128}


def test_a_context_longer_than_the_models_is_cut_to_it() -> None:
    assert planned(max_context_tokens=10**6).static_shapes.context_length == 2048


def test_a_model_without_room_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(DoesNotFit) as refused:
        planned(GIB // 8)
    said = str(refused.value)
    assert "of the cpu's memory, and 128.00 MiB is available" in said
    assert "base weights: 112.04 MiB" in said  # 29,369,856 parameters
    for setting in ("max_context_tokens (4096)", "sample_rows (8)", "device_memory_bytes"):
        assert setting in said


def test_too_little_memory_for_the_adapters_of_a_batch_is_refused_with_their_size() -> None:
    with pytest.raises(DoesNotFit, match="adapter_device_bytes is 1000; the adapters of one batch"):
        planned(adapter_device_bytes=1000)


# --- devices -------------------------------------------------------------------------------------


def test_a_cpu_shares_its_memory_with_the_machine() -> None:
    device = Device.cpu(8 * GIB)
    assert (device.kind, device.memory_bytes, device.host_bytes) == ("cpu", 4 * GIB, 2 * GIB)


def test_planning_loads_no_jax() -> None:
    module = "tuneserve_engine.backend.jax.memory.planner"
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
