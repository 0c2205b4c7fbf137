"""The learners: OSFT of almost all directions and of a quarter of them, each beside a LoRA that
trains as many numbers.

The learning rates, of the first of some steps, are such that all four know about as much of a task
when they have just learnt it: with higher ones each of them learns more, and forgets more.
"""

from typing import NamedTuple

from tuneserve_client import Adapter

# Layers, inputs and outputs of the embedded model's weights.
_LAYERS = 4
_SHAPES = [(128, 128), (128, 64), (128, 64), (128, 128), (128, 384), (128, 384), (384, 128)]


class Contender(NamedTuple):
    """An adapter, and how it is trained."""

    name: str
    adapter: Adapter
    learning_rate: float
    parameters: int

    @property
    def key(self) -> str:
        """Of the tenant."""
        return f"{self.adapter.kind}-{self.parameters}"


def _osft(share: float, learning_rate: float) -> Contender:
    """U, S and V of that share of each weight's directions, of which one at least is frozen."""
    adapter = Adapter(kind="osft", unfreeze_ratio=share)
    count = 0
    for inputs, outputs in _SHAPES:
        directions = min(inputs, outputs)
        rank = min(round(share * directions), directions - 1)
        count += _LAYERS * rank * (inputs + 1 + outputs)
    return Contender(f"OSFT, {share:.0%} of directions", adapter, learning_rate, count)


def _lora_like(other: Contender, learning_rate: float) -> Contender:
    """A and B of the rank that comes nearest to the other's number of parameters."""
    of_a_rank = _LAYERS * sum(inputs + outputs for inputs, outputs in _SHAPES)
    rank = round(other.parameters / of_a_rank)
    adapter = Adapter(kind="lora", rank=rank)
    return Contender(f"LoRA, rank {rank}", adapter, learning_rate, rank * of_a_rank)


_ALMOST_ALL, _A_QUARTER = _osft(0.99, 3e-4), _osft(0.25, 7e-3)
CONTENDERS = [_ALMOST_ALL, _lora_like(_ALMOST_ALL, 3e-3), _A_QUARTER, _lora_like(_A_QUARTER, 3e-3)]
_FEW = _osft(0.05, 3e-2)
QUICK = [_FEW, _lora_like(_FEW, 5e-3)]
