"""Prints the plan of the device's memory for a worker with the current settings.

    python -m tuneserve_engine.backend.jax.memory.report [--json] [--device h200]

No weights are loaded. ``--device`` plans for a GPU that is not there.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuneserve_engine.adapters.kinds import KINDS, adapter_bytes, decomposition_bytes
from tuneserve_engine.adapters.kinds.base import TargetShapes
from tuneserve_engine.backend.jax.memory.planner import Plan, gib, plan
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.core.errors import REFUSED
from tuneserve_engine.core.gpus import GPU_MIB
from tuneserve_engine.settings.worker import WorkerSettings

_CONFIG_FILES = ["config.json", "generation_config.json"]
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def main() -> int:
    """Print the plan and return exit status 0, or 2 if no plan is possible."""
    parser = argparse.ArgumentParser(prog="tuneserve plan")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", choices=GPU_MIB)
    asked = parser.parse_args()
    # A worker may be using the device, and the plan needs only the size of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from tuneserve_engine.backend.jax.memory.device import default_device, named_gpu
    from tuneserve_engine.backend.jax.model.weights import read_config

    try:
        settings = WorkerSettings()
        folder = config_folder(settings.base_model, settings.base_model_revision)
        config = read_config(folder)
        device = named_gpu(asked.device) if asked.device else default_device()
        found = plan(config, device, settings.plan_request)
    except (ValueError, OSError) as error:
        print(f"tuneserve plan: {error}", file=sys.stderr)
        return REFUSED
    if asked.json:
        print(json.dumps(_facts(config, found), indent=2))
    else:
        print("\n".join((*_table(settings, found), *_table_of_kinds(_kinds(config, found)))))
    return 0


def config_folder(base_model: str, revision: str | None) -> Path:
    """Return the folder of a base model; of a hub model, only the configuration is downloaded.

    Raises ``ValueError`` if it is neither a folder nor in the hub.
    """
    from tuneserve_engine.core.hub import resolve_base_model

    if not _HUB_ID.fullmatch(base_model) or Path(base_model).is_dir():
        return resolve_base_model(base_model, revision)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        found = snapshot_download(base_model, revision=revision, allow_patterns=_CONFIG_FILES)
        return Path(found)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"base model {base_model!r} is neither a directory nor in the hub, or the hub cannot "
            f"be reached: {error}"
        ) from error


def _kinds(config: ModelConfig, found: Plan) -> dict[str, Any]:
    """Return facts about each kind of adapter on this device.

    The facts are the size of an adapter by rank, the size of the data that adapters of the kind
    share on the device and on disk, and the refused ranks. A rank is refused if the adapters of one
    batch do not fit beside the shared data.
    """
    from tuneserve_engine.backend.jax.adapters.arrays import target_shapes

    shapes, static_shapes = target_shapes(config), found.static_shapes
    facts: dict[str, Any] = {}
    for forms in KINDS.values():
        for form, kind in forms.items():
            of_rank = {
                rank: adapter_bytes(kind, shapes, rank) for rank in static_shapes.rank_buckets
            }
            own = facts[f"{kind.name} {form}".strip()] = {"bytes_by_rank": of_rank}
            if kind.needs_decomposition:
                own |= _shared(shapes, static_shapes.max_rank)
                left = found.adapter_device_bytes - own["shared_device_bytes"]
                own["refused_ranks"] = [
                    r for r in of_rank if static_shapes.slots(r) * of_rank[r] > left
                ]
    return facts


def _shared(shapes: TargetShapes, max_rank: int) -> dict[str, int]:
    layers = {name: shape for name, shape in shapes.items() if len(shape) == 3}
    directions = {name: min(shape[-2:]) for name, shape in layers.items()}
    numbers = sum(n * directions[name] * (i + o + 1) for name, (n, i, o) in layers.items())
    return {
        "shared_device_bytes": decomposition_bytes(shapes, max_rank),
        "shared_disk_bytes": 4 * numbers,
        "directions": max(directions.values()),
    }


def _facts(config: ModelConfig, found: Plan) -> dict[str, Any]:
    static_shapes = found.static_shapes
    return {
        "device": found.device.kind,
        "devices": found.devices,
        "device_bytes": found.device_bytes,
        "dtype": found.dtype,
        "context_tokens": static_shapes.context_length,
        "batch_tokens": static_shapes.micro_batch_tokens,
        "chunk_tokens": static_shapes.chunk,
        "devices_per_datum": static_shapes.devices_per_datum,
        "remat": found.remat,
        "request_slots": {rank: static_shapes.slots(rank) for rank in static_shapes.rank_buckets},
        "sample_rows": found.sample_rows,
        "kv_pages": found.kv_pages,
        "snapshot_bytes": found.snapshot_bytes,
        "adapter_device_bytes": found.adapter_device_bytes,
        "adapter_host_bytes": found.adapter_host_bytes,
        "kinds": _kinds(config, found),
        "lines": [
            {"name": line.name, "how": line.how, "bytes": line.bytes} for line in found.lines
        ],
    }


def _table(settings: WorkerSettings, found: Plan) -> Iterator[str]:
    static_shapes = found.static_shapes
    slots = ", ".join(
        f"{static_shapes.slots(rank)} up to rank {rank}" for rank in static_shapes.rank_buckets
    )
    devices = "" if found.devices == 1 else f", {found.devices} devices; sizes are those of each"
    yield f"{settings.served_name}, {found.dtype}, on {found.device.kind}{devices}"
    if settings.sample_only:
        yield "samples only, no training"
    else:
        yield (
            f"training: remat {found.remat}, micro-batches of {static_shapes.micro_batch_tokens} "
            f"tokens, chunks of {static_shapes.chunk} tokens"
        )
        if static_shapes.devices_per_datum > 1:
            yield "datums longer than a micro-batch are divided among the devices"
        yield f"requests in one batch: {slots}"
    yield (
        f"context of {static_shapes.context_length} tokens, {found.sample_rows} sequences decoded "
        f"together, KV pages for {(found.kv_pages - 1) * static_shapes.block} tokens"
    )
    yield f"adapters in the host's memory: {gib(found.adapter_host_bytes)}"
    yield ""
    widths = max(len(line.name) for line in found.lines)
    for line in found.lines:
        yield f"{line.name:<{widths}}  {gib(line.bytes):>12}  {line.how}"
    yield f"{'total':<{widths}}  {gib(found.device_bytes):>12}"


def _table_of_kinds(kinds: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "size of an adapter on the device: weights, two moments and gradient, 4 bytes each"
    width = max(map(len, kinds))
    for name, facts in kinds.items():
        sizes = ", ".join(f"{gib(size)} of rank {r}" for r, size in facts["bytes_by_rank"].items())
        refused = ", ".join(map(str, facts.get("refused_ranks", [])))
        yield f"{name:<{width}}  {sizes}" + (f"; no room for rank {refused}" if refused else "")
    for name, facts in kinds.items():
        if "shared_device_bytes" in facts:
            shared = gib(facts["shared_device_bytes"])
            yield (
                f"all adapters of kind {name.split()[0]} share {shared} on the device, while it "
                f"holds one, and {gib(facts['shared_disk_bytes'])} on disk; their rank is "
                f"unfreeze_ratio * {facts['directions']:,}, the directions of the largest weight"
            )
            return


if __name__ == "__main__":
    sys.exit(main())
