"""A check whether a worker could load a base model; the answer is printed as JSON.

    python -m tuneserve_engine.backend.jax.model.check MODEL [REVISION]

The check reads headers, not weights; it downloads and changes nothing.
"""

import json
import math
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.weights import (
    checked_files,
    expected_tensors,
    open_weights,
    read_config,
    weight_files,
)
from tuneserve_engine.core.hub import BadCheckpoint, local_folder

_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"


@dataclass(frozen=True)
class BaseModelReport:
    """The findings about a base model."""

    folder: str | None = None
    """The folder of its config.json, if that file is on this machine and usable."""
    problem: str | None = None
    """The reason why it cannot be loaded."""
    bytes: int = 0
    """Size of the weights that are on this machine."""
    is_to_download: bool = False
    to_download_bytes: int | None = None
    """Size of the missing weights, if known."""
    free_bytes: int = 0
    """Free space of the disk that the download would go to."""
    tokenizer_problem: str | None = None


def look_at(base_model: str, revision: str | None = None) -> BaseModelReport:
    try:
        if folder := local_folder(base_model, revision):
            return _look_in(folder)
        return _look_in_cache(base_model, revision)
    except OSError as error:
        return BaseModelReport(
            problem=f"{error.filename} cannot be read: {error.strerror}; see who owns it"
        )
    except ValueError as error:  # BadCheckpoint, UnsupportedModel, a value that is not a number
        return BaseModelReport(problem=str(error))


def _look_in(folder: Path) -> BaseModelReport:
    config = read_config(folder)
    try:
        with checked_files(folder, config):
            pass
    except BadCheckpoint as error:
        return BaseModelReport(str(folder), problem=str(error))
    return BaseModelReport(
        str(folder),
        bytes=_size(weight_files(folder)),
        tokenizer_problem=_tokenizer_problem(folder),
    )


def _look_in_cache(hub_id: str, revision: str | None) -> BaseModelReport:
    """Report on a model in the hub's cache.

    A worker downloads what is missing there and does not check again what is there.
    """
    try:
        cached = try_to_load_from_cache(hub_id, _CONFIG, constants.HF_HUB_CACHE, revision=revision)
    except HFValidationError as error:
        raise BadCheckpoint(
            f"base model {hub_id!r} is neither a directory nor a hub id; name one that is with "
            "--base-model"
        ) from error
    if not isinstance(cached, str):
        _check_online(hub_id, _CONFIG)
        return BaseModelReport(is_to_download=True)
    folder = Path(cached).parent
    config = read_config(folder)
    files = weight_files(folder)
    present = [each for each in files if each.is_file()]
    if len(present) == len(files):
        return _look_in(folder)
    for each in present:
        with open_weights(each):
            pass
    _check_online(hub_id, ", ".join(each.name for each in files if each not in present))
    there = _size(present)
    total = _total_bytes(folder, config)
    return BaseModelReport(
        str(folder),
        bytes=there,
        is_to_download=True,
        to_download_bytes=None if total is None else max(total - there, 0),
        free_bytes=shutil.disk_usage(folder).free,
    )


def _check_online(hub_id: str, missing: str) -> None:
    """Raise ``BadCheckpoint`` if the environment forbids a download."""
    if constants.HF_HUB_OFFLINE:
        raise BadCheckpoint(
            f"{missing} of {hub_id} is not in the hub's cache {constants.HF_HUB_CACHE}, and "
            "HF_HUB_OFFLINE forbids to download it; unset that, or fill the cache where there is "
            f"a network: hf download {hub_id}"
        )


def _total_bytes(folder: Path, config: ModelConfig) -> int | None:
    """Return the size of all weights: from their index or, without one, from the configuration."""
    if (index := folder / _INDEX).is_file():
        metadata = json.loads(index.read_text(encoding="utf-8")).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        return int(total) if isinstance(total, int | float) else None
    hf: dict[str, Any] = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    item = 4 if (hf.get("dtype") or hf.get("torch_dtype")) == "float32" else 2
    return item * sum(math.prod(place.shape) for place in expected_tensors(config).values())


def _size(files: list[Path]) -> int:
    return sum(each.stat().st_size for each in files)


def _tokenizer_problem(folder: Path) -> str | None:
    try:
        from tuneserve_client.wire.tokenizer import Tokenizer

        Tokenizer.from_folder(folder)
    except Exception as error:  # disk errors, and errors of three file formats
        return str(error)
    return None


if __name__ == "__main__":
    print(json.dumps(asdict(look_at(*sys.argv[1:3]))))
