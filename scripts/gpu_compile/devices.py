"""The GPUs to compile for: their descriptions for the compiler, and their rates."""

import re
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent
_H100 = {
    "memory_bandwidth": "3352320000000",
    "device_memory_size": "84942979072",
    "name": '"NVIDIA H100 80GB HBM3"',
    "device_description_str": '"NVIDIA H100 80GB HBM3"',
}
_L40S = {
    "shared_memory_per_core": "102400",
    "threads_per_core_limit": "1536",
    "core_count": "142",
    "memory_bandwidth": "864000000000",
    "l2_cache_size": "100663296",
    "clock_rate_ghz": "2.52",
    "device_memory_size": "47697362944",
    "shared_memory_per_block_optin": "101376",
    "platform_version": '"Compute Capability 8.9"',
    "name": '"NVIDIA L40S"',
    "device_description_str": '"NVIDIA L40S"',
}
_HOPPER = "major: 9\n    feature_extension: ACCELERATED_FEATURES"


@dataclass(frozen=True)
class Gpu:
    """A GPU. Rates are those of its data sheet, for dense products and for memory."""

    name: str
    flops: float  # per second, of products in bfloat16
    bandwidth: float  # bytes per second
    processors: int
    memory_bytes: int
    description: str
    """XLA's ``GpuTargetConfigProto``, as text."""


def _described(changes: dict[str, str], capability: str = _HOPPER) -> str:
    """Return the description of the H200 with other values."""
    text = (_FOLDER / "h200.txtpb").read_text(encoding="utf-8")
    assert _HOPPER in text
    text = text.replace(_HOPPER, capability)
    for key, value in changes.items():
        text, count = re.subn(rf"^( *{key}:).*$", rf"\1 {value}", text, flags=re.MULTILINE)
        assert count == 1, key
    return text


GPUS = {
    "h200": Gpu("H200", 989e12, 4.8e12, 132, 151_397_597_184, _described({})),
    "h100": Gpu("H100", 989e12, 3.35e12, 132, 84_942_979_072, _described(_H100)),
    "l40s": Gpu(
        "L40S",
        362e12,
        0.864e12,
        142,
        47_697_362_944,
        _described(_L40S, "major: 8\n    minor: 9"),
    ),
}
