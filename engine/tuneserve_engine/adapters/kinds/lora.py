"""LoRA (Hu et al., https://arxiv.org/abs/2106.09685): A and B are trained; scale alpha / rank."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tuneserve_engine.adapters.checkpoint_format import initial_a
from tuneserve_engine.adapters.kinds.base import Array, Parts, SvdFactors, TargetShapes
from tuneserve_engine.core.adapter import AdapterConfig, check_targets


class Lora:
    """LoRA: A starts uniform in ±1/sqrt(D), as in PEFT, and B starts at zero."""

    name = "lora"
    program = ""
    needs_decomposition = False
    options: Mapping[str, str] = {}

    def validated_options(self, config: AdapterConfig, shapes: TargetShapes) -> AdapterConfig:
        check_targets(config)
        return config

    def rank(self, config: AdapterConfig, shape: tuple[int, ...]) -> int:
        return config.rank

    def scale(self, config: AdapterConfig) -> float:
        return config.alpha / config.rank

    def parameter_shapes(self, shape: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
        *layers, inputs, outputs = shape
        return {"A": (*layers, inputs, rank), "B": (*layers, rank, outputs)}

    def initial(
        self, config: AdapterConfig, index: int, shape: tuple[int, ...], frozen: SvdFactors | None
    ) -> Parts:
        a, b = self.parameter_shapes(shape, config.rank).values()
        return {"A": initial_a(config.seed, index, a), "B": np.zeros(b, np.float32)}

    def lora_pair(self, parts: Parts, frozen: SvdFactors | None) -> tuple[Array, Array]:
        return parts["A"], parts["B"]

    def project(self, parts: Parts, frozen: SvdFactors | None) -> Parts:
        return parts


def as_lora(config: AdapterConfig, scale: float) -> AdapterConfig:
    """Return the configuration of a LoRA whose pair has this scale."""
    return replace(config, kind=Lora.name, options={}, frozen="", alpha=scale * config.rank)
