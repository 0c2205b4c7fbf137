"""rsLoRA (Kalajdzievski, https://arxiv.org/abs/2312.03732): LoRA with the scale alpha / sqrt(rank).

With this scale, the size of a step does not shrink as the rank grows.
"""

import math

from tuneserve_engine.adapters.kinds.lora import Lora
from tuneserve_engine.core.adapter import AdapterConfig


class RsLora(Lora):
    """A LoRA that differs in its scale only."""

    name = "rslora"

    def scale(self, config: AdapterConfig) -> float:
        return config.alpha / math.sqrt(config.rank)
