"""The contract of every backend, run against the fake, a group of fakes, and the JAX one."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from tests.support.fake_backend import FakeBackend
from tests.support.host_group import HostGroup
from tests.support.token_listener import Listener
from tuneserve_engine.adapters.state import AdapterState, Tensors
from tuneserve_engine.backend.base import (
    Backend,
    OutOfMemory,
    SampleResult,
    SamplingRequest,
    TopK,
    TrainBatch,
    TrainResult,
)
from tuneserve_engine.core.adapter import UNEMBED, AdamwParams, AdapterConfig
from tuneserve_engine.core.errors import EngineError, UserError
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData
from tuneserve_engine.worker.execution.packing import PackedBatch, PackingRequest, pack, unpack

SMALL = AdapterConfig(rank=3, alpha=16.0, seed=1)
OTHER = AdapterConfig(rank=5, alpha=32.0, seed=2)
PARTIAL = AdapterConfig(rank=2, alpha=8.0, seed=3, train_mlp=False, train_unembed=False)
STEP = AdamwParams(learning_rate=0.01, weight_decay=0.1)
ids = count()


@pytest.fixture(params=["fake", "hosts", "jax"])
def device(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """One backend for all tests, to share its compiled programs."""
    if request.param == "hosts":
        group = HostGroup()
        yield group
        assert not group.ends and not group.losses
        group.close()
    elif request.param == "fake":
        yield FakeBackend()
    else:
        yield request.getfixturevalue("backend")


@pytest.fixture(scope="module")
def fresh_jax(new_backend: Callable[[], Backend]) -> Backend:
    return new_backend()


@pytest.fixture
def elsewhere(device: Backend, request: pytest.FixtureRequest) -> Backend:
    """Another backend of the same kind, as after a restart."""
    if isinstance(device, FakeBackend | HostGroup):
        return FakeBackend()
    fresh: Backend = request.getfixturevalue("fresh_jax")
    return fresh


def adapter(device: Backend, config: AdapterConfig = SMALL) -> str:
    """A fresh adapter under a new id."""
    adapter_id = f"contract-{next(ids)}"
    device.create_adapter(adapter_id, config)
    return adapter_id


def snapshot(device: Backend, adapter_id: str) -> str:
    snapshot_id = f"snapshot-{next(ids)}"
    device.load_snapshot(snapshot_id, device.adapter_state(adapter_id, optimizer=False))
    return snapshot_id


def datum(seed: int, length: int = 12) -> DecodedDatum:
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, 50, (2, length)).astype(np.int32)
    weights = rng.normal(1, 0.5, (length, 1)).astype(np.float32)
    return DecodedDatum(tokens, targets[:, None], weights, flat=True)


def wanted(
    adapter_id: str, *seeds: int, forward_only: bool = False, rank: int = 3
) -> PackingRequest:
    """A request of one datum per seed."""
    data = [datum(seed) for seed in seeds]
    return PackingRequest(adapter_id, rank, TrainingData("cross_entropy", {}, forward_only, data))


def run(
    device: Backend, *requests: PackingRequest, halvings: int = 0
) -> tuple[PackedBatch, TrainResult]:
    """Run requests that share a batch."""
    (packed,) = pack(requests, device.static_shapes, halvings)
    return packed, device.forward_backward(packed.batch)


def take_step(device: Backend, adapter_id: str, params: AdamwParams = STEP) -> Mapping[str, float]:
    (metrics,) = device.optim_steps([(adapter_id, params)])
    if isinstance(metrics, Exception):
        raise metrics
    return metrics


def answer(
    device: Backend, *requests: PackingRequest, of: int = 0, halvings: int = 0
) -> tuple[list[Any], float]:
    """Logprobs and loss of one of the requests."""
    packed, result = run(device, *requests, halvings=halvings)
    assert all(result.finite)
    return unpack(packed, result.outputs, of, requests[of].data)


def prompt(seed: int, length: int = 6) -> Any:
    return np.random.default_rng(seed).integers(0, 50, length).astype(np.int32)


def ask(snapshot_id: str | None = None, **fields: Any) -> SamplingRequest:
    fields = {"seed": 1, "num_samples": 1, "max_tokens": 4, "prompt": prompt(0), **fields}
    return SamplingRequest(snapshot_id=snapshot_id, **fields)


def sample(device: Backend, *requests: SamplingRequest) -> SampleResult:
    """The first request's result."""
    return device.sample(requests)[0]


def tokens_of(result: SampleResult) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in result.sequences]


def same_tensors(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def same_state(a: AdapterState, b: AdapterState) -> bool:
    """Whether two states have the same bits."""
    return (
        (a.config, a.step) == (b.config, b.step)
        and same_tensors(a.weights, b.weights)
        and same_tensors(a.first_moment, b.first_moment)
        and same_tensors(a.second_moment, b.second_moment)
        and same_tensors(a.accumulator, b.accumulator)
    )


def same_sample(a: SampleResult, b: SampleResult) -> bool:
    return tokens_of(a) == tokens_of(b) and all(
        x.logprobs.tobytes() == y.logprobs.tobytes()
        for x, y in zip(a.sequences, b.sequences, strict=True)
    )


# --- adapters ------------------------------------------------------------------------------------


def test_static_shapes_admit_what_the_info_promises(device: Backend) -> None:
    info, static_shapes = device.info, device.static_shapes
    assert static_shapes.micro_batch_tokens >= info.context_length
    assert static_shapes.slots(static_shapes.rank_bucket(info.max_rank)) >= 1
    for short, long in (
        ("block", "chunk"),
        ("block", "bin_tokens"),
        ("chunk", "micro_batch_tokens"),
    ):
        assert getattr(static_shapes, long) % getattr(static_shapes, short) == 0
    with pytest.raises(UserError):
        device.create_adapter("too-large", AdapterConfig(info.max_rank + 1, 32.0, 0))


@pytest.mark.parametrize("config", [SMALL, PARTIAL])
def test_a_fresh_adapter_has_its_targets_at_true_rank_and_zero_b(
    device: Backend, config: AdapterConfig
) -> None:
    state = device.adapter_state(adapter(device, config), optimizer=True)
    names = {f"{target}.{part}" for target in config.targets for part in "AB"}
    assert state.weights.keys() == state.first_moment.keys() == state.second_moment.keys() == names
    assert (state.config, state.step) == (config, 0)
    for name, tensor in state.weights.items():
        assert tensor.dtype == np.float32
        assert tensor.ndim == (2 if name.startswith(UNEMBED) else 3)
        assert tensor.shape[-1 if name.endswith(".A") else -2] == config.rank
        assert tensor.any() == name.endswith(".A")
        assert state.first_moment[name].shape == state.second_moment[name].shape == tensor.shape
        assert not state.first_moment[name].any() and not state.second_moment[name].any()


def test_the_seed_alone_decides_how_an_adapter_starts(device: Backend) -> None:
    one, two = (device.adapter_state(adapter(device), optimizer=True) for _ in range(2))
    other = device.adapter_state(adapter(device, AdapterConfig(3, 16.0, seed=4)), optimizer=True)
    assert same_state(one, two)
    assert not same_tensors(one.weights, other.weights)


def test_a_state_is_a_copy(device: Backend) -> None:
    mine = adapter(device)
    taken, again = (device.adapter_state(mine, optimizer=True) for _ in range(2))
    for tensors in (taken.weights, taken.first_moment, taken.second_moment):
        for tensor in tensors.values():
            tensor += 1
    assert same_state(device.adapter_state(mine, optimizer=True), again)
    run(device, wanted(mine, 1))
    take_step(device, mine)
    assert again.step == 0 and not again.first_moment["q_proj.B"].any()


def test_sampler_weights_have_no_optimizer(device: Backend) -> None:
    mine = adapter(device)
    run(device, wanted(mine, 1))
    take_step(device, mine)
    state = device.adapter_state(mine, optimizer=False)
    assert (state.step, state.first_moment, state.second_moment) == (0, {}, {})


def test_a_deleted_adapter_is_gone_and_its_id_can_be_used_again(device: Backend) -> None:
    mine = adapter(device)
    fresh = device.adapter_state(mine, optimizer=True)
    run(device, wanted(mine, 1))
    take_step(device, mine)
    run(device, wanted(mine, 2))
    device.delete_adapter(mine)
    calls: list[Callable[[], Any]] = [
        lambda: device.adapter_state(mine, optimizer=True),
        lambda: take_step(device, mine),
        lambda: run(device, wanted(mine, 1)),
        lambda: device.delete_adapter(mine),
    ]
    for call in calls:
        with pytest.raises(EngineError):
            call()
    device.create_adapter(mine, SMALL)
    assert same_state(device.adapter_state(mine, optimizer=True), fresh)
    assert take_step(device, mine)["grad_norm"] == 0


# --- training ------------------------------------------------------------------------------------


def test_a_loss_is_the_weighted_sum_of_the_logprobs(device: Backend) -> None:
    mine = adapter(device)
    request = wanted(mine, 1, 2, 3)
    logprobs, loss = answer(device, request)
    weights = [each.weights[:, 0] for each in request.data.data]
    want = -sum(float(w @ lp) for w, lp in zip(weights, logprobs, strict=True))
    assert loss == pytest.approx(want, rel=1e-5)
    assert all(array.shape == (12,) and array.dtype == np.float32 for array in logprobs)


def test_outputs_have_the_shapes_of_their_batches(device: Backend) -> None:
    several = replace(
        datum(9), targets=np.tile(datum(9).targets, 3), weights=np.ones((12, 3), "f4")
    )
    request = wanted(adapter(device), *range(30))
    request.data.data.append(several)
    packed, result = run(device, request)
    assert len(packed.batch.micro_batches) > 2
    for micro_batch, output in zip(packed.batch.micro_batches, result.outputs, strict=True):
        assert output.logprobs.shape == micro_batch.targets.shape
        assert output.loss.shape == micro_batch.tokens.shape
        assert output.logprobs.dtype == output.loss.dtype == np.float32


def test_a_datum_has_the_same_scores_alone_and_among_others(device: Backend) -> None:
    """It sees nothing of the datums before it, whatever their length and number of targets."""
    mine = adapter(device)
    run(device, wanted(mine, 1))
    take_step(device, mine, AdamwParams(learning_rate=0.05))
    data = [datum(seed, length) for seed, length in enumerate([7, 24, 12, 1, 20, 24, 3, 24, 24, 9])]
    wide = np.random.default_rng(0).integers(0, 50, (11, 3)).astype(np.int32)
    data.insert(
        4, DecodedDatum(datum(50, 11).tokens, wide, np.ones((11, 3), np.float32), flat=False)
    )

    def scored(*data: DecodedDatum) -> tuple[list[Any], float]:
        training = TrainingData("cross_entropy", {}, True, list(data))
        return answer(device, PackingRequest(mine, 3, training))

    together, loss = scored(*data)
    losses = []
    for each, got in zip(data, together, strict=True):
        (want,), alone = scored(each)
        np.testing.assert_allclose(got, want, rtol=1e-5, strict=True)
        losses.append(alone)
    assert loss == pytest.approx(sum(losses), rel=1e-5)


def test_steps_lower_the_loss_on_their_data(device: Backend) -> None:
    mine = adapter(device)
    losses = []
    for _ in range(4):
        losses.append(answer(device, wanted(mine, 1))[1])
        take_step(device, mine, AdamwParams(learning_rate=0.01))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_gradients_accumulate_over_requests_and_batches_alike(device: Backend) -> None:
    states = []
    for batches in ([[1], [2], [3]], [[1, 2, 3]], [[1, 2], [3]]):
        mine = adapter(device)
        for seeds in batches:
            run(device, *[wanted(mine, seed) for seed in seeds])
        take_step(device, mine)
        states.append(device.adapter_state(mine, optimizer=True))
    assert same_state(states[0], states[1]) and same_state(states[0], states[2])


def test_a_step_clears_the_accumulator_and_is_counted(device: Backend) -> None:
    mine = adapter(device)
    run(device, wanted(mine, 1))
    metrics = take_step(device, mine)
    assert metrics["grad_norm"] > 0
    assert all(np.isfinite(value) for value in metrics.values())
    assert device.adapter_state(mine, optimizer=True).step == 1
    assert take_step(device, mine)["grad_norm"] == 0
    assert device.adapter_state(mine, optimizer=True).step == 2


def test_steps_taken_together_equal_those_taken_one_by_one(device: Backend) -> None:
    configs, params = (SMALL, OTHER, PARTIAL), [replace(STEP, beta1=b) for b in (0.9, 0.8, 0.7)]
    together = [adapter(device, config) for config in configs]
    single = [adapter(device, config) for config in configs]
    for each, config in zip([*together, *single], configs * 2, strict=True):
        run(device, wanted(each, config.seed, rank=config.rank))
    metrics = device.optim_steps(list(zip(together, params, strict=True)))
    assert metrics == [take_step(device, *each) for each in zip(single, params, strict=True)]
    for one, other in zip(together, single, strict=True):
        assert same_state(
            device.adapter_state(one, optimizer=True), device.adapter_state(other, optimizer=True)
        )


def test_an_impossible_step_does_not_stop_the_others(device: Backend) -> None:
    first, wrong, last = (adapter(device) for _ in range(3))
    for each in (first, wrong, last):
        run(device, wanted(each, 1))
    taken = [(first, STEP), ("nobody", STEP), (wrong, AdamwParams(beta1=1.0)), (last, STEP)]
    results = device.optim_steps(taken)
    assert [isinstance(result, EngineError) for result in results] == [False, True, True, False]
    assert results[0] == results[3]
    steps = [device.adapter_state(each, optimizer=True).step for each in (first, wrong, last)]
    assert steps == [1, 0, 1]
    assert take_step(device, wrong) == results[0]
    assert device.optim_steps([]) == []


def test_prefetching_any_names_changes_nothing(device: Backend) -> None:
    mine = adapter(device)
    run(device, wanted(mine, 1))
    before = device.adapter_state(mine, optimizer=True, accumulator=True)
    named = threading.Thread(target=device.prefetch, args=([mine, "nobody", mine],))
    named.start()
    assert same_state(device.adapter_state(mine, optimizer=True, accumulator=True), before)
    named.join()
    assert same_state(device.adapter_state(mine, optimizer=True, accumulator=True), before)


def test_forward_only_gives_the_same_answer_and_no_gradient(device: Backend) -> None:
    mine = adapter(device)
    (there,), loss = answer(device, wanted(mine, 1, forward_only=True))
    assert take_step(device, mine, AdamwParams())["grad_norm"] == 0
    (here,), trained = answer(device, wanted(mine, 1))
    np.testing.assert_allclose(there, here, rtol=1e-5)
    assert loss == pytest.approx(trained, rel=1e-5)
    assert take_step(device, mine, AdamwParams())["grad_norm"] > 0


@pytest.mark.parametrize("datums", [1, 2, 30])
def test_neighbours_change_no_bit_of_an_answer_or_a_gradient(device: Backend, datums: int) -> None:
    """The request may start anywhere in a chunk and need any number of micro-batches."""
    alone = adapter(device)
    together, neighbour = adapter(device), adapter(device, OTHER)
    logprobs, loss = answer(device, wanted(alone, *range(datums)))
    others = [wanted(neighbour, seed, seed + 1, rank=5) for seed in (5, 7, 9)]
    mine = wanted(together, *range(datums))
    got, got_loss = answer(device, *others[:1], mine, *others[1:], of=1)
    assert got_loss == loss
    assert [x.tobytes() for x in got] == [x.tobytes() for x in logprobs]
    for each in (alone, together):
        take_step(device, each)
    assert same_state(
        device.adapter_state(alone, optimizer=True), device.adapter_state(together, optimizer=True)
    )


def test_a_poisoned_adapter_is_left_out_and_harms_no_other(device: Backend) -> None:
    mine, alone, sick = adapter(device), adapter(device), adapter(device)
    run(device, wanted(sick, 1))
    take_step(device, sick, AdamwParams(learning_rate=1e37))
    poisoned = device.adapter_state(sick, optimizer=True)
    run(device, wanted(alone, 1, 2))
    _, result = run(device, wanted(sick, 3, 4), wanted(mine, 1, 2), wanted(sick, 5))
    assert result.finite == (False, True, False)
    for each in (alone, mine):
        take_step(device, each)
    assert same_state(
        device.adapter_state(mine, optimizer=True), device.adapter_state(alone, optimizer=True)
    )
    assert same_state(device.adapter_state(sick, optimizer=True), poisoned)
    assert take_step(device, sick)["grad_norm"] == 0


def test_halved_micro_batches_give_the_same_bits(device: Backend) -> None:
    states, answers = [], []
    for halvings in (0, 1, 3):
        mine = adapter(device)
        logprobs, loss = answer(device, wanted(mine, *range(12)), halvings=halvings)
        answers.append((loss, [array.tobytes() for array in logprobs]))
        states.append(device.adapter_state(mine, optimizer=True, accumulator=True))
    assert answers[0] == answers[1] == answers[2]
    assert same_state(states[0], states[1]) and same_state(states[0], states[2])


def test_a_micro_batch_that_does_not_fit_changes_nothing_and_halves_may_fit() -> None:
    device = FakeBackend(memory_tokens=64)
    mine = adapter(device)
    request = wanted(mine, *range(12))
    for halvings in (0, 1):
        with pytest.raises(OutOfMemory, match="64 fit"):
            run(device, request, halvings=halvings)
    assert device.adapter_state(mine, optimizer=True, accumulator=True).accumulator == {}
    assert run(device, request, halvings=2)[1].finite == (True,)


def test_a_batch_that_raises_has_changed_no_adapter(device: Backend) -> None:
    mine = adapter(device)
    (packed,) = pack([wanted(mine, 1), wanted(mine, 2)], device.static_shapes)
    broken = TrainBatch((mine, "nobody"), False, packed.batch.micro_batches)
    with pytest.raises(EngineError):
        device.forward_backward(broken)
    assert take_step(device, mine)["grad_norm"] == 0


# --- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, PARTIAL])
def test_a_resumed_adapter_continues_bit_for_bit(device: Backend, config: AdapterConfig) -> None:
    mine, resumed = adapter(device, config), f"contract-{next(ids)}"
    run(device, wanted(mine, 1))
    take_step(device, mine)
    saved = device.adapter_state(mine, optimizer=True)
    device.load_adapter(resumed, saved)
    assert same_state(device.adapter_state(resumed, optimizer=True), saved)
    for each in (mine, resumed):
        run(device, wanted(each, 2))
        take_step(device, each)
    assert same_state(
        device.adapter_state(mine, optimizer=True), device.adapter_state(resumed, optimizer=True)
    )


Act = Callable[[Backend, str], Any]


def gradient(*seeds: int) -> Act:
    def act(device: Backend, adapter_id: str) -> Any:
        logprobs, loss = answer(device, wanted(adapter_id, *seeds))
        return loss, [array.tobytes() for array in logprobs]

    return act


def step(device: Backend, adapter_id: str) -> Any:
    return take_step(device, adapter_id)


TRAINING: tuple[Act, ...] = (
    *(gradient(1, 2), gradient(3), step),
    *(gradient(4), step, step),
    *(gradient(5), gradient(6, 7), step, gradient(8)),
)
GRADIENTS = [0, 1, 2, 0, 1, 0, 0, 1, 2, 0, 1]
"""The number of requests in the accumulator before each of them, and at the end."""


def test_a_state_with_accumulator_continues_elsewhere_bit_for_bit_from_any_moment(
    device: Backend, elsewhere: Backend
) -> None:
    def state(where: Backend, adapter_id: str) -> AdapterState:
        return where.adapter_state(adapter_id, optimizer=True, accumulator=True)

    mine = adapter(device)
    states = [state(device, mine)]
    results = []
    for act in TRAINING:
        results.append(act(device, mine))
        states.append(state(device, mine))
    assert [bool(each.accumulator) for each in states] == [count > 0 for count in GRADIENTS]
    for moment, saved in enumerate(states):
        resumed = f"resumed-{next(ids)}"
        elsewhere.load_adapter(resumed, saved)
        assert same_state(state(elsewhere, resumed), saved)
        for act, result in zip(TRAINING[moment:], results[moment:], strict=True):
            assert act(elsewhere, resumed) == result
        assert same_state(state(elsewhere, resumed), states[-1])
        elsewhere.delete_adapter(resumed)


@pytest.mark.acceptance("S8")
def test_a_state_has_the_accumulator_only_on_request(device: Backend) -> None:
    mine = adapter(device)
    run(device, wanted(mine, 1))
    for optimizer in (False, True):
        assert device.adapter_state(mine, optimizer=optimizer).accumulator == {}
    weights = device.adapter_state(mine, optimizer=False, accumulator=True)
    assert weights.accumulator.keys() == weights.weights.keys()
    assert weights.accumulator["q_proj.B"].any() and weights.first_moment == {}


def test_a_failed_gradient_leaves_no_accumulator(device: Backend) -> None:
    mine = adapter(device)
    run(device, wanted(mine, 1, forward_only=True))
    assert device.adapter_state(mine, optimizer=True, accumulator=True).accumulator == {}
    run(device, wanted(mine, 2))
    take_step(device, mine, AdamwParams(learning_rate=1e37))
    _, result = run(device, wanted(mine, 3))
    assert result.finite == (False,)
    assert device.adapter_state(mine, optimizer=True, accumulator=True).accumulator == {}


def test_an_accumulated_gradient_of_zeros_counts_as_one(device: Backend) -> None:
    """The arrays are not compared: the number of added gradients makes the difference."""
    mine = adapter(device)
    silent = replace(datum(1), weights=np.zeros((12, 1), np.float32))
    run(device, PackingRequest(mine, 3, TrainingData("cross_entropy", {}, False, [silent])))
    assert device.adapter_state(mine, optimizer=True, accumulator=True).accumulator


def test_loading_a_state_without_an_accumulator_clears_the_old_one(device: Backend) -> None:
    mine = adapter(device)
    saved = device.adapter_state(mine, optimizer=True)
    run(device, wanted(mine, 1))
    device.load_adapter(mine, saved)
    assert device.adapter_state(mine, optimizer=True, accumulator=True).accumulator == {}
    assert take_step(device, mine)["grad_norm"] == 0


def test_backends_of_one_kind_share_a_numerics_id(device: Backend, elsewhere: Backend) -> None:
    assert device.numerics_id == elsewhere.numerics_id
    assert "\n" not in device.numerics_id


def test_loading_weights_alone_resets_the_optimizer_and_the_accumulator(
    device: Backend,
) -> None:
    mine = adapter(device)
    run(device, wanted(mine, 1))
    take_step(device, mine)
    weights = device.adapter_state(mine, optimizer=False)
    run(device, wanted(mine, 2))
    device.load_adapter(mine, weights)
    state = device.adapter_state(mine, optimizer=True)
    assert state.step == 0 and same_tensors(state.weights, weights.weights)
    assert not any(tensor.any() for tensor in state.second_moment.values())
    assert take_step(device, mine, AdamwParams())["grad_norm"] == 0


def misfits(state: AdapterState) -> list[AdapterState]:
    wide = dict(state.weights) | {"q_proj.A": np.zeros((2, 99, 3), np.float32)}
    short = {name: tensor for name, tensor in state.weights.items() if name != "v_proj.B"}
    ranked = AdapterConfig(rank=4, alpha=16.0, seed=1)
    return [
        AdapterState(state.config, wide),
        AdapterState(state.config, short),
        AdapterState(ranked, state.weights),
        AdapterState(AdapterConfig(rank=10**6, alpha=16.0, seed=1), state.weights),
    ]


@pytest.mark.parametrize("case", range(4))
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    device: Backend, case: int
) -> None:
    mine = adapter(device)
    before = device.adapter_state(mine, optimizer=True)
    wrong = misfits(before)[case]
    with pytest.raises(UserError):
        device.load_adapter(mine, wrong)
    with pytest.raises(UserError):
        device.load_snapshot("misfit", wrong)
    assert not device.has_snapshot("misfit")
    assert same_state(device.adapter_state(mine, optimizer=True), before)


@pytest.mark.parametrize("part", ["first_moment", "second_moment", "accumulator"])
def test_a_part_of_a_training_state_that_does_not_fit_is_refused(
    device: Backend, part: str
) -> None:
    mine = adapter(device)
    run(device, wanted(mine, 1))
    before = device.adapter_state(mine, optimizer=True, accumulator=True)
    short = {name: tensor for name, tensor in getattr(before, part).items() if name != "v_proj.B"}
    with pytest.raises(UserError):
        device.load_adapter(mine, replace(before, **{part: short}))
    assert same_state(device.adapter_state(mine, optimizer=True, accumulator=True), before)


# --- sampling ------------------------------------------------------------------------------------


def test_an_empty_call_returns_no_result(device: Backend) -> None:
    assert device.sample([]) == []


def test_samples_have_the_requested_length_and_a_logprob_per_token(device: Backend) -> None:
    result = sample(device, ask(num_samples=3))
    assert len(result.sequences) == 3
    for sequence in result.sequences:
        assert sequence.tokens.dtype == np.int32 and sequence.logprobs.dtype == np.float32
        assert len(sequence.tokens) == len(sequence.logprobs) == 4
        assert ((sequence.tokens >= 0) & (sequence.tokens < device.info.vocab_size)).all()
        assert sequence.stop_reason == "length"
        assert sequence.topk is None
    scores = (result.prompt_logprobs, result.topk_prompt, result.target_logprobs, result.alt_tokens)
    assert scores == (None, None, None, None)


def test_seed_and_index_decide_a_sample(device: Backend) -> None:
    long = {"max_tokens": 10, "num_samples": 3}
    first, second = sample(device, ask(**long)), sample(device, ask(**long))
    assert same_sample(first, second)
    assert len({tuple(tokens) for tokens in tokens_of(first)}) == 3
    assert tokens_of(first) != tokens_of(sample(device, ask(**long, seed=1000)))
    assert tokens_of(sample(device, ask(max_tokens=10)))[0] == tokens_of(first)[0]


def test_neighbours_change_no_bit_of_a_sample(device: Backend) -> None:
    mine = snapshot(device, adapter(device))
    others = [ask(seed=seed, prompt=prompt(seed, 3)) for seed in (5, 6)]
    alone = sample(device, ask(mine, num_samples=2))
    assert same_sample(device.sample([others[0], ask(mine, num_samples=2), others[1]])[1], alone)


def test_temperature_zero_takes_the_same_tokens_under_any_seed(device: Backend) -> None:
    greedy = {"temperature": 0.0, "num_samples": 2}
    one, two = tokens_of(sample(device, ask(**greedy)))
    assert one == two == tokens_of(sample(device, ask(**greedy, seed=99)))[0]


def test_a_stop_token_ends_a_sample_and_is_its_last_token(device: Backend) -> None:
    (whole,) = tokens_of(sample(device, ask()))
    stop = whole[2]
    (sequence,) = sample(device, ask(stop_tokens=frozenset({stop}))).sequences
    assert sequence.tokens.tolist() == whole[: whole.index(stop) + 1]
    assert sequence.stop_reason == "stop"
    assert len(sequence.logprobs) == len(sequence.tokens)
    # A stop token at the end of the budget counts as a stop as well.
    (sequence,) = sample(device, ask(stop_tokens=frozenset({stop}), max_tokens=3)).sequences
    assert sequence.stop_reason == "stop"


def test_a_streamed_sample_reports_its_tokens_part_by_part(device: Backend) -> None:
    asked = {
        "live": ask(num_samples=3, max_tokens=10, topk_sample=2, stream=True),
        "too": ask(seed=9, max_tokens=10, stream=True),
        "silent": ask(seed=5, max_tokens=10),
    }
    listener, ended, left = Listener(), {}, dict(asked)
    while left:
        given = device.sample_until(left, lambda: True)
        assert "silent" not in given.new_tokens
        listener.hear(given)
        ended |= given.finished
        left = {name: left[name] for name in given.remaining}
    heard = {place for place, told in listener.places.items() if told}
    assert heard == {("live", 0), ("live", 1), ("live", 2), ("too", 0)}
    assert listener.repeated == 0
    for name, request in asked.items():
        listener.assert_heard(name, ended[name])
        assert same_sample(ended[name], sample(device, replace(request, stream=False)))


def test_a_restarted_sample_reports_its_tokens_again_from_the_start(device: Backend) -> None:
    asked = {"live": ask(num_samples=2, max_tokens=10, stream=True)}
    listener, started = Listener(), 0
    for _ in range(2):
        while not (given := device.sample_until(asked, lambda: True)).new_tokens:
            assert not given.finished
        listener.hear(given)
        started += sum(part.start == 0 for part in given.new_tokens["live"])
        device.sample_until({}, lambda: True)  # the sample is dropped
    assert started == 4
    assert listener.repeated > 0


def test_a_fresh_adapter_samples_like_the_base_model(device: Backend) -> None:
    fresh = snapshot(device, adapter(device, PARTIAL))
    base, mine = (sample(device, ask(name, prompt_logprobs=True)) for name in (None, fresh))
    assert tokens_of(base) == tokens_of(mine)
    np.testing.assert_allclose(mine.prompt_logprobs, base.prompt_logprobs, rtol=1e-5)


def test_a_snapshot_stays_as_it_was_saved(device: Backend) -> None:
    mine = adapter(device)
    run(device, wanted(mine, 1))
    take_step(device, mine, AdamwParams(learning_rate=0.05))
    frozen = snapshot(device, mine)
    before = sample(device, ask(frozen, prompt_logprobs=True))
    base = sample(device, ask(prompt_logprobs=True))
    assert not np.allclose(before.prompt_logprobs[1:], base.prompt_logprobs[1:], rtol=1e-4)
    run(device, wanted(mine, 2))
    take_step(device, mine)
    device.delete_adapter(mine)
    after = sample(device, ask(frozen, prompt_logprobs=True))
    assert same_sample(before, after)
    assert after.prompt_logprobs.tobytes() == before.prompt_logprobs.tobytes()


def test_a_snapshot_that_is_not_loaded_cannot_be_sampled(device: Backend) -> None:
    assert not device.has_snapshot("never")
    with pytest.raises(EngineError):
        sample(device, ask("never"))


def test_prompt_logprobs_equal_those_of_training(device: Backend) -> None:
    mine = adapter(device)
    run(device, wanted(mine, 1))
    take_step(device, mine, AdamwParams(learning_rate=0.05))
    tokens = prompt(7, 13)
    sequence = DecodedDatum(tokens[:-1], tokens[1:, None], np.ones((12, 1), np.float32), flat=True)
    data = TrainingData("cross_entropy", {}, True, [sequence])
    (want,), _ = answer(device, PackingRequest(mine, 3, data))
    result = sample(
        device, ask(snapshot(device, mine), prompt=tokens, max_tokens=1, prompt_logprobs=True)
    )
    assert result.prompt_logprobs is not None and result.prompt_logprobs.shape == (13,)
    assert np.isnan(result.prompt_logprobs[0])
    np.testing.assert_allclose(result.prompt_logprobs[1:], want, rtol=1e-4, atol=1e-5)


def targets_at(ids: Sequence[Sequence[int]]) -> Any:
    return np.array(ids, np.int32)


def test_scores_of_one_prompt_agree_with_each_other(device: Backend) -> None:
    tokens = prompt(3, 5)
    asked = {"prompt": tokens, "topk_prompt": 4, "alt_tokens": 3, "prompt_logprobs": True}
    first = sample(device, ask(**asked))
    assert isinstance(first.topk_prompt, TopK) and isinstance(first.alt_tokens, TopK)
    assert first.topk_prompt.token_ids.shape == first.topk_prompt.logprobs.shape == (4, 4)
    assert first.alt_tokens.token_ids.shape == first.alt_tokens.logprobs.shape == (4, 3)
    assert (np.diff(first.topk_prompt.logprobs) <= 0).all()
    for scored in (first.topk_prompt, first.alt_tokens):
        again = sample(device, ask(**asked, targets=scored.token_ids)).target_logprobs
        np.testing.assert_allclose(again, scored.logprobs, rtol=1e-5)
    skipped = targets_at([[int(tokens[1]), -1], [-1, -1], [-1, int(tokens[3])], [-1, 0]])
    some = sample(device, ask(prompt=tokens, targets=skipped)).target_logprobs
    assert some is not None and first.prompt_logprobs is not None
    assert (some[skipped < 0] == 0).all()
    np.testing.assert_allclose(some[0, 0], first.prompt_logprobs[1], rtol=1e-5)
    np.testing.assert_allclose(some[2, 1], first.prompt_logprobs[3], rtol=1e-5)


def test_the_most_likely_tokens_of_a_sample_are_returned_with_each_token(device: Backend) -> None:
    (sequence,) = sample(device, ask(topk_sample=3)).sequences
    assert sequence.topk is not None
    assert sequence.topk.token_ids.shape == sequence.topk.logprobs.shape == (4, 3)
    assert (np.diff(sequence.topk.logprobs) <= 0).all()
    assert (sequence.topk.logprobs[:, 0] >= sequence.logprobs - 1e-5).all()


def test_a_prompt_of_one_token_has_scores_without_rows(device: Backend) -> None:
    result = sample(
        device,
        ask(
            prompt=targets_at([7]),
            prompt_logprobs=True,
            topk_prompt=2,
            alt_tokens=2,
            targets=np.zeros((0, 3), np.int32),
        ),
    )
    assert result.prompt_logprobs is not None and np.isnan(result.prompt_logprobs).all()
    assert result.topk_prompt is not None and result.topk_prompt.token_ids.shape == (0, 2)
    assert result.alt_tokens is not None and result.alt_tokens.logprobs.shape == (0, 2)
    assert result.target_logprobs is not None and result.target_logprobs.shape == (0, 3)
