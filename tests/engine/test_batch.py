"""Packing: every row once, in its place, and a request's shapes and order in any company."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneserve_engine.backend.base import LOSS_NAMES, TrainOutput
from tuneserve_engine.batch import Packed, PackRequest, pack, unpack
from tuneserve_engine.lattice import ShapeLattice
from tuneserve_engine.training_wire import Datum, TrainingData

LATTICE = ShapeLattice(
    context_length=24, smallest_bucket=4, token_budget=32, max_rows=4, rank_classes=(4, 8)
)


def training_datum(length: int, targets: int | None, start: int) -> Datum:
    """A datum all of whose numbers differ from each other and from those of other starts."""
    k = 1 if targets is None else targets
    cells = start + np.arange(length * k).reshape(length, k)
    return Datum(
        tokens=(start + np.arange(length)).astype(np.int32),
        targets=cells.astype(np.int32),
        weights=(cells / 4).astype(np.float32),
        flat=targets is None,
    )


@st.composite
def pack_requests(draw: st.DrawFn) -> PackRequest:
    shapes = draw(
        st.lists(
            st.tuples(st.integers(1, 24), st.sampled_from([None, 1, 3, 4])), min_size=1, max_size=7
        )
    )
    start = 1000 * draw(st.integers(1, 50))
    data = [training_datum(n, k, start + 100 * i) for i, (n, k) in enumerate(shapes)]
    training = TrainingData("cross_entropy", {}, draw(st.booleans()), data)
    return PackRequest(draw(st.sampled_from("abc")), draw(st.integers(1, 8)), training)


def steps(packed: Packed, index: int) -> list[tuple[int, tuple[int, ...], int]]:
    """What happens to a request's datums in the order in which the device gets to them: the datum,
    the shape of its micro-batch, and the number of rows of it."""
    done = []
    for number, batch in enumerate(packed.unit.batches):
        for row in np.flatnonzero(batch.row_request == index).tolist():
            datum = packed.places[index].index((number, row))
            done.append((datum, batch.targets.shape, len(batch.row_request)))
    return done


@given(st.lists(pack_requests(), min_size=1, max_size=5))
@settings(deadline=None, max_examples=60)
def test_every_datum_has_one_row_of_its_own_and_the_rest_is_padding(
    requests: list[PackRequest],
) -> None:
    packed = pack(requests, LATTICE)
    assert len(packed.places) == len(packed.unit.requests) == len(requests)
    places = [place for of_request in packed.places for place in of_request]
    assert len(set(places)) == len(places) == sum(len(r.data.data) for r in requests)
    used = {
        (number, row)
        for number, batch in enumerate(packed.unit.batches)
        for row in np.flatnonzero(batch.row_request >= 0).tolist()
    }
    assert used == set(places)
    for number, batch in enumerate(packed.unit.batches):
        assert (number, 0) in used  # rows fill from the first, none is empty
        padding = batch.row_request < 0
        for array in (batch.tokens, batch.targets, batch.valid, batch.weights):
            assert not array[padding].any()


@given(st.lists(pack_requests(), min_size=1, max_size=5))
@settings(deadline=None, max_examples=60)
def test_a_row_holds_its_datum_and_zeros(requests: list[PackRequest]) -> None:
    packed = pack(requests, LATTICE)
    for index, request in enumerate(requests):
        assert packed.unit.requests[index].adapter_id == request.adapter_id
        assert packed.unit.requests[index].forward_only == request.data.forward_only
        for datum, (number, row) in zip(request.data.data, packed.places[index], strict=True):
            batch = packed.unit.batches[number]
            n, k = datum.targets.shape
            assert batch.row_request[row] == index
            for array, want in (
                (batch.tokens[row], datum.tokens),
                (batch.targets[row], datum.targets),
                (batch.weights[row], datum.weights),
                (batch.valid[row], np.ones(n)),
            ):
                inside = array[:n, :k] if array.ndim == 2 else array[:n]
                np.testing.assert_array_equal(inside, want)
                assert np.count_nonzero(array) == np.count_nonzero(want)


@given(st.lists(pack_requests(), min_size=1, max_size=5))
@settings(deadline=None, max_examples=60)
def test_a_micro_batch_has_one_rank_class_and_one_direction(requests: list[PackRequest]) -> None:
    packed = pack(requests, LATTICE)
    for batch in packed.unit.batches:
        members = {index for index in batch.row_request.tolist() if index >= 0}
        assert len({LATTICE.rank_class(requests[index].rank) for index in members}) == 1
        assert len({requests[index].data.forward_only for index in members}) == 1


@given(
    pack_requests(),
    st.lists(pack_requests(), max_size=4),
    st.lists(pack_requests(), max_size=4),
)
@settings(deadline=None, max_examples=200)
def test_company_changes_neither_a_requests_shapes_nor_its_order(
    request: PackRequest, before: list[PackRequest], after: list[PackRequest]
) -> None:
    alone = pack([request], LATTICE)
    together = pack([*before, request, *after], LATTICE)
    assert steps(together, len(before)) == steps(alone, 0)


@given(st.lists(pack_requests(), min_size=1, max_size=5))
@settings(deadline=None, max_examples=60)
def test_unpacking_gives_each_request_its_own_outputs(requests: list[PackRequest]) -> None:
    packed = pack(requests, LATTICE)
    outputs = [
        TrainOutput(logprobs=-2 * batch.weights, loss=batch.weights.sum((1, 2)))
        for batch in packed.unit.batches
    ]
    for index, request in enumerate(requests):
        logprobs, loss = unpack(packed, outputs, index, request.data)
        assert loss == pytest.approx(sum(float(d.weights.sum()) for d in request.data.data))
        for got, datum in zip(logprobs, request.data.data, strict=True):
            want = -2 * datum.weights
            np.testing.assert_array_equal(got, want[:, 0] if datum.flat else want, strict=True)


def test_a_flat_target_and_a_column_of_one_keep_their_shapes() -> None:
    data = [training_datum(3, None, 100), training_datum(3, 1, 200)]
    packed = pack([PackRequest("a", 4, TrainingData("cross_entropy", {}, False, data))], LATTICE)
    outputs = [TrainOutput(batch.weights, np.zeros(4, "f4")) for batch in packed.unit.batches]
    logprobs, _ = unpack(packed, outputs, 0, TrainingData("cross_entropy", {}, False, data))
    assert [array.shape for array in logprobs] == [(3,), (3, 1)]


def test_policy_inputs_fill_their_columns_and_config_fills_the_others() -> None:
    inputs = {
        "logprobs": np.array([-1, -2, -3], np.float32),
        "advantages": np.array([1, 2, 3], np.float32),
        "sequence_ratio_mask": np.array([0, 1, 1], np.float32),
        "clip_low_threshold": np.array([0.25, 0.5, 0.75], np.float32),
    }
    plain = training_datum(3, None, 0)
    datum = Datum(plain.tokens, plain.targets, np.zeros((3, 1), np.float32), True, inputs)
    config = {"clip_low_threshold": 0.125, "clip_high_threshold": 1.5}
    request = PackRequest("a", 4, TrainingData("gspo", config, False, [datum]))
    dro = PackRequest("a", 4, TrainingData("dro", {"beta": 0.25}, False, [plain]))
    first, second = (pack([each], LATTICE).unit.batches[0] for each in (request, dro))
    assert LOSS_NAMES[first.loss_id[0]] == "gspo"
    np.testing.assert_array_equal(first.old_logprobs, [[-1, -2, -3, 0]])
    np.testing.assert_array_equal(first.advantages, [[1, 2, 3, 0]])
    np.testing.assert_array_equal(first.sequence_mask, [[0, 1, 1, 0]])
    np.testing.assert_array_equal(first.clip_low, [[0.25, 0.5, 0.75, 0]])
    np.testing.assert_array_equal(first.clip_high, [[1.5, 1.5, 1.5, 0]])
    assert not first.beta.any()
    assert LOSS_NAMES[second.loss_id[0]] == "dro"
    np.testing.assert_array_equal(second.beta, [0.25])


def rows_of(packed: Packed) -> list[int]:
    return [len(batch.row_request) for batch in packed.unit.batches]


def test_each_halving_halves_the_rows_of_every_micro_batch_down_to_one() -> None:
    """Four rows of 8 tokens, two of 16, and one of 24 fit the budget of 32."""
    lengths = [8, 7, 6, 5, 8, 16, 15, 14, 24]
    data = [training_datum(length, None, 100 * i) for i, length in enumerate(lengths)]
    request = PackRequest("a", 4, TrainingData("cross_entropy", {}, False, data))
    sizes = []
    for halvings in range(4):
        packed = pack([request], LATTICE, halvings)
        sizes.append(rows_of(packed))
        assert len(set(packed.places[0])) == len(data)
        for each, (number, row) in zip(data, packed.places[0], strict=True):
            tokens = packed.unit.batches[number].tokens[row]
            np.testing.assert_array_equal(tokens[: len(each.tokens)], each.tokens)
    assert sizes == [[1, 2, 2, 4, 4], [1] * 4 + [2] * 3, [1] * 9, [1] * 9]


@given(pack_requests(), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_halving_keeps_a_requests_buckets_and_the_order_of_its_rows(
    request: PackRequest, halvings: int
) -> None:
    whole, halved = pack([request], LATTICE), pack([request], LATTICE, halvings)

    def order(packed: Packed) -> list[int]:
        return [datum for datum, _, _ in steps(packed, 0)]

    buckets = [{batch.tokens.shape[1] for batch in each.unit.batches} for each in (whole, halved)]
    assert buckets[0] == buckets[1]
    assert sorted(order(whole)) == sorted(order(halved))
    for bucket in buckets[0]:
        of_bucket = [
            [datum for datum, shape, _ in steps(each, 0) if shape[1] == bucket]
            for each in (whole, halved)
        ]
        if len({shape[2] for _, shape, _ in steps(whole, 0) if shape[1] == bucket}) == 1:
            assert of_bucket[0] == of_bucket[1]
