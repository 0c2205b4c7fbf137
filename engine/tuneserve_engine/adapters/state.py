"""The whole state of an adapter as NumPy arrays: the content of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tuneserve_engine.core.adapter import AdapterConfig

_GROUPS = ("weights", "first_moment", "second_moment", "accumulator")

Tensor = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class AdapterState:
    """A resumable adapter on the host.

    ``weights`` has arrays of the true rank, without padding: ``<target>.A`` [L, d_in, rank] and
    ``<target>.B`` [L, rank, d_out]; ``unembed`` has no L. Kinds other than LoRA have arrays of
    their own. The moments are optional and have the same names. The accumulated gradient is that of
    A and B, whatever the kind, and empty if nothing is accumulated.
    """

    config: AdapterConfig
    weights: Tensors
    step: int = 0
    first_moment: Tensors = field(default_factory=dict)
    second_moment: Tensors = field(default_factory=dict)
    accumulator: Tensors = field(default_factory=dict)

    def to_tensors(self) -> Tensors:
        """Return all arrays, named ``<group>/<name>``, as files hold them."""
        return {
            f"{group}/{name}": tensor
            for group in _GROUPS
            for name, tensor in getattr(self, group).items()
        }

    @classmethod
    def from_tensors(
        cls, config: AdapterConfig, step: int, tensors: Mapping[str, Tensor]
    ) -> "AdapterState":
        """Return the state of the arrays of ``to_tensors``.

        Raises ``KeyError`` or ``ValueError`` for an array of another name.
        """
        groups: dict[str, Tensors] = {group: {} for group in _GROUPS}
        for key, tensor in tensors.items():
            group, name = key.split("/", 1)
            groups[group][name] = tensor
        return cls(config, step=step, **groups)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.to_tensors().values())
