"""rsLoRA (Kalajdzievski, https://arxiv.org/abs/2312.03732): LoRA times alpha / sqrt(rank), with
which the size of a step does not shrink as the rank grows."""

import math

from tuneserve_engine.adapters import AdapterConfig
from tuneserve_engine.kinds.lora import Lora


class RsLora(Lora):
    """Differs from LoRA in its scale alone."""

    name = "rslora"

    def scale(self, config: AdapterConfig) -> float:
        return config.alpha / math.sqrt(config.rank)
