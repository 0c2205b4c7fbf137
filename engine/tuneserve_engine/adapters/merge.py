"""The merge of an adapter in PEFT's layout into the base model's weights, giving a plain model.

    python -m tuneserve_engine.adapters.merge ADAPTER BASE OUT

One file of weights is in memory at a time.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - adds bfloat16 to NumPy
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from tuneserve_engine.core.errors import REFUSED
from tuneserve_engine.core.hub import local_folder, resolve_base_model

_PREFIX = "base_model.model."
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_CONFIG = "config.json"

Array = np.ndarray[Any, Any]


class CannotMerge(ValueError):
    """The adapter and the base model do not fit, or one of them is incomplete."""


def main() -> int:
    """Return exit status 0 with the model in OUT, or 2 with the reason on the standard error."""
    adapter, base, out = sys.argv[1:]
    try:
        merge(Path(adapter), _base_folder(Path(adapter), base), Path(out))
    except (ValueError, OSError, SafetensorError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


def _base_folder(adapter: Path, base: str) -> Path:
    """Return the folder of the base model's files.

    For a model on the hub, these are the files of the revision that the adapter names.
    """
    if folder := local_folder(base):
        return folder
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    return resolve_base_model(base, config.get("revision"))


def merge(adapter: Path, base: Path, out: Path) -> None:
    """Write W + scale · B·A in the base model's own types.

    A tied unembedding that the adapter changes becomes a matrix of its own. Raises
    ``CannotMerge``.
    """
    changes = _Changes(adapter)
    config = json.loads((base / _CONFIG).read_text(encoding="utf-8"))
    is_tied = config.get("tie_word_embeddings", False)
    is_untied = is_tied and _HEAD in changes.names
    places: dict[str, str] = {}
    for file in _weight_files(base):
        with safe_open(file, framework="numpy") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        if is_tied:
            tensors.pop(_HEAD, None)  # a copy that is never read
        if is_untied and _EMBED in tensors:
            tensors[_HEAD] = tensors[_EMBED]
        for name in changes.names & tensors.keys():
            tensors[name] = changes.added(name, tensors[name])
        save_file(tensors, out / file.name, {"format": "pt"})
        places |= dict.fromkeys(tensors, file.name)
    if absent := sorted(changes.names - places.keys()):
        raise CannotMerge(
            f"{base} has no {absent[0]}, which the adapter changes; it was trained on another base "
            "model: name that one"
        )
    _copy_others(base, out)
    if (base / _INDEX).is_file():
        total = sum((out / name).stat().st_size for name in set(places.values()))
        _write_json(out / _INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    # Written last, so that an interrupted merge does not leave a loadable model.
    _write_json(out / _CONFIG, {**config, "tie_word_embeddings": is_tied and not is_untied})


class _Changes:
    """The changes that an adapter makes to weights, by the weights' names."""

    def __init__(self, adapter: Path) -> None:
        config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        self._scale = np.float32(config["lora_alpha"] / config["r"])
        self._tensors = load_file(adapter / "adapter_model.safetensors")
        ending = ".lora_A.weight"
        modules = [name.removesuffix(ending) for name in self._tensors if name.endswith(ending)]
        self.names = {f"{module.removeprefix(_PREFIX)}.weight" for module in modules}

    def added(self, name: str, weight: Array) -> Array:
        module = f"{_PREFIX}{name.removesuffix('.weight')}"
        a, b = (self._tensors[f"{module}.lora_{part}.weight"] for part in "AB")
        if weight.shape != (len(b), a.shape[1]):
            raise CannotMerge(
                f"{name} is {weight.shape} in the base model and {(len(b), a.shape[1])} in the "
                "adapter; it was trained on another base model: name that one"
            )
        change = self._scale * (b.astype(np.float32) @ a.astype(np.float32))
        summed: Array = (weight.astype(np.float32) + change).astype(weight.dtype)
        return summed


def _weight_files(base: Path) -> list[Path]:
    index = base / _INDEX
    if not index.is_file():
        return [base / _ONE_FILE]
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [base / name for name in sorted(set(names))]


def _copy_others(base: Path, out: Path) -> None:
    """Copy the tokenizer, the chat template, and all other files beside the weights."""
    for file in base.iterdir():
        is_ours = file.suffix == ".safetensors" or file.name in (_INDEX, _CONFIG)
        if file.is_file() and not is_ours:
            shutil.copyfile(file, out / file.name)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
