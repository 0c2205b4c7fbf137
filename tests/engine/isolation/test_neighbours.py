"""A tenant's results have the same bits beside any neighbours, down to weights and moments."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import numpy as np
import pytest

from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import FloatArray, MicroBatch, TrainResult
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.errors import UserError

BIG, SMALL = AdapterConfig(rank=8, alpha=32, seed=1), AdapterConfig(rank=3, alpha=16, seed=2)
"""Two tenants in one rank bucket."""
STEP = AdamwParams(learning_rate=0.02, weight_decay=0.01, grad_clip_norm=5.0)
NAN = (math.nan,) * 16
fresh_ids = count()


class Tenant:
    """An adapter under its own id."""

    def __init__(self, backend: JaxBackend, config: AdapterConfig) -> None:
        self.backend, self.id = backend, f"adapter-{next(fresh_ids)}"
        backend.create_adapter(self.id, config)

    def step(self, params: AdamwParams = STEP) -> dict[str, float]:
        (metrics,) = self.backend.optim_steps([(self.id, params)])
        if isinstance(metrics, Exception):
            raise metrics
        return dict(metrics)

    def state(self) -> AdapterState:
        return self.backend.adapter_state(self.id, optimizer=True)

    def arrays(self) -> Any:
        """All of its arrays on the device, padding and accumulator included."""
        (adapter,) = self.backend._adapters.get([self.id])
        parts = (adapter.weights, adapter.first_moment, adapter.second_moment, adapter.accumulator)
        return jax.tree.map(np.array, parts)


@pytest.fixture
def tenant(backend: JaxBackend) -> Callable[[AdapterConfig], Tenant]:
    return lambda config=BIG: Tenant(backend, config)


def assert_same_bits(a: Any, b: Any) -> None:
    """Equal to the last bit, including the sign of zero and the kind of NaN."""
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(left) == len(right) > 0
    for x, y in zip(left, right, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def assert_same_state(a: AdapterState, b: AdapterState) -> None:
    assert a.step == b.step
    for part in ("weights", "first_moment", "second_moment"):
        mine, theirs = getattr(a, part), getattr(b, part)
        assert mine.keys() == theirs.keys() and mine
        assert_same_bits(mine, {name: theirs[name] for name in mine})


@dataclass(frozen=True)
class Ran:
    """The results of a batch."""

    micro_batches: list[MicroBatch]
    result: TrainResult

    @property
    def finite(self) -> tuple[bool, ...]:
        return self.result.finite

    def of(self, number: int, micro_batch: int = 0) -> tuple[FloatArray, FloatArray]:
        """Logprobs and losses of a datum of a micro-batch."""
        tokens = self.micro_batches[micro_batch].segment_ids == number
        out = self.result.outputs[micro_batch]
        return out.logprobs[tokens], out.loss[tokens]


@pytest.fixture
def run(backend: JaxBackend, micro_batch_of: Any, batch_of: Any) -> Callable[..., Ran]:
    """``run([tenant, ...], [(request, row, ...), ...], ...)``: the bins of each micro-batch."""

    def run(tenants: Any, *micro_batches: Any, **options: Any) -> Ran:
        made = [micro_batch_of(*bins) for bins in micro_batches]
        batch = batch_of([t.id for t in tenants], made, **options)
        return Ran(made, backend.forward_backward(batch))

    return run


@pytest.fixture
def alone(run: Any, tenant: Any, datum: Any) -> tuple[Ran, dict[str, float], Tenant]:
    """Tenant BIG after one datum and one step, alone."""
    a = tenant()
    ran = run([a], [(0, datum(1, 11))])
    return ran, a.step(), a


def assert_as_alone(alone: Any, ran: Ran, a: Tenant, number: int, request: int = 0) -> None:
    """The datum and the tenant after a step equal those of the tenant alone."""
    expected, metrics, other = alone
    assert_same_bits(ran.of(number), expected.of(0))
    assert ran.finite[request]
    assert a.step() == metrics
    assert_same_state(a.state(), other.state())


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("loss", ["cross_entropy", "ppo"])
def test_a_neighbour_and_the_place_in_the_micro_batch_change_no_bit(
    alone, run, tenant, datum, place: int, loss: str
):
    """After zero, one, three and six blocks of a neighbour, where two blocks are a chunk. Another
    neighbour is behind.
    """
    a, b, c = tenant(), tenant(SMALL), tenant(SMALL)
    policy = {"old_logprobs": -2.0, "advantages": 0.5, "clip_high": 9.0}
    bins = []
    for number, length in enumerate((5, 16, 20)):
        inputs = {name: [value] * length for name, value in policy.items()}
        neighbour = 1 if number < place else 2
        bins.append((neighbour, datum(length, length, loss, **(inputs if loss == "ppo" else {}))))
    bins.insert(place, (0, datum(1, 11)))
    assert_as_alone(alone, run([a, b, c], bins), a, place)


def nan_weights(datum: Any) -> Any:
    return datum(5, 16, weights=NAN)


def nan_advantages(datum: Any) -> Any:
    return datum(5, 16, "importance_sampling", advantages=NAN)


def infinite_ratio(datum: Any) -> Any:
    return datum(5, 16, "importance_sampling", old_logprobs=[-1e6] * 16, advantages=[1.0] * 16)


@pytest.mark.parametrize("poison", [nan_weights, nan_advantages, infinite_ratio])
def test_a_neighbour_with_nan_or_infinite_inputs_changes_no_bit_and_fails_alone(
    alone, run, tenant, datum, poison
):
    a, b, c = tenant(), tenant(SMALL), tenant(SMALL)
    before = b.arrays()
    ran = run([a, b, c], [(1, poison(datum)), (0, datum(1, 11)), (2, datum(6, 4))])
    assert ran.finite == (True, False, True)
    assert_same_bits(b.arrays(), before)
    assert_as_alone(alone, ran, a, 1)


def test_the_remains_of_a_poisoned_batch_change_no_bit_of_the_next(alone, run, tenant, datum):
    a, b = tenant(), tenant()
    assert run([b, b], [(0, datum(5, 16, weights=NAN)), (1, nan_weights(datum))]).finite == (
        False,
        False,
    )
    assert_as_alone(alone, run([b, a], [(0, datum(6, 4)), (1, datum(1, 11))]), a, 1, request=1)


def test_a_neighbour_whose_gradient_alone_overflows_changes_no_bit_and_fails_alone(
    alone, run, tenant, datum
):
    a, b = tenant(), tenant(AdapterConfig(rank=8, alpha=1e9, seed=3))
    before = b.arrays()
    ran = run([a, b], [(1, datum(5, 4, weights=[1e36] * 4)), (0, datum(1, 11))])
    assert np.isfinite(ran.of(0)[1]).all()
    assert ran.finite == (True, False)
    assert_same_bits(b.arrays(), before)
    assert_as_alone(alone, ran, a, 1)


def test_a_neighbour_whose_loss_alone_overflows_changes_no_bit_and_fails_alone(
    alone, run, tenant, datum
):
    """The weight of the least likely target is just too large, and a slightly smaller one is
    accumulated.

    For some datums, depending on the processor, the gradient overflows first.
    """
    a, b, c = tenant(), tenant(SMALL), tenant(SMALL)

    def weighted(seed: int, part: float) -> Any:
        logprobs = run([b], [(0, datum(seed, 16))], forward_only=True).of(0)[0][:, 0]
        largest = float(np.finfo(np.float32).max / -logprobs.min())
        return datum(seed, 16, weights=(logprobs == logprobs.min()) * np.float32(part * largest))

    seed = next(
        s for s in range(5, 50) if all(run([tenant(SMALL)], [(0, weighted(s, 0.99))]).finite)
    )
    before = b.arrays()
    ran = run([b, a, c], [(0, weighted(seed, 1.01)), (1, datum(1, 11)), (2, weighted(seed, 0.99))])
    assert ran.finite == (False, True, True)
    assert_same_bits(b.arrays(), before)
    assert_as_alone(alone, ran, a, 1, request=1)


def test_a_neighbour_whose_weights_are_nan_changes_no_bit(alone, run, tenant, datum):
    a, b = tenant(), tenant(SMALL)
    state = b.state()
    state.weights["q_proj.B"][:] = np.nan
    b.backend.load_adapter(b.id, state)
    ran = run([a, b], [(1, datum(5, 16)), (0, datum(1, 11))])
    assert ran.finite == (True, False)
    assert_as_alone(alone, ran, a, 1)


def test_a_token_out_of_range_fails_its_own_request(alone, run, tenant, datum):
    """Callers check ids first. If one slips through, it affects no other request."""
    a, b = tenant(), tenant(SMALL)
    row = datum(5, 16)
    row.tokens[3] = 61
    ran = run([a, b], [(0, datum(1, 11)), (1, row)])
    assert ran.finite == (True, False)
    assert_as_alone(alone, ran, a, 0)


def test_steps_and_weight_decay_of_a_neighbour_between_ours_change_no_bit(run, tenant, datum):
    alone, a, b = tenant(), tenant(), tenant(SMALL)
    for seed in range(3):
        ours = [(0, datum(seed, 9)), (0, datum(seed + 50, 16))]
        run([alone], ours)
        alone.step()

        b.step(AdamwParams(learning_rate=1.0, weight_decay=0.9))
        run([a, b], [(1, datum(20 + seed, 7)), *ours])
        b.step(AdamwParams(learning_rate=10.0, weight_decay=0.05))
        a.step()
    assert_same_bits(a.arrays(), alone.arrays())


@pytest.mark.acceptance("W4")
def test_a_request_in_several_micro_batches_beside_neighbours_has_the_bits_of_alone(
    run, tenant, datum
):
    rows = [datum(seed, 3 + seed) for seed in range(6)]
    alone, a, b, c = tenant(), tenant(), tenant(SMALL), tenant(SMALL)
    alone_ran = run([alone], [(0, *rows[:2])], [(0, rows[2])], [(0, *rows[3:])])
    ran = run(
        [b, a, c],
        [(0, datum(9, 5)), (1, *rows[:2]), (2, datum(8, 5))],
        [(1, rows[2])],
        [(0, datum(7, 5)), (1, *rows[3:])],
    )
    assert_same_bits(a.arrays(), alone.arrays())
    places = [(1, 0), (2, 0), (0, 1), (1, 2), (2, 2), (3, 2)]
    own_places = [(0, 0), (1, 0), (0, 1), (0, 2), (1, 2), (2, 2)]
    found, want = (
        [each.of(*at) for at in where] for each, where in ((ran, places), (alone_ran, own_places))
    )
    assert_same_bits(found, want)


@pytest.mark.acceptance("S6")
def test_one_bad_datum_drops_its_whole_request_even_over_several_batches(run, tenant, datum):
    a = tenant()
    run([a], [(0, datum(1, 11))])
    before = a.arrays()
    bad = datum(2, 16, weights=NAN)
    ran = run([a], [(0, datum(3, 5)), (0, bad)], [(0, datum(4, 5))])
    assert ran.finite == (False,)
    assert_same_bits(a.arrays(), before)


def test_requests_of_one_adapter_add_up_in_order_and_a_failed_one_is_skipped(run, tenant, datum):
    apart, together = tenant(), tenant()
    first, second = datum(1, 11), datum(2, 8)
    run([apart], [(0, first)])
    run([apart], [(0, second)])
    ran = run([together] * 3, [(2, second), (1, datum(3, 16, weights=NAN)), (0, first)])
    assert ran.finite == (True, False, True)
    assert_same_bits(together.arrays(), apart.arrays())


def test_an_overflowing_sum_of_gradients_leaves_the_accumulator_unchanged(run, tenant, datum):
    a = tenant()
    huge = 0, datum(5, 4, weights=[1e36] * 4)
    finite, accepted = True, 0
    while finite and accepted < 1000:
        before = a.arrays()
        (finite,) = run([a], [huge]).finite
        accepted += finite
    assert 0 < accepted < 1000
    assert_same_bits(a.arrays(), before)


def test_forward_only_gives_the_same_logprobs_and_touches_nothing(alone, run, tenant, datum):
    a, b = tenant(), tenant(SMALL)
    before = a.arrays()
    ran = run([a, b], [(0, datum(1, 11)), (1, datum(5, 16))], forward_only=True)
    np.testing.assert_allclose(ran.of(0)[0], alone[0].of(0)[0], rtol=1e-5)
    assert ran.finite == (True, True)
    assert_same_bits(a.arrays(), before)


@pytest.mark.parametrize("others", [(8,), (16,), (24, 24, 24, 24, 8)])
def test_no_place_in_the_micro_batch_changes_a_bit_of_the_longest_datum(
    run, tenant, datum, others: tuple[int, ...]
):
    """The datum has several blocks and ends inside a chunk. The last micro-batch is full."""
    alone, a, b = tenant(), tenant(), tenant(SMALL)
    expected = run([alone], [(0, datum(1, 24))])
    ran = run([a, b], [*((1, datum(2, length)) for length in others), (0, datum(1, 24))])
    assert_same_bits(ran.of(len(others)), expected.of(0))
    assert_same_bits(a.arrays(), alone.arrays())


def test_padding_of_the_rank_stays_exactly_zero(run, tenant, datum):
    a = tenant(SMALL)
    for seed in range(3):
        run([a], [(0, datum(seed, 9))])
        a.step()
    weights, *_ = parts = a.arrays()
    assert any(np.any(x != 0) for x in jax.tree.leaves(weights.b))
    for part in parts:
        assert all(np.all(x[..., 3:] == 0) for x in part.a.values())
        assert all(np.all(x[..., 3:, :] == 0) for x in part.b.values())


def test_targets_that_are_not_trained_stay_exactly_zero(run, tenant, datum):
    config = AdapterConfig(rank=4, alpha=32, seed=1, train_attn=False, train_unembed=False)
    a = tenant(config)
    for seed in range(3):
        run([a], [(0, datum(seed, 9))])
        a.step()
    for part in a.arrays():
        for name in part.a.keys() - set(config.targets):
            assert np.all(part.a[name] == 0) and np.all(part.b[name] == 0)
    state = a.state()
    assert sorted(state.weights) == sorted(f"{t}.{x}" for t in config.targets for x in "AB")
    assert all(np.any(x != 0) for x in state.weights.values())


@pytest.mark.acceptance("W5")
def test_a_saved_adapter_loaded_elsewhere_trains_with_the_same_bits(
    run, tenant, datum, new_backend, micro_batch_of, batch_of
):
    a = tenant(SMALL)
    run([a], [(0, datum(1, 9))])
    a.step()
    saved = a.state()
    elsewhere = Tenant(new_backend(compile_cache_dir=None), BIG)  # compiles anew
    elsewhere.backend.load_adapter(elsewhere.id, saved)
    for seed in (2, 3):
        micro_batch = micro_batch_of((0, datum(seed, 9)))
        for each in (a, elsewhere):
            each.backend.forward_backward(batch_of([each.id], [micro_batch]))
            each.step()
    assert_same_bits(elsewhere.arrays(), a.arrays())
    assert saved.step == 1, "a saved state is a copy"


def test_loading_weights_alone_resets_the_optimizer_and_clears_the_gradient(run, tenant, datum):
    a, fresh = tenant(), tenant()
    run([a], [(0, datum(1, 9))])
    a.step()
    run([a], [(0, datum(2, 9))])
    weights_only = a.backend.adapter_state(a.id, optimizer=False)
    for each in (a, fresh):
        each.backend.load_adapter(each.id, weights_only)
        run([each], [(0, datum(3, 9))])
        each.step()
    assert fresh.state().step == 1
    assert_same_bits(a.arrays(), fresh.arrays())


def test_a_state_of_another_shape_is_refused_and_changes_nothing(run, tenant, datum):
    a = tenant()
    run([a], [(0, datum(1, 9))])
    before = a.arrays()
    short = a.state()
    short.first_moment["o_proj.A"] = short.first_moment["o_proj.A"][:, :-1]
    with pytest.raises(UserError, match=r"first_moment\[o_proj.A\].*\[2, 23, 8\].*\[2, 24, 8\]"):
        a.backend.load_adapter(a.id, short)
    missing = a.state()
    del missing.weights["unembed.B"]
    with pytest.raises(UserError, match=r"weights .*: unembed\.B"):
        a.backend.load_adapter(a.id, missing)
    assert_same_bits(a.arrays(), before)


def test_a_refused_step_changes_nothing(run, tenant, datum):
    a = tenant()
    run([a], [(0, datum(1, 9))])
    before = a.arrays()
    with pytest.raises(UserError, match=r"beta1 is 1\.5"):
        a.step(AdamwParams(beta1=1.5))
    assert_same_bits(a.arrays(), before)


def test_a_fresh_adapter_equals_the_base_model_for_any_seed(run, tenant, datum):
    logprobs = []
    for config in (BIG, SMALL):
        ran = run([tenant(config)], [(0, datum(1, 11))], forward_only=True)
        logprobs.append(ran.of(0)[0])
    np.testing.assert_array_equal(*logprobs)
