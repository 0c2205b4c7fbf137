"""The bytes of everything that one choice of shapes puts on the device.

Letters in formulas: L layers, D hidden, N query heads, K key/value heads, H head_dim, I
intermediate, V vocabulary, R rank, T tokens of a stream.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tuneserve_engine.backend.jax.models.config import ModelConfig
from tuneserve_engine.lattice import ShapeLattice

Remat = Literal["none", "dots", "attention", "full"]

_LOGITS_BYTES = 128 * 2**20
"""Room for the logits of one chunk of the head."""
_ADAPTER_COPIES = 4
"""Of each adapter, float32: weights, two moments, accumulated gradient."""
_STEP_COPIES = 3
"""Of an adapter, while its optimizer step runs."""
_ITEM = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Line:
    """A part of the memory and where its size comes from."""

    name: str
    how: str
    bytes: int


@dataclass(frozen=True)
class Shape:
    """What there is to choose."""

    lattice: ShapeLattice
    remat: Remat
    sample_rows: int
    dtype: Literal["float32", "bfloat16"]
    device_kind: str

    @property
    def item(self) -> int:
        """Bytes of a weight and of an activation."""
        return _ITEM[self.dtype]


@dataclass(frozen=True)
class Footprint:
    """One model in one shape."""

    config: ModelConfig
    shape: Shape

    @property
    def bytes(self) -> int:
        """Of all lines."""
        return sum(line.bytes for line in self.lines)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """All but the adapters, which take what is left."""
        return (
            self.base,
            *(self.bank(rank) for rank in self.shape.lattice.rank_classes),
            self.tape,
            self.layer_gradients,
            *self.wide_copies,
            self.stream,
            self.chunk,
            self.logits,
            self.step,
            self.unstacked,
            self.caches,
            self.lanes,
        )

    # --- weights --------------------------------------------------------------------------------

    @property
    def base(self) -> Line:
        count, item = self.parameters, self.shape.item
        return Line("base weights", f"{count:,} parameters * {item} bytes", count * item)

    @property
    def parameters(self) -> int:
        """Of the base model."""
        c = self.config
        tables = 1 if c.tied_embeddings else 2
        return c.layers * self.layer_parameters + tables * c.vocab_size * c.hidden + c.hidden

    @property
    def layer_parameters(self) -> int:
        """Of a layer of the base model."""
        c = self.config
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        layer = 2 * c.hidden * (queries + keys) + 3 * c.hidden * c.intermediate + 2 * c.hidden
        layer += (queries + 2 * keys) * c.attention_bias + c.hidden * c.output_bias
        return layer + (2 * c.intermediate + c.hidden) * c.mlp_bias + 2 * c.head_dim * c.qk_norm

    @property
    def rank_parameters(self) -> int:
        """Of an adapter, per rank: every target is there, trained or not."""
        c = self.config
        return c.layers * self._layer_rank_parameters + c.hidden + c.vocab_size

    @property
    def _layer_rank_parameters(self) -> int:
        """Inputs and outputs of a layer's seven projections."""
        c = self.config
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        return 2 * (c.hidden + queries) + 2 * (c.hidden + keys) + 3 * (c.hidden + c.intermediate)

    def adapter_bytes(self, rank: int) -> int:
        """Of one copy of an adapter of the rank class, float32."""
        return 4 * rank * self.rank_parameters

    def bank(self, rank: int) -> Line:
        slots = self.shape.lattice.slots(rank)
        return Line(
            f"bank and scratch of rank {rank}",
            f"2 * {slots} slots * 4 bytes * rank {rank} * {self.rank_parameters:,}",
            2 * slots * self.adapter_bytes(rank),
        )

    @property
    def unit_adapter_bytes(self) -> int:
        """Of the adapters that one unit can have: the least that the device must hold."""
        lattice = self.shape.lattice
        sizes = (lattice.slots(rank) * self.adapter_bytes(rank) for rank in lattice.rank_classes)
        return _ADAPTER_COPIES * max(sizes)

    def adapters_held(self, room: int) -> str:
        """How many of each class there is room for."""
        counts = (
            f"{room // (_ADAPTER_COPIES * self.adapter_bytes(rank)):,} of rank {rank}"
            for rank in self.shape.lattice.rank_classes
        )
        return f"{_ADAPTER_COPIES * 4} bytes per parameter: {' or '.join(counts)}"

    @property
    def step(self) -> Line:
        rank = self.shape.lattice.max_rank
        size = _STEP_COPIES * self.adapter_bytes(rank)
        return Line("optimizer step", f"{_STEP_COPIES} adapters of rank {rank}", size)

    # --- training -------------------------------------------------------------------------------

    @property
    def tape(self) -> Line:
        """The input of every layer, queries, keys and values of as many layers as are kept, what
        attention gave of as many, and the rest of what is kept."""
        c, item, remat = self.config, self.shape.item, self.shape.remat
        kept = self._kept_bytes
        once = 0
        if remat not in ("none", "dots"):
            once += self._projected * item
        if remat == "full":
            once += self._attended_bytes
        tokens = self.shape.lattice.stream
        return Line(
            f"training with remat {remat}",
            f"{tokens:,} tokens * ({c.layers} layers * {kept:,} bytes + {once:,})",
            tokens * (c.layers * kept + once),
        )

    @property
    def _kept_bytes(self) -> int:
        """Per token and layer."""
        return self.config.hidden * self.shape.item + self._saved_bytes(self.shape.remat)

    def _saved_bytes(self, remat: Remat) -> int:
        """Per token and layer, beside the layer's input."""
        c, item = self.config, self.shape.item
        saved = 0
        if remat != "full":
            saved += self._attended_bytes
        if remat in ("dots", "none"):
            saved += self._projected * item
        if remat == "dots":
            normed = (c.heads + c.kv_heads) * c.head_dim * c.qk_norm  # before their norm
            saved += (normed + c.hidden + 2 * c.intermediate) * item
        if remat == "none":
            saved += self._residual_bytes
        return saved

    @property
    def _projected(self) -> int:
        """Elements of queries, keys and values."""
        return (self.config.heads + 2 * self.config.kv_heads) * self.config.head_dim

    @property
    def _attended_bytes(self) -> int:
        """The result of attention, and its float32 sums."""
        return self.config.heads * (self.config.head_dim * self.shape.item + 4)

    @property
    def _residual_bytes(self) -> int:
        """What autodiff keeps of a layer if nothing is computed again: rather too much than too
        little, for it is autodiff that decides. Its norms are float32."""
        c, item, lattice = self.config, self.shape.item, self.shape.lattice
        heads = (c.heads + c.kv_heads) * (c.head_dim + 1) * c.qk_norm
        rank = lattice.max_rank
        wide = 4 * (4 * c.hidden + 2 * heads + 4)
        narrow = 2 * c.hidden + c.heads * c.head_dim + 6 * c.intermediate + 7 * rank
        cast = 0 if item == 4 else rank * self._layer_rank_parameters // lattice.block
        once = 2 * (c.hidden + c.head_dim) + 7 * lattice.chunk // lattice.block  # per chunk
        return wide + item * (narrow + cast + once // lattice.chunk + 1)

    @property
    def layer_gradients(self) -> Line:
        c, tokens = self.config, self.shape.lattice.stream
        width = c.hidden + c.heads * c.head_dim + self._projected
        return Line(
            "gradients of a layer",
            f"{tokens:,} tokens * {width:,} * {self.shape.item} bytes",
            tokens * width * self.shape.item,
        )

    @property
    def wide_copies(self) -> tuple[Line, ...]:
        """On a CPU, XLA computes bfloat16 in float32, and loops hold copies of all they carry."""
        if self.shape.dtype == "float32" or self.shape.device_kind != "cpu":
            return ()
        copied = self.tape.bytes + self.layer_gradients.bytes
        return (Line("float32 copies on a CPU", "4 * training and its gradients", 4 * copied),)

    @property
    def stream(self) -> Line:
        """Hidden states into and out of the layers; scoring has one layer's attention besides."""
        c, item, tokens = self.config, self.shape.item, self.shape.lattice.stream
        width = 2 * c.hidden * item + self._projected * item + self._attended_bytes
        return Line("a stream on its way", f"{tokens:,} tokens * {width:,} bytes", tokens * width)

    @property
    def chunk(self) -> Line:
        """Gathered adapters and their gradients, and a layer's intermediate values."""
        c, lattice = self.config, self.shape.lattice
        blocks, rank = lattice.chunk // lattice.block, lattice.max_rank
        adapters = 2 * blocks * 4 * rank * self._layer_rank_parameters
        width = 8 * c.intermediate + 8 * c.hidden + 4 * c.heads * c.head_dim
        return Line(
            "a chunk in its layer",
            f"2 * {blocks} blocks' adapters of rank {rank} + {lattice.chunk:,} tokens * {width:,} "
            "* 4 bytes",
            adapters + lattice.chunk * width * 4,
        )

    @property
    def logits(self) -> Line:
        tokens, vocab = self.head_chunk_tokens, self.config.vocab_size
        return Line(
            "logits of a chunk and their gradient",
            f"2 * {tokens:,} tokens * {vocab:,} * 4 bytes",
            2 * tokens * vocab * 4,
        )

    @property
    def head_chunk_tokens(self) -> int:
        """The largest part of a chunk whose logits fit their room; a block at least."""
        block, blocks = (
            self.shape.lattice.block,
            self.shape.lattice.chunk // self.shape.lattice.block,
        )
        room = _LOGITS_BYTES // (4 * block * self.config.vocab_size)
        return block * max(n for n in range(1, blocks + 1) if blocks % n == 0 and n <= max(room, 1))

    # --- sampling -------------------------------------------------------------------------------

    @property
    def unstacked(self) -> Line:
        """Decoding reads each layer's weights from arrays of their own."""
        layers, count, item = self.config.layers, self.layer_parameters, self.shape.item
        return Line(
            "layers for sampling",
            f"{layers} layers * {count:,} parameters * {item} bytes",
            layers * count * item,
        )

    @property
    def caches(self) -> Line:
        c, item, rows = self.config, self.shape.item, self.shape.sample_rows
        capacity = self.shape.lattice.capacities[-1]
        width = 2 * c.layers * c.kv_heads * c.head_dim
        return Line(
            "sampling caches",
            f"{rows} rows * {capacity:,} tokens * {width:,} * {item} bytes",
            rows * capacity * width * item,
        )

    @property
    def lanes(self) -> Line:
        rank, rows = self.shape.lattice.max_rank, self.shape.sample_rows
        return Line(
            "sampling bank",
            f"{rows} rows * 4 bytes * rank {rank} * {self.rank_parameters:,}",
            rows * self.adapter_bytes(rank),
        )
