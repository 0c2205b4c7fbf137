"""The models and the batches of ``gpu_accept.py``: those of a card, and tiny ones to try it."""

from dataclasses import dataclass, replace
from typing import Any

from bench_model import Shape

from scripts.gpu_compile.forecast import Load
from tuneserve_engine.core.backend_options import DType, Remat

Row = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """The models and the batches of a run."""

    chunk: int  # tokens
    checked: Shape
    checked_lengths: tuple[int, ...]
    small: Shape
    batches: dict[str, list[int]]
    models: dict[str, Shape]
    load: Load
    remats: dict[DType, tuple[Remat, ...]]  # that ``bits`` compares
    decode_slots: tuple[int, ...]
    new_tokens: int
    top: int = 0  # kernels to list


_WIDTH = Shape(4, 1024, 3072, 16, 8, 128, 32_768, 4096)
_TINY = Shape(2, 64, 160, 4, 2, 16, 512, 1024)
_06B = replace(_WIDTH, layers=28, vocab=151_936)
_8B = Shape(36, 4096, 12_288, 32, 8, 128, 151_936, 4096, tied=False)
CARD = Scale(
    chunk=2048,  # as a worker on a GPU has it
    checked=_WIDTH,
    checked_lengths=(100, 7, 64, 1, 300, 63, 65, 40, 129),
    small=_06B,
    batches={"8 x 128": [128] * 8, "64 x 20": [20] * 64, "4 x 1024": [1024] * 4},
    models={"qwen3-0.6b": _06B, "qwen3-8b": _8B},
    load=Load(),
    remats={"bfloat16": ("attention", "dots", "full", "none"), "float32": ("dots", "full")},
    decode_slots=(8, 64),
    new_tokens=128,
)
DRY = Scale(
    chunk=256,
    checked=_TINY,
    checked_lengths=(23, 5, 70, 1),
    small=_TINY,
    batches={"2 x 20": [20] * 2},
    models={"tiny": _TINY},
    load=Load(tokens=256, datum_tokens=32, context=64, rank=8, chunk=256),
    remats={"bfloat16": ("dots", "full")},
    decode_slots=(2,),
    new_tokens=8,
)
