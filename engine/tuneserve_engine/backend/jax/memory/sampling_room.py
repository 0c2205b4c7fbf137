"""The memory of sampling: KV pages, adapters, and the values of its programs."""

from tuneserve_engine.backend.jax.attention.page_table import pages_per_round
from tuneserve_engine.backend.jax.memory.gpu_room import (
    decoded_bytes,
    decoding_has_kernels,
    prefill_bytes,
    prompt_score_bytes,
)
from tuneserve_engine.backend.jax.memory.sizes import Line, Sizes
from tuneserve_engine.backend.jax.sampling.adapter_slot_table import adapter_slot_count
from tuneserve_engine.core.shapes import MAX_LOGIT_BIASES, mask_words

_DRAWN_COPIES, _SCORED_COPIES = 8, 3
"""Float32 copies of logits while tokens are drawn, and while a prompt's positions are scored."""
_SUMS = 8
"""Copies of each alternative's block as integers in limbs: see ``exact_draw``."""
_SCORE_COPIES = 4
"""Float32 copies of attention's scores: masked, and as weights."""
_ALTERNATIVES = 64 * 128
"""Logits per scored position for its alternatives: 64 draws, each from a block of 128 logits."""


class SamplingRoom(Sizes):
    """The memory that sampling takes."""

    @property
    def lines(self) -> tuple[Line, ...]:
        """All parts except ``unstacked``, which is not reported as sampling's."""
        return (
            self.caches,
            self.decode_adapters,
            self.snapshots,
            self.prompt,
            self.drawing,
            self.logit_edits,
            self.token_masks,
            self.scoring,
        )

    @property
    def unstacked(self) -> Line:
        """The layers once more: on a CPU, sampling reads each layer from arrays of its own."""
        layers, count, item = self.config.layers, self.own_layer_parameters, self.shape.item
        if self.shape.device_kind != "cpu":
            return Line("layers for sampling", "read where the base weights are", 0)
        return Line(
            "layers for sampling",
            f"{layers} layers * {count:,} parameters * {item} bytes",
            layers * count * item,
        )

    @property
    def caches(self) -> Line:
        """The KV pages."""
        c, static_shapes, item = self.config, self.shape.static_shapes, self.shape.item
        pages = self.shape.kv_pages
        width = 2 * c.layers * self.own_kv_heads * c.head_dim
        return Line(
            "KV pages",
            f"{pages:,} pages * {static_shapes.block} tokens * {width:,} * {item} bytes",
            pages * static_shapes.block * width * item,
        )

    @property
    def decode_adapters(self) -> Line:
        ranks = self.shape.static_shapes.rank_buckets
        rows, is_shared = self.shape.sample_rows, self.shape.device_kind != "cpu"
        slots = adapter_slot_count(rows, is_shared=is_shared)
        return Line(
            "adapter slots of sampling",
            f"{slots} slots * 4 bytes * ranks {' + '.join(map(str, ranks))} * "
            f"{self.own_rank_parameters:,}",
            slots * 4 * sum(ranks) * self.own_rank_parameters,
        )

    @property
    def snapshots(self) -> Line:
        """The adapters that are sampled from, and the base model's adapter of zeros."""
        low, high = self.shape.static_shapes.rank_buckets[0], self.shape.static_shapes.max_rank
        return Line(
            "snapshots",
            f"({self.shape.snapshots} * rank {high} + rank {low}) * 4 bytes * "
            f"{self.rank_parameters:,}",
            self.snapshot_bytes + self.adapter_bytes(low),
        )

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the snapshots without the base model's adapter of zeros."""
        return self.shape.snapshots * self.adapter_bytes(self.shape.static_shapes.max_rank)

    @property
    def prompt(self) -> Line:
        """The values of a step of prefill.

        They are hidden states, what the step's attention reads, its scores, and its blocks'
        adapters once more. The rest of a layer uses the room of a chunk of training.
        """
        c, static_shapes = self.config, self.shape.static_shapes
        tokens = static_shapes.prefill_tokens
        if self._has_kernels:
            how = f"{tokens:,} tokens, and their blocks' adapters of rank {static_shapes.max_rank}"
            return Line("a step of prefill", how, prefill_bytes(c, static_shapes))
        blocks = tokens // static_shapes.block
        width = 4 * c.hidden + _SCORE_COPIES * c.heads * self._round
        per_block = self._read_per_row + static_shapes.max_rank * self.layer_rank_parameters
        return Line(
            "a step of prefill",
            f"({tokens:,} tokens * {width:,} + {blocks} blocks * {per_block:,}) * 4 B",
            4 * (tokens * width + blocks * per_block),
        )

    @property
    def _has_kernels(self) -> bool:
        return decoding_has_kernels(self.config, self.shape.device_kind, self.shape.item)

    @property
    def _round(self) -> int:
        """Positions that attention over pages takes per round."""
        return pages_per_round(self.shape.device_kind) * self.shape.static_shapes.block

    @property
    def _read_per_row(self) -> int:
        """Elements of the pages that attention takes per round, gathered and masked."""
        return 4 * self.config.kv_heads * self.config.head_dim * self._round

    @property
    def drawing(self) -> Line:
        """The values of a decoding step.

        They are the logits of every row, what a layer's attention reads, its scores, and the
        layer's intermediate values.
        """
        c, rows = self.config, self.shape.sample_rows
        if self._has_kernels:
            return Line("token draws", f"{rows} rows", decoded_bytes(c, rows))
        attention = self._read_per_row + _SCORE_COPIES * c.heads * self._round
        width = _DRAWN_COPIES * c.vocab_size + attention + self.layer_width
        return Line("token draws", f"{rows} rows * {width:,} * 4 bytes", rows * width * 4)

    @property
    def logit_edits(self) -> Line:
        """Biases and drawn tokens of each decode slot.

        Each rank bucket keeps rows that change nothing. A dispatch in which a slot asks for changes
        has rows of its own, and two copies of the drawn tokens.
        """
        rows, context = self.shape.sample_rows, self.shape.static_shapes.context_length
        arrays = len(self.shape.static_shapes.rank_buckets) + 1
        per_row = arrays * (2 * MAX_LOGIT_BIASES + 2 + context) + 2 * context
        return Line(
            "biases and penalties",
            f"{rows} rows * ({arrays} * ({2 * MAX_LOGIT_BIASES + 2} + {context:,} tokens) + "
            f"2 * {context:,} tokens) * 4 bytes",
            rows * per_row * 4,
        )

    @property
    def token_masks(self) -> Line:
        """A bit per slot and id of the vocabulary, as often as ``logit_edits``."""
        rows, words = self.shape.sample_rows, mask_words(self.config.vocab_size)
        arrays = len(self.shape.static_shapes.rank_buckets) + 1
        return Line(
            "token masks",
            f"{rows} rows * {arrays} * {words:,} * 4 bytes",
            4 * rows * arrays * words,
        )

    @property
    def scoring(self) -> Line:
        """Logits of a block of a prompt, and the draws from them."""
        tokens = self.shape.static_shapes.block
        if self._has_kernels:
            size = prompt_score_bytes(self.config, self.shape.static_shapes)
            return Line("prompt scores", f"{tokens:,} tokens", size)
        width = _SCORED_COPIES * self.config.vocab_size + _SUMS * _ALTERNATIVES + self.layer_width
        return Line("prompt scores", f"{tokens:,} tokens * {width:,} * 4 bytes", tokens * width * 4)
