"""Rank-stabilised LoRA differs from LoRA in its scale only."""

from tuneserve_engine.adapters.kinds.lora import Lora
from tuneserve_engine.adapters.kinds.rslora import RsLora
from tuneserve_engine.core.adapter import AdapterConfig


def test_the_scale_is_alpha_over_the_root_of_the_rank() -> None:
    config = AdapterConfig(rank=9, alpha=6.0, seed=0, kind="rslora")
    assert RsLora().scale(config) == 2.0


def test_the_shapes_are_those_of_lora() -> None:
    assert RsLora().parameter_shapes((2, 3, 5), 4) == {"A": (2, 3, 4), "B": (2, 4, 5)}
    assert RsLora().program == Lora().program == ""
