"""The bytes of everything that one choice of shapes puts on the device.

Letters in formulas: as in ``sizes``.
"""

from functools import cached_property

from tuneserve_engine.backend.jax.memory.gpu_room import (
    TOKEN_BYTES,
    LayerRoom,
    Logits,
    has_kernels,
    layers_have_kernels,
    scored_bytes,
    trained_bytes,
)
from tuneserve_engine.backend.jax.memory.sampling_room import SamplingRoom
from tuneserve_engine.backend.jax.memory.sizes import Line, Sizes
from tuneserve_engine.backend.jax.model.tile import padded_rank
from tuneserve_engine.backend.jax.training.head_chunks import head_chunk_blocks
from tuneserve_engine.core.backend_options import Remat

_ADAPTER_COPIES = 4
"""Float32 copies per adapter: weights, two moments, accumulated gradient."""
_STEP_COPIES, _GPU_STEP_COPIES = 3, 2
"""Copies of an adapter that its optimizer step needs while it runs, of any kind of adapter."""
_UNDER_WAY = 2
"""Micro-batches on the device at once."""


class Footprint(Sizes):
    """The memory that one model takes in one shape."""

    @property
    def bytes(self) -> int:
        """The sum of all lines."""
        return sum(line.bytes for line in self.lines)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """All parts except the adapters, which take what is left."""
        return (
            self.base,
            *(self.training if self.shape.trains else self.of_prefill),
            *((self.sampling.unstacked,) if self.sampling.unstacked.bytes else ()),
            *self.sampling.lines,
            *self.wide_copies,
        )

    @property
    def training(self) -> tuple[Line, ...]:
        """All parts of training except the adapters."""
        return (
            *(self.adapter_slots(rank) for rank in self.shape.static_shapes.rank_buckets),
            self.tape,
            self.layer_gradients,
            self.batches,
            *self.temporaries,
            self.step,
        )

    @property
    def of_prefill(self) -> tuple[Line, ...]:
        """The temporary memory of training that prefill shares, unless it has kernels."""
        if has_kernels(self.config, self.shape.device_kind):
            return ()
        return (self.chunk, *((self.gathered,) if self.gathered.bytes else ()))

    @property
    def temporaries(self) -> tuple[Line, ...]:
        """The temporary memory of training and scoring.

        If kernels compute the adapters, only one of the two takes room, and of its phases only one.
        """
        if not has_kernels(self.config, self.shape.device_kind):
            gathered = (self.gathered,) if self.gathered.bytes else ()
            parts = self.micro_batch, self.chunk, self.logits, self.head_adapters
            return *parts, *gathered, *self.divided
        tokens, item = self.head_chunk_tokens, self.shape.item
        logits = Logits(tokens, self.logits.bytes, 4 * tokens * self.config.vocab_size)
        shapes = self.shape.static_shapes
        copied = 0 if shapes.is_one_chunk else self.layer_parameters * item
        copied = self._gathered_layers or copied
        layer = LayerRoom(copied, self.shape.remat in ("attention", "full"))
        sizes = [f(self.config, shapes, item, layer, logits) for f in (trained_bytes, scored_bytes)]
        how = f"{sizes[0]:,} bytes in training, or {sizes[1]:,} in scoring"
        return (Line("a micro-batch in progress", how, max(sizes)), *self.divided)

    @property
    def divided(self) -> tuple[Line, ...]:
        """The keys and values of all devices, of one layer, if they divide a datum.

        Each is there in one array, has a float32 gradient, and one gradient at a time is exchanged.
        """
        c, shapes = self.config, self.shape.static_shapes
        if shapes.devices_per_datum == 1:
            return ()
        tokens = shapes.devices_per_datum * shapes.micro_batch_tokens
        width = c.kv_heads * c.head_dim
        each = 2 * self.shape.item + 2 * 4 + 2 * 4
        how = f"{tokens:,} tokens * {width:,} * {each} bytes"
        return (Line("keys and values of a divided datum", how, tokens * width * each),)

    @property
    def sampling(self) -> SamplingRoom:
        return SamplingRoom(self.config, self.shape)

    @property
    def gathered(self) -> Line:
        """The weights that training gathers from other devices."""
        how = "two layers, and the largest matrix of one"
        return Line("weights of other devices", how, self._gathered_layers)

    @property
    def _gathered_layers(self) -> int:
        """Bytes of a layer, of the next one, and of its largest matrix once more.

        0 if no device shares them.
        """
        if self.own_layer_parameters == self.layer_parameters:
            return 0
        largest = self.config.hidden * self.config.intermediate
        return (2 * self.layer_parameters + largest) * self.shape.item

    # --- weights --------------------------------------------------------------------------------

    @property
    def base(self) -> Line:
        count, item = self.own_parameters, self.shape.item
        own = "" if count == self.parameters else f" of {self.parameters:,}"
        return Line("base weights", f"{count:,}{own} parameters * {item} bytes", count * item)

    def adapter_slots(self, rank: int) -> Line:
        slots = self.shape.static_shapes.slots(rank)
        return Line(
            f"adapter and gradient slots, rank {rank}",
            f"2 * {slots} slots * 4 bytes * rank {rank} * {self.rank_parameters:,}",
            2 * slots * self.adapter_bytes(rank),
        )

    @property
    def batch_adapter_bytes(self) -> int:
        """The most bytes of adapters that one batch can have: the least the device must hold.

        Without training, it is one adapter: a checkpoint of training that is sampled from.
        """
        static_shapes = self.shape.static_shapes
        if not self.shape.trains:
            return _ADAPTER_COPIES * self.adapter_bytes(static_shapes.max_rank)
        sizes = (
            static_shapes.slots(rank) * self.adapter_bytes(rank)
            for rank in static_shapes.rank_buckets
        )
        return _ADAPTER_COPIES * max(sizes)

    def adapters_held(self, room: int) -> str:
        """Return a text with the number of adapters of each rank bucket that fit into ``room``."""
        counts = (
            f"{room // (_ADAPTER_COPIES * self.adapter_bytes(rank)):,} of rank {rank}"
            for rank in self.shape.static_shapes.rank_buckets
        )
        return f"{_ADAPTER_COPIES * 4} bytes per parameter: {' or '.join(counts)}"

    @property
    def step(self) -> Line:
        """The room of an optimizer step.

        Training has room there for the earlier gradients of requests in several micro-batches: one
        per device that runs at once.
        """
        rank = self.shape.static_shapes.max_rank
        copies = _GPU_STEP_COPIES if self.shape.device_kind == "gpu" else _STEP_COPIES
        devices, shapes = self.shape.devices, self.shape.static_shapes
        earlier = [
            min(devices, shapes.slots(each)) * self.adapter_bytes(each)
            for each in shapes.rank_buckets
        ]
        size = copies * self.adapter_bytes(rank)
        how = f"{copies} adapters of rank {rank}"
        if max(earlier) > size:
            size, how = max(earlier), f"earlier gradients of up to {devices} requests"
        return Line("optimizer step", how, size)

    # --- training -------------------------------------------------------------------------------

    @property
    def tape(self) -> Line:
        """The tape of the backward pass, as ``remat`` says.

        It holds the input of every layer, queries, keys and values of as many layers as are kept,
        attention's results of as many, and the other kept values.
        """
        c, item, remat = self.config, self.shape.item, self.shape.remat
        kept = self._kept_bytes
        once = 0
        if remat not in ("none", "dots"):
            once += self._projected * item
        if remat == "full":
            once += self._attended_bytes
        tokens = self.shape.static_shapes.micro_batch_tokens
        return Line(
            f"training with remat {remat}",
            f"{tokens:,} tokens * ({c.layers} layers * {kept:,} bytes + {once:,})",
            tokens * (c.layers * kept + once),
        )

    @property
    def _kept_bytes(self) -> int:
        """Bytes per token and layer."""
        return self.config.hidden * self.shape.item + self._saved_bytes(self.shape.remat)

    def _saved_bytes(self, remat: Remat) -> int:
        """Return the bytes per token and layer, beside the layer's input."""
        c, item = self.config, self.shape.item
        saved = 0
        if remat != "full":
            saved += self._attended_bytes
        if remat in ("dots", "none"):
            saved += self._projected * item
        if remat == "dots":
            normed = (c.heads + c.kv_heads) * c.head_dim * c.qk_norm  # q and k before their norm
            saved += (normed + c.hidden + 2 * c.intermediate) * item
            if layers_have_kernels(c, self.shape.device_kind):
                saved += 4 * 7 * padded_rank(self.shape.static_shapes.max_rank)  # products with A
        if remat == "none":
            saved += self._residual_bytes
        return saved

    @property
    def _projected(self) -> int:
        """Elements of queries, keys and values."""
        return (self.config.heads + 2 * self.config.kv_heads) * self.config.head_dim

    @property
    def _attended_bytes(self) -> int:
        """Bytes of the result of attention and its float32 sums."""
        return self.config.heads * (self.config.head_dim * self.shape.item + 4)

    @property
    def _residual_bytes(self) -> int:
        """Bytes that autodiff keeps of a layer if nothing is recomputed.

        An estimate on the high side, since autodiff decides what to keep. Its norms are float32.
        """
        c, item, static_shapes = self.config, self.shape.item, self.shape.static_shapes
        heads = (c.heads + c.kv_heads) * (c.head_dim + 1) * c.qk_norm
        rank = static_shapes.max_rank
        wide = 4 * (4 * c.hidden + 2 * heads + 4)
        narrow = 2 * c.hidden + c.heads * c.head_dim + 6 * c.intermediate + 7 * rank
        cast = 0 if item == 4 else rank * self.layer_rank_parameters // static_shapes.block
        scales = 4 * 7 * static_shapes.chunk // static_shapes.block
        once = 2 * (c.hidden + c.head_dim) * item + scales  # per chunk
        return wide + item * (narrow + cast + 1) + once // static_shapes.chunk

    @property
    def layer_gradients(self) -> Line:
        c, tokens = self.config, self.shape.static_shapes.micro_batch_tokens
        width = c.hidden + c.heads * c.head_dim + self._projected
        return Line(
            "gradients of a layer",
            f"{tokens:,} tokens * {width:,} * {self.shape.item} bytes",
            tokens * width * self.shape.item,
        )

    @property
    def wide_copies(self) -> tuple[Line, ...]:
        """Float32 copies that XLA makes on a CPU.

        There it computes bfloat16 in float32, and loops hold copies of all that they carry and of
        all that they read.
        """
        if self.shape.dtype == "float32" or self.shape.device_kind != "cpu":
            return ()
        carried = self.shape.trains * (self.tape.bytes + self.layer_gradients.bytes)
        sampling = self.sampling
        read = 2 * (self.base.bytes + sampling.caches.bytes) + sampling.decode_adapters.bytes
        return (
            Line("float32 copies on a CPU", "4 * training and its gradients", 4 * carried),
            Line("float32 copies of inputs", "2 * (weights and KV pages), adapter slots", read),
        )

    @property
    def batches(self) -> Line:
        """Arguments and results of micro-batches.

        They are targets, target weights and logprobs, and one of each per-token array.
        """
        tokens, targets = (
            self.shape.static_shapes.micro_batch_tokens,
            self.shape.static_shapes.target_buckets[-1],
        )
        width = 3 * 4 * targets + 56
        return Line(
            "micro-batches on the device",
            f"{_UNDER_WAY} * {tokens:,} tokens * {width:,} bytes",
            _UNDER_WAY * tokens * width,
        )

    @property
    def micro_batch(self) -> Line:
        """Hidden states into, within and out of the layers.

        A pass that leaves no tape (``forward_only``) also has one layer's attention.
        """
        c, item, tokens = self.config, self.shape.item, self.shape.static_shapes.micro_batch_tokens
        width = (3 * c.hidden + self._projected) * item + self._attended_bytes + TOKEN_BYTES
        formula = f"{tokens:,} tokens * {width:,} bytes"
        return Line("a micro-batch in transfer", formula, tokens * width)

    @property
    def chunk(self) -> Line:
        """The weights and intermediate values of a chunk's layer.

        A product cannot read a layer's weights from the stack, so they are copied. Adapters are
        gathered, and their gradients take room too.
        """
        static_shapes, width = self.shape.static_shapes, self.layer_width
        blocks, rank = static_shapes.chunk // static_shapes.block, static_shapes.max_rank
        weights = self.layer_parameters * self.shape.item
        adapters = 2 * blocks * 4 * rank * self.layer_rank_parameters
        return Line(
            "a chunk in its layer",
            f"{weights:,} bytes + 2 * {blocks} blocks' adapters of rank {rank} + "
            f"{static_shapes.chunk:,} tokens * {width:,} * 4 bytes",
            weights + adapters + static_shapes.chunk * width * 4,
        )

    @property
    def logits(self) -> Line:
        """Float32 logits and their gradient, which a product takes in the weights' dtype."""
        tokens, vocab = self.head_chunk_tokens, self.config.vocab_size
        width = 2 * 4 + (0 if self.shape.item == 4 else self.shape.item)
        return Line(
            "logits of a chunk, with gradient",
            f"{tokens:,} tokens * {vocab:,} * {width} bytes",
            tokens * vocab * width,
        )

    @property
    def head_adapters(self) -> Line:
        """A block's part of an adapter in the head, and its gradient."""
        rank, width = self.shape.static_shapes.max_rank, self.config.hidden + self.config.vocab_size
        return Line(
            "an adapter in the LM head",
            f"2 * 4 bytes * rank {rank} * {width:,}",
            2 * 4 * rank * width,
        )

    @property
    def head_chunk_tokens(self) -> int:
        """Tokens of a chunk of the LM head."""
        block, chunk = self.shape.static_shapes.block, self.shape.static_shapes.chunk
        vocab_size, kind = self.config.vocab_size, self.shape.device_kind
        return block * head_chunk_blocks(block, chunk, vocab_size, kind)
