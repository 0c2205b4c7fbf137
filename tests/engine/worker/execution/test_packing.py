"""Packing: every token once and in its place, and a request's layout among any others."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneserve_engine.backend.base import LOSS_NAMES, MicroBatch, MicroBatchOutput
from tuneserve_engine.backend.jax.training.rounds import rounds_of
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData
from tuneserve_engine.worker.execution.bins import bins_of
from tuneserve_engine.worker.execution.packing import (
    PackedBatch,
    PackingRequest,
    pack,
    unpack,
)

BLOCK, MICRO_BATCH = 4, 64
STATIC_SHAPES = StaticShapes(
    context_length=40,
    block=BLOCK,
    chunk=8,
    requested_tokens=60,
    request_slots=3,
    rank_buckets=(4, 8),
)
"""Bins have up to 32 tokens. Three requests of ranks 1 to 4 share a batch, or one of 5 to 8."""


def training_datum(length: int, targets: int | None, start: int) -> DecodedDatum:
    """A datum whose numbers all differ from each other and from those of other starts."""
    k = 1 if targets is None else targets
    cells = start + np.arange(length * k).reshape(length, k)
    return DecodedDatum(
        tokens=(start + np.arange(length)).astype(np.int32),
        targets=cells.astype(np.int32),
        weights=(cells / 4).astype(np.float32),
        flat=targets is None,
    )


def sft(*data: DecodedDatum) -> TrainingData:
    return TrainingData("cross_entropy", {}, False, list(data))


def alone(*lengths: int, rank: int = 4) -> PackingRequest:
    data = [training_datum(length, None, 1000 * (i + 1)) for i, length in enumerate(lengths)]
    return PackingRequest("a", rank, sft(*data))


def firsts(batch: PackedBatch) -> list[list[tuple[int, int]]]:
    """Return each datum's micro-batch and first token, by request."""
    return [[place[:2] for place in places] for places in batch.locations]


@st.composite
def pack_requests(draw: st.DrawFn) -> PackingRequest:
    shapes = draw(
        st.lists(
            st.tuples(st.integers(1, 40), st.sampled_from([None, 1, 3, 64])), min_size=1, max_size=9
        )
    )
    start = 100_000 * draw(st.integers(1, 9))
    data = [training_datum(n, k, start + 5000 * i) for i, (n, k) in enumerate(shapes)]
    training = TrainingData("cross_entropy", {}, draw(st.booleans()), data)
    return PackingRequest(draw(st.sampled_from("abc")), draw(st.integers(1, 8)), training)


companies = st.lists(pack_requests(), min_size=1, max_size=6)


class Run(NamedTuple):
    """One datum as it lies in a micro-batch."""

    index: int  # of the request among the packed ones
    datum: int
    micro_batch: MicroBatch
    part: slice


def runs(packed: Sequence[PackedBatch]) -> list[Run]:
    found = []
    for batch in packed:
        for index, places in zip(batch.members, batch.locations, strict=True):
            for i, (number, first, _) in enumerate(places):
                micro_batch = batch.batch.micro_batches[number]
                length = int((micro_batch.segment_ids == micro_batch.segment_ids[first]).sum())
                found.append(Run(index, i, micro_batch, slice(first, first + length)))
    return found


@given(companies)
@settings(deadline=None, max_examples=60)
def test_every_token_is_packed_once_after_its_predecessor(
    requests: list[PackingRequest],
) -> None:
    packed = pack(requests, STATIC_SHAPES)
    found = runs(packed)
    assert sorted((run.index, run.datum) for run in found) == [
        (index, i) for index, each in enumerate(requests) for i in range(len(each.data.data))
    ]
    for index, i, micro_batch, part in found:
        datum = requests[index].data.data[i]
        n, k = datum.targets.shape
        np.testing.assert_array_equal(micro_batch.tokens[part], datum.tokens, strict=True)
        np.testing.assert_array_equal(micro_batch.positions[part], np.arange(n))
        np.testing.assert_array_equal(micro_batch.targets[part, :k], datum.targets, strict=True)
        np.testing.assert_array_equal(micro_batch.weights[part, :k], datum.weights, strict=True)
        assert not micro_batch.targets[part, k:].any() and not micro_batch.weights[part, k:].any()
    for batch in packed:
        tokens = sum(
            int((micro_batch.segment_ids >= 0).sum()) for micro_batch in batch.batch.micro_batches
        )
        assert tokens == sum(len(d.tokens) for m in batch.members for d in requests[m].data.data)


def test_a_slice_depends_on_the_length_of_a_tokens_datum() -> None:
    """Of 40 tokens, 10 are in a datum of 10 and 30 in one of 30: 25 on average."""
    asked: list[tuple[bool, float]] = []

    def tokens_in_slice(forward_only: bool, datum_tokens: float) -> int:
        asked.append((forward_only, datum_tokens))
        return 8

    (packed,) = pack([alone(10, 30)], STATIC_SHAPES, 0, tokens_in_slice)
    assert asked == [(False, 25.0)]
    assert packed.datum_tokens == 25.0
    assert len(packed.batch.micro_batches) == 2


def test_a_packed_micro_batch_equals_one_written_by_hand(
    micro_batch_of: Callable[..., MicroBatch], datum: Callable[..., Any]
) -> None:
    rows = {(0, length): datum(length, length) for length in (18, 9, 3)} | {(1, 5): datum(5, 5)}

    def asked(request: int, *lengths: int) -> PackingRequest:
        data = []
        for length in lengths:
            row = rows[request, length]
            arrays = [np.array(each, np.int32) for each in (row.tokens, row.targets)]
            weights = np.array(row.weights, np.float32)
            data.append(DecodedDatum(arrays[0], arrays[1][:, None], weights[:, None], True))
        return PackingRequest(str(request), 4, sft(*data))

    (batch,) = pack([asked(0, 9, 18, 3), asked(1, 5)], STATIC_SHAPES)
    (got,) = batch.batch.micro_batches
    by_hand = micro_batch_of(
        (0, rows[0, 18], rows[0, 9], rows[0, 3]), (1, rows[1, 5]), static_shapes=STATIC_SHAPES
    )
    for name, array in got._asdict().items():
        np.testing.assert_array_equal(array, getattr(by_hand, name), name, strict=True)
    np.testing.assert_array_equal(got.block_request[:11], [0] * 8 + [1] * 2 + [-1])
    np.testing.assert_array_equal(got.first_visible_block[:11], [0, 0, 0, 0, 0, 4, 4, 6, 8, 8, 10])


@given(companies)
@settings(deadline=None, max_examples=60)
def test_padding_is_marked_and_has_no_weight(requests: list[PackingRequest]) -> None:
    for batch in pack(requests, STATIC_SHAPES):
        for micro_batch in batch.batch.micro_batches:
            padding = micro_batch.segment_ids < 0
            for array in (
                micro_batch.tokens,
                micro_batch.targets,
                micro_batch.positions,
                micro_batch.weights,
            ):
                assert not array[padding].any()
            numbers = micro_batch.segment_ids[~padding]
            assert (np.diff(numbers) >= 0).all() and set(numbers) == set(range(max(numbers) + 1))


@given(companies)
@settings(deadline=None, max_examples=60)
def test_a_block_belongs_to_one_request_and_attends_from_the_start_of_its_datums(
    requests: list[PackingRequest],
) -> None:
    blocks = np.arange(MICRO_BATCH // BLOCK)
    for batch in pack(requests, STATIC_SHAPES):
        found = runs([batch])
        numbers = [number for places in batch.locations for number, *_ in places]
        for number, micro_batch in enumerate(batch.batch.micro_batches):
            np.testing.assert_array_equal(
                micro_batch.block_request >= 0, blocks < micro_batch.blocks
            )
            for block in blocks.tolist():
                inside = {
                    (batch.members.index(index), part.start)
                    for (index, _, _, part), at in zip(found, numbers, strict=True)
                    if at == number
                    and part.start < BLOCK * (block + 1)
                    and part.stop > BLOCK * block
                }
                assert {member for member, _ in inside} == {
                    int(micro_batch.block_request[block])
                } - {-1}
                first = min((start for _, start in inside), default=BLOCK * block)
                assert micro_batch.first_visible_block[block] == first // BLOCK


@given(companies)
@settings(deadline=None, max_examples=60)
def test_a_batch_has_one_rank_bucket_one_direction_and_up_to_a_slot_per_request(
    requests: list[PackingRequest],
) -> None:
    packed = pack(requests, STATIC_SHAPES)
    assert sorted(index for batch in packed for index in batch.members) == [*range(len(requests))]
    kinds = []
    for batch in packed:
        asked = [requests[index] for index in batch.members]
        (kind,) = {(STATIC_SHAPES.rank_bucket(each.rank), each.data.forward_only) for each in asked}
        assert batch.batch.forward_only == kind[1]
        assert batch.batch.adapter_ids == tuple(each.adapter_id for each in asked)
        assert 1 <= len(asked) <= {4: 3, 8: 1}[kind[0]]
        assert list(batch.members) == sorted(batch.members)
        kinds.append(kind)
    for kind in set(kinds):
        of_kind = [batch.members for batch, each in zip(packed, kinds, strict=True) if each == kind]
        assert sum(of_kind, ()) == tuple(sorted(sum(of_kind, ())))
        slots = {4: 3, 8: 1}[kind[0]]
        assert all(len(members) == slots for members in of_kind[:-1])


@given(companies)
@settings(deadline=None, max_examples=60)
def test_the_blocks_of_a_request_lie_together_before_unused_ones(
    requests: list[PackingRequest],
) -> None:
    """Gradients are summed over neighbouring blocks of a request."""
    for batch in pack(requests, STATIC_SHAPES):
        for micro_batch in batch.batch.micro_batches:
            owners = micro_batch.block_request.astype(np.uint32)  # -1 becomes the highest
            assert np.all(np.diff(owners.astype(np.int64)) >= 0)


def test_batches_are_ordered_by_their_first_requests() -> None:
    ranks = [8, 3, 8, 2, 4, 1, 8]
    packed = pack([alone(5, rank=rank) for rank in ranks], STATIC_SHAPES)
    assert [batch.members for batch in packed] == [(0,), (2,), (6,), (1, 3, 4), (5,)]


def test_micro_batches_of_one_target_come_before_those_of_many() -> None:
    data = [training_datum(5, 2, 0), training_datum(5, None, 100), training_datum(5, 64, 200)]
    (batch,) = pack([PackingRequest("a", 4, sft(*data))], STATIC_SHAPES)
    assert [micro_batch.targets.shape for micro_batch in batch.batch.micro_batches] == [
        (MICRO_BATCH, 1),
        (MICRO_BATCH, 64),
    ]
    assert firsts(batch) == [[(1, 0), (0, 0), (1, 5)]]


def layout(packed: list[PackedBatch], index: int) -> list[tuple[int, int, int, int]]:
    """A request's datums in the order in which the device reaches them.

    Each has its index, its K, its first token in its block, and the number of blocks of the request
    before it.
    """
    done = []
    for batch in packed:
        if index not in batch.members:
            continue
        member = batch.members.index(index)
        before = 0
        for number, micro_batch in enumerate(batch.batch.micro_batches):
            mine = np.flatnonzero(micro_batch.block_request == member)
            places = [
                (place.first, datum)
                for datum, place in enumerate(batch.locations[member])
                if place.micro_batch == number
            ]
            for first, datum in sorted(places):
                at = before + int((mine < first // BLOCK).sum())
                done.append((datum, micro_batch.targets.shape[1], first % BLOCK, at))
            before += len(mine)
    return done


@given(
    pack_requests(), st.lists(pack_requests(), max_size=5), st.lists(pack_requests(), max_size=5)
)
@settings(deadline=None, max_examples=200)
def test_other_requests_change_neither_a_requests_layout_nor_its_block_order(
    request: PackingRequest, before: list[PackingRequest], after: list[PackingRequest]
) -> None:
    together = pack([*before, request, *after], STATIC_SHAPES)
    assert layout(together, len(before)) == layout(pack([request], STATIC_SHAPES), 0)


def test_the_longest_datums_come_first_and_short_ones_fill_the_first_gap() -> None:
    """30 leaves 2 of the 32 tokens of a bin, 20 leaves 12, and 40 is longer than a bin."""
    (batch,) = pack([alone(3, 30, 2, 40, 20, 9)], STATIC_SHAPES)
    # The bins are 40 | 30 + 2 | 20 + 9 + 3. Each is in a micro-batch of its own.
    assert firsts(batch) == [[(2, 29), (1, 0), (1, 30), (0, 0), (2, 0), (2, 20)]]
    assert [micro_batch.blocks for micro_batch in batch.batch.micro_batches] == [10, 8, 8]


@given(companies, st.integers(2, 8))
@settings(deadline=None, max_examples=60)
def test_bins_are_spread_over_devices_without_another_layout(
    requests: list[PackingRequest], at_once: int
) -> None:
    """Rounds of so many micro-batches are no more than before, and no longer."""
    for one, several in zip(
        pack(requests, STATIC_SHAPES),
        pack(requests, STATIC_SHAPES, 0, lambda *_: None, at_once),
        strict=True,
    ):
        for index in range(len(requests)):
            assert layout([several], index) == layout([one], index)
        found = [list(rounds_of(each.batch.micro_batches, at_once)) for each in (one, several)]
        longest = [
            max(micro_batch.blocks for due in rounds for micro_batch in due) for rounds in found
        ]
        assert len(found[1]) <= len(found[0]) and longest[1] <= longest[0]


def test_short_requests_run_on_a_device_each() -> None:
    """Each has 8 tokens, a chunk. On two devices, two of them share one."""
    requests = [alone(8, rank=1) for _ in range(3)]
    for at_once, blocks in ((1, [6]), (2, [4, 2]), (3, [2, 2, 2]), (4, [2, 2, 2])):
        (batch,) = pack(requests, STATIC_SHAPES, 0, lambda *_: None, at_once)
        assert [micro_batch.blocks for micro_batch in batch.batch.micro_batches] == blocks


def test_all_devices_take_as_long_as_the_longest_micro_batch() -> None:
    """Of chunks of 8 tokens: 5 and 2 in the first round of two devices, then 1."""
    requests = [alone(40), alone(16), alone(8)]
    (one,) = pack(requests, STATIC_SHAPES, 0, lambda *_: 8)
    assert one.paced_tokens == sum(one.computed) == 64
    (two,) = pack(requests, STATIC_SHAPES, 0, lambda *_: 16, 2)
    assert [micro_batch.blocks for micro_batch in two.batch.micro_batches] == [10, 4, 2]
    assert two.paced_tokens == 2 * (40 + 8)


def test_requests_without_gradients_share_micro_batches_with_several_bins() -> None:
    request = alone(30, 30)
    scored = replace(request, data=replace(request.data, forward_only=True))
    for each, blocks in ((request, [8, 8]), (scored, [16])):
        (batch,) = pack([each], STATIC_SHAPES)
        assert [micro_batch.blocks for micro_batch in batch.batch.micro_batches] == blocks


def test_a_slice_is_that_of_all_devices() -> None:
    requests = [alone(16), alone(16), alone(16)]
    (batch,) = pack(requests, STATIC_SHAPES, 0, lambda *_: 32, 2)
    assert [micro_batch.blocks for micro_batch in batch.batch.micro_batches] == [4, 4, 4]


@given(companies)
@settings(deadline=None, max_examples=60)
def test_a_micro_batch_has_one_request_of_those_in_several(
    requests: list[PackingRequest],
) -> None:
    """Its bin there is all that the micro-batch adds to the request's gradient."""
    for batch in pack(requests, STATIC_SHAPES):
        inside = [
            set(micro_batch.block_request[: micro_batch.blocks].tolist())
            for micro_batch in batch.batch.micro_batches
        ]
        counts = Counter(member for members in inside for member in members)
        if batch.batch.forward_only:  # adds no gradients
            continue
        assert all(sum(counts[member] > 1 for member in members) <= 1 for members in inside)
        for member, index in enumerate(batch.members):
            bins = bins_of(member, requests[index].data, STATIC_SHAPES)
            assert counts[member] == len(bins)


def test_a_closed_micro_batch_gets_no_more_bins() -> None:
    """The third bin would fit after the first, but its blocks would come too early there."""
    (batch,) = pack([alone(40), alone(40), alone(16)], STATIC_SHAPES)
    assert firsts(batch) == [[(0, 0)], [(1, 0)], [(1, 40)]]


@given(companies)
@settings(deadline=None, max_examples=60)
def test_unpacking_gives_each_request_its_own_outputs(requests: list[PackingRequest]) -> None:
    for batch in pack(requests, STATIC_SHAPES):
        outputs = [
            MicroBatchOutput(
                logprobs=np.where(
                    micro_batch.segment_ids[:, None] < 0, np.nan, -2 * micro_batch.weights
                ),
                loss=np.where(
                    micro_batch.segment_ids < 0, np.nan, micro_batch.weights.sum(1)
                ).astype("f4"),
            )
            for micro_batch in batch.batch.micro_batches
        ]
        for member, index in enumerate(batch.members):
            data = requests[index].data
            logprobs, loss = unpack(batch, outputs, member, data)
            assert loss == pytest.approx(sum(float(d.weights.sum()) for d in data.data), rel=1e-6)
            for got, datum in zip(logprobs, data.data, strict=True):
                want = -2 * datum.weights
                np.testing.assert_array_equal(got, want[:, 0] if datum.flat else want)


def test_a_flat_target_and_a_column_of_one_keep_their_shapes() -> None:
    data = sft(training_datum(3, None, 100), training_datum(3, 1, 200))
    (batch,) = pack([PackingRequest("a", 4, data)], STATIC_SHAPES)
    outputs = [
        MicroBatchOutput(micro_batch.weights, micro_batch.beta)
        for micro_batch in batch.batch.micro_batches
    ]
    logprobs, _ = unpack(batch, outputs, 0, data)
    assert [array.shape for array in logprobs] == [(3,), (3, 1)]


def test_a_loss_is_summed_in_double_precision() -> None:
    """In single precision, ones beside 2**24 are lost."""
    data = alone(3).data
    (batch,) = pack([alone(3)], STATIC_SHAPES)
    loss = np.zeros(MICRO_BATCH, np.float32)
    loss[:3] = 2**24, 1, 1
    outputs = [MicroBatchOutput(np.zeros((MICRO_BATCH, 1), np.float32), loss)]
    assert unpack(batch, outputs, 0, data)[1] == 2**24 + 2


def test_policy_inputs_fill_their_columns_and_config_fills_the_others() -> None:
    inputs = {
        "logprobs": np.array([-1, -2, -3], np.float32),
        "advantages": np.array([1, 2, 3], np.float32),
        "sequence_ratio_mask": np.array([0, 1, 1], np.float32),
        "clip_low_threshold": np.array([0.25, 0.5, 0.75], np.float32),
    }
    plain = training_datum(3, None, 0)
    datum = DecodedDatum(plain.tokens, plain.targets, np.zeros((3, 1), np.float32), True, inputs)
    config = {"clip_low_threshold": 0.125, "clip_high_threshold": 1.5}
    gspo = PackingRequest("a", 4, TrainingData("gspo", config, False, [datum]))
    dro = PackingRequest("a", 4, TrainingData("dro", {"beta": 0.25}, False, [plain]))
    (batch,) = pack([gspo, dro], STATIC_SHAPES)
    (micro_batch,) = batch.batch.micro_batches
    assert [LOSS_NAMES[i] for i in micro_batch.loss_id[[0, 2, 4, 6]]] == [
        "gspo",
        "gspo",
        "dro",
        "dro",
    ]
    np.testing.assert_array_equal(micro_batch.old_logprobs[:8], [-1, -2, -3, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(micro_batch.advantages[:8], [1, 2, 3, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(micro_batch.sequence_mask[:8], [0, 1, 1, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(micro_batch.clip_low[:8], [0.25, 0.5, 0.75, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(micro_batch.clip_high[:8], [1.5, 1.5, 1.5, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(micro_batch.beta[:8], [0, 0, 0, 0, 0.25, 0.25, 0.25, 0])


def test_each_halving_halves_the_micro_batches_down_to_the_longest_bin() -> None:
    requests = [alone(length, rank=2) for length in (30, 29, 28)]
    sizes = [
        [
            len(micro_batch.tokens)
            for micro_batch in pack(requests, STATIC_SHAPES, halvings)[0].batch.micro_batches
        ]
        for halvings in range(4)
    ]
    assert sizes == [[64, 64], [32] * 3, [32] * 3, [32] * 3]
    longest = alone(40, 2)
    assert [len(b.tokens) for b in pack([longest], STATIC_SHAPES, 3)[0].batch.micro_batches] == [
        40,
        40,
    ]


@given(pack_requests(), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_halving_keeps_a_requests_layout(request: PackingRequest, halvings: int) -> None:
    assert layout(pack([request], STATIC_SHAPES, halvings), 0) == layout(
        pack([request], STATIC_SHAPES), 0
    )


@pytest.mark.parametrize("seed", range(20))
def test_mixed_lengths_are_padded_by_less_than_a_third(seed: int) -> None:
    """64 datums of 16 to 1024 tokens, log-uniform, on the static shapes of a real device."""
    static_shapes = StaticShapes(4096)
    draws = np.random.default_rng(seed).uniform(np.log(16), np.log(1024), 64)
    lengths = np.exp(draws).astype(int).tolist()
    (batch,) = pack([alone(*lengths)], static_shapes)
    chunks = [
        -(-micro_batch.blocks * static_shapes.block // static_shapes.chunk)
        for micro_batch in batch.batch.micro_batches
    ]
    assert sum(chunks) * static_shapes.chunk <= 1.3 * sum(lengths)
