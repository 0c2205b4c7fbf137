"""The whole state of an adapter as NumPy arrays: the content of a checkpoint."""

from dataclasses import dataclass, field

import numpy as np

from tuneserve_engine.core.adapter import AdapterConfig

Tensors = dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]


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
