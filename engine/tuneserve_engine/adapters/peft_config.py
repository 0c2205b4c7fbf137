"""PEFT's ``adapter_config.json``: the supported fields, and the errors for unsupported ones."""

import json
import math
from dataclasses import dataclass
from typing import Any

import msgspec

from tuneserve_engine.core.errors import UserError

MAX_CONFIG_BYTES = 256 * 1024
"""The largest configuration that is read. PEFT writes about two kilobytes; a configuration that
names each module of 128 layers takes 60."""

_CONFIG = "adapter_config.json"
_LARGEST_ALPHA = 2.0**100  # far beyond any use; times a root of the rank, still a float32
_LARGEST_RANK = 2**20  # wider than any projection
_SHOWN = 80

_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights"}
_ANYTHING = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "target_modules", "exclude_modules", "layers_pattern", "lora_dropout"),
    *("megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config"),
    *("eva_config", "loftq_config"),
}
"""The fields that do not change the numbers of a saved adapter: its tensors name its modules, and
dropout is for training only."""
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
_WAYS_OUT = {
    "modules_to_save": "whole modules were trained beside the adapter; train it without them",
    "use_dora": "DoRA scales the columns of the weights, which is not LoRA; train it without",
    "rank_pattern": "all modules must have one rank; train it with the same r for all",
    "alpha_pattern": "all modules must have one alpha; train it with the same lora_alpha for all",
    "layers_to_transform": "all layers must have an adapter; train it on all of them",
    "fan_in_fan_out": "the base models served here store their weights the other way round",
    "lora_bias": "biases are not trained here; train it without them",
    "trainable_token_indices": "embeddings are not trained here; train it without them",
}
_UNKNOWN = "this server imports plain LoRA, which that may change; train the adapter without it"


@dataclass(frozen=True)
class PeftConfig:
    """The rank of an adapter, and the alpha for which alpha / rank is PEFT's scale."""

    base_model: str
    rank: int
    alpha: float


def read_config(text: bytes) -> PeftConfig:
    """Read a configuration. Raises ``UserError`` that names the field at fault."""
    found = _parsed(text)
    if (kind := found.get("peft_type")) != "LORA":
        raise _refused("peft_type", kind, 'only "LORA" can be imported')
    for field, value in found.items():
        if field not in _READ | _ANYTHING and value not in (None, False, [], {}, ""):
            raise _refused(field, value, _WAYS_OUT.get(field, _UNKNOWN))
    if found.get("bias", "none") not in ("none", None):
        raise _refused("bias", found["bias"], 'biases are not trained here; use bias="none"')
    if (start := found.get("init_lora_weights")) not in _PLAIN_STARTS:
        way_out = (
            "that start changes the base model's weights too; let PEFT convert the adapter "
            "(path_initial_model_for_weight_conversion of save_pretrained)"
        )
        raise _refused("init_lora_weights", start, way_out)
    rank, alpha = _rank(found), _alpha(found)
    if (is_rank_stable := found.get("use_rslora")) not in (None, True, False):
        raise _refused("use_rslora", is_rank_stable, "it must be true or false")
    base_model = found.get("base_model_name_or_path")
    return PeftConfig(
        base_model=base_model if isinstance(base_model, str) else "",
        rank=rank,
        alpha=alpha * math.sqrt(rank) if is_rank_stable else alpha,
    )


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UserError(f"{_CONFIG} is no JSON: {error}; save the adapter again") from None
    if not isinstance(found, dict):
        raise UserError(f"{_CONFIG} is no JSON object; send the one that save_pretrained writes")
    return found


def _rank(found: dict[str, Any]) -> int:
    rank = found.get("r")
    if type(rank) is not int or rank < 1:
        raise _refused("r", rank, "it must be a whole number above 0")
    if rank > _LARGEST_RANK:
        raise _refused("r", rank, f"no adapter has a rank above {_LARGEST_RANK}; save it again")
    return rank


def _alpha(found: dict[str, Any]) -> float:
    alpha: Any = found.get("lora_alpha")
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not 0 < alpha <= _LARGEST_ALPHA:
        raise _refused("lora_alpha", alpha, "it must be a finite number above 0, at most 2**100")
    return float(alpha)


def _refused(field: str, value: object, way_out: str) -> UserError:
    shown = json.dumps(value)
    return UserError(f"{_CONFIG} has {_cut(field)} = {_cut(shown)}; {way_out}")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
