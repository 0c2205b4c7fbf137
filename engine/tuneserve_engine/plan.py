"""``python -m tuneserve_engine.plan [--json]``: what a worker with these settings would do with the
device's memory. Loads no weights."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuneserve_engine.backend.jax.models.config import ModelConfig
from tuneserve_engine.config import REFUSED, WorkerSettings
from tuneserve_engine.planner import Plan, gib, plan

_CONFIG_FILES = ["config.json", "generation_config.json"]
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def main() -> int:
    """Exit status 0 with a plan on the standard output, 2 if there is none."""
    # A worker may be using the device: we only ask how large it is.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from tuneserve_engine.backend.jax.device_memory import default_device

    try:
        settings = WorkerSettings()
        found = plan(_read_config(settings.base_model), default_device(), settings)
    except (ValueError, OSError) as error:
        print(f"tuneserve plan: {error}", file=sys.stderr)
        return REFUSED
    if "--json" in sys.argv[1:]:
        print(json.dumps(_facts(found), indent=2))
    else:
        print("\n".join(_table(settings, found)))
    return 0


def _read_config(base_model: str) -> ModelConfig:
    """The base model's shape; of one in the hub, nothing else is downloaded."""
    from tuneserve_engine.backend.jax.models.weights import read_config, resolve_base_model

    if not _HUB_ID.fullmatch(base_model) or Path(base_model).is_dir():
        return read_config(resolve_base_model(base_model))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return read_config(Path(snapshot_download(base_model, allow_patterns=_CONFIG_FILES)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"base model {base_model!r} is neither a directory nor in the hub, or the hub cannot "
            f"be reached: {error}"
        ) from error


def _facts(found: Plan) -> dict[str, Any]:
    lattice = found.lattice
    return {
        "device": found.device.kind,
        "device_bytes": found.device_bytes,
        "context_tokens": lattice.context_length,
        "batch_tokens": lattice.stream,
        "chunk_tokens": lattice.chunk,
        "remat": found.remat,
        "request_slots": {rank: lattice.slots(rank) for rank in lattice.rank_classes},
        "sample_rows": found.sample_rows,
        "snapshot_bytes": found.snapshot_bytes,
        "adapter_device_bytes": found.adapter_device_bytes,
        "adapter_host_bytes": found.adapter_host_bytes,
        "lines": [
            {"name": line.name, "how": line.how, "bytes": line.bytes} for line in found.lines
        ],
    }


def _table(settings: WorkerSettings, found: Plan) -> Iterator[str]:
    lattice = found.lattice
    slots = ", ".join(f"{lattice.slots(rank)} to rank {rank}" for rank in lattice.rank_classes)
    yield f"{settings.served_name}, {settings.dtype}, on {found.device.kind}"
    yield f"training: remat {found.remat}, {lattice.stream} tokens at once, {lattice.chunk} a chunk"
    yield f"requests in one pass: {slots}"
    yield f"context {lattice.context_length} tokens, {found.sample_rows} sequences sampled at once"
    yield f"adapters in the host's memory: {gib(found.adapter_host_bytes)}"
    yield ""
    widths = max(len(line.name) for line in found.lines)
    for line in found.lines:
        yield f"{line.name:<{widths}}  {gib(line.bytes):>12}  {line.how}"
    yield f"{'all':<{widths}}  {gib(found.device_bytes):>12}"


if __name__ == "__main__":
    sys.exit(main())
