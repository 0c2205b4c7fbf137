"""The sizes that lines of the memory plan are made of.

Letters in formulas: L layers, D hidden, N query heads, K key/value heads, H head_dim, I
intermediate, V vocabulary, R rank, T tokens of a micro-batch.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.weight_shapes import layer_shapes, most_parts
from tuneserve_engine.core.backend_options import DType, Remat
from tuneserve_engine.core.shapes import StaticShapes

_ITEM = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Line:
    """A part of the memory, with the formula of its size."""

    name: str
    how: str
    bytes: int


@dataclass(frozen=True)
class EngineShape:
    """The choices that the planner makes."""

    static_shapes: StaticShapes
    remat: Remat
    sample_rows: int
    snapshots: int  # snapshots of the highest rank that fit on the device
    dtype: DType
    device_kind: str
    kv_pages: int
    devices: int = 1
    trains: bool = True

    @property
    def item(self) -> int:
        """Bytes of a weight and of an activation."""
        return _ITEM[self.dtype]


class _Own(NamedTuple):
    """A device's parameters of a layer, and the number of devices that share the heads."""

    layer_parameters: int
    rank_parameters: int
    of_heads: int


@cache
def _own(config: ModelConfig, devices: int) -> _Own:
    parts, shapes = most_parts(config), layer_shapes(config)
    sharing = {name: devices if count % devices == 0 else 1 for name, count in parts.items()}
    return _Own(
        sum(prod(shape) // sharing.get(name, 1) for name, shape in shapes.items()),
        sum(shapes[name][0] + shapes[name][1] // count for name, count in sharing.items()),
        sharing["k_proj"],
    )


@dataclass(frozen=True)
class Sizes:
    """One model in one shape."""

    config: ModelConfig
    shape: EngineShape

    @property
    def parameters(self) -> int:
        """The number of parameters of the base model."""
        c = self.config
        tables = 1 if c.tied_embeddings else 2
        return c.layers * self.layer_parameters + tables * c.vocab_size * c.hidden + c.hidden

    @property
    def own_parameters(self) -> int:
        """The parameters of the base model that each device has."""
        layers = self.config.layers
        return self.parameters - layers * (self.layer_parameters - self.own_layer_parameters)

    @property
    def own_layer_parameters(self) -> int:
        """The parameters of a layer that each device has."""
        return _own(self.config, self.shape.devices).layer_parameters

    @property
    def own_rank_parameters(self) -> int:
        """Parameters of an adapter per rank in a device's adapter slots of sampling.

        They are all of A, and of B the outputs of the device's weights.
        """
        c = self.config
        layer = _own(c, self.shape.devices).rank_parameters
        return c.layers * layer + c.hidden + c.vocab_size

    @property
    def own_kv_heads(self) -> int:
        """The key/value heads whose pages each device has."""
        return self.config.kv_heads // _own(self.config, self.shape.devices).of_heads

    @property
    def layer_parameters(self) -> int:
        """The number of parameters of one layer of the base model."""
        c = self.config
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        layer = 2 * c.hidden * (queries + keys) + 3 * c.hidden * c.intermediate + 2 * c.hidden
        layer += (queries + 2 * keys) * c.attention_bias + c.hidden * c.output_bias
        return layer + (2 * c.intermediate + c.hidden) * c.mlp_bias + 2 * c.head_dim * c.qk_norm

    @cached_property
    def rank_parameters(self) -> int:
        """Parameters of an adapter per rank: every target is included, trained or not."""
        c = self.config
        return c.layers * self.layer_rank_parameters + c.hidden + c.vocab_size

    @property
    def layer_rank_parameters(self) -> int:
        """Inputs and outputs of a layer's seven projections."""
        c = self.config
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        return 2 * (c.hidden + queries) + 2 * (c.hidden + keys) + 3 * (c.hidden + c.intermediate)

    def adapter_bytes(self, rank: int) -> int:
        """Return the bytes of one float32 copy of an adapter of the rank bucket."""
        return 4 * rank * self.rank_parameters

    @property
    def layer_width(self) -> int:
        """Intermediate values of a token in a layer."""
        c = self.config
        return 8 * c.intermediate + 8 * c.hidden + 4 * c.heads * c.head_dim
