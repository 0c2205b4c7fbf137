"""Every process of a worker makes the calls of its leader; what sets them apart ends them all.

The contract of a backend is tested for such a group, too: tests/engine/backend/test_base.py.
"""

import pickle  # noqa: S403
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.backend.test_base import (
    SMALL,
    STEP,
    ask,
    same_state,
    snapshot,
    wanted,
)
from tests.support.fake_backend import FakeBackend
from tests.support.host_group import WAIT_S, HostGroup
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import (
    DeviceFailed,
    OutOfMemory,
    SampleProgress,
    SamplingRequest,
    TrainBatch,
    TrainResult,
    nothing,
)
from tuneserve_engine.backend.hosts.messages import Agreed, StopAsked, Yielded
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.errors import ServerError, UserError
from tuneserve_engine.core.grammar import Grammar
from tuneserve_engine.worker.execution.packing import pack


class Noting(FakeBackend):
    """Notes its calls. ``on`` maps methods to what they do first."""

    def __init__(self, **on: Callable[[], object]) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.on = on
        self.shared_id = ""
        self.compiled: list[Grammar] = []

    def _note(self, method: str, *about: Any) -> None:
        self.calls.append((method, *about))
        self.on.get(method, nothing)()

    def create_adapter(self, adapter_id: str, config: AdapterConfig) -> None:
        self._note("create_adapter", adapter_id)
        super().create_adapter(adapter_id, config)

    def delete_adapter(self, adapter_id: str) -> None:
        self._note("delete_adapter", adapter_id)
        super().delete_adapter(adapter_id)

    def forward_backward(
        self, batch: TrainBatch, between: Callable[[], None] = nothing, /
    ) -> TrainResult:
        self._note("forward_backward", batch.adapter_ids)
        return super().forward_backward(batch, between)

    def optim_steps(
        self, steps: Sequence[tuple[str, AdamwParams]]
    ) -> list[Mapping[str, float] | Exception]:
        self._note("optim_steps", [name for name, _ in steps])
        return super().optim_steps(steps)

    def sample_until(
        self, asked: Mapping[str, SamplingRequest], should_yield: Callable[[], bool]
    ) -> SampleProgress:
        self._note("sample_until", dict(asked))
        return super().sample_until(asked, should_yield)

    def prefetch(self, adapter_ids: Sequence[str]) -> None:
        self._note("prefetch", tuple(adapter_ids))

    def pending_grammar(self, grammar: Grammar) -> Callable[[], object] | None:
        if grammar in self.compiled:
            return None
        return lambda: (self.compiled.append(grammar), self.on.get("grammar", nothing)())

    def prepare(self, config: AdapterConfig) -> str:
        self._note("prepare", config.kind)
        return self.shared_id


@pytest.fixture
def groups() -> Iterator[Callable[..., HostGroup]]:
    made: list[HostGroup] = []

    def group(*backends: Any, **options: Any) -> HostGroup:
        made.append(HostGroup(backends or (Noting(), Noting(), Noting()), **options))
        return made[-1]

    yield group
    for each in made:
        each.close()


@pytest.fixture
def group(groups: Callable[..., HostGroup]) -> HostGroup:
    """A leader and two followers."""
    return groups()


def batch_of(group: HostGroup, *seeds: int, halvings: int = 0) -> TrainBatch:
    (packed,) = pack([wanted("a", *seeds)], group.static_shapes, halvings)
    return packed.batch


def raising(error: Exception) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


def test_all_processes_have_the_same_adapters_after_training(group: HostGroup) -> None:
    group.create_adapter("a", SMALL)
    group.forward_backward(batch_of(group, 1, 2))
    group.optim_steps([("a", STEP)])
    group.forward_backward(batch_of(group, 3))
    mine, *others = [
        each.adapter_state("a", optimizer=True, accumulator=True) for each in group.backends
    ]
    assert mine.step == 1 and all(same_state(mine, other) for other in others)


def test_what_runs_between_rounds_runs_there_in_every_process(group: HostGroup) -> None:
    """Another batch and a sample, inside the first batch, and calls inside that."""
    group.create_adapter("a", SMALL)
    group.create_adapter("b", SMALL)
    inner = replace(batch_of(group, *range(9), halvings=3), adapter_ids=("b",))
    long = batch_of(group, *range(20), halvings=3)
    assert len(long.micro_batches) > 2 and len(inner.micro_batches) > 1
    rounds = iter(range(100))

    def between() -> None:
        if next(rounds) == 1:
            group.forward_backward(inner, lambda: group.optim_steps([("b", STEP)]) and None)
            group.sample_until({"s": ask()}, lambda: True)

    group.forward_backward(long, between)
    calls = [[method for method, *_ in each.calls] for each in group.backends]
    assert calls[0][2:5] == ["forward_backward", "forward_backward", "optim_steps"]
    assert calls[0][-1] == "sample_until"
    assert calls == [calls[0]] * 3


def test_every_process_samples_as_long_as_the_leader(group: HostGroup) -> None:
    """The leader alone decides; a request crosses the connection once."""
    sent: list[Any] = []
    for link in group._followers:
        link.send_packed = partial_note(sent, link.send_packed)  # type: ignore[method-assign]
    asked = {name: ask(seed=number, stream=True) for number, name in enumerate("ab")}
    decisions = iter([True, False, False, True, True, True])
    remaining = []
    for _ in range(3):
        progress = group.sample_until(asked, lambda: next(decisions))
        remaining.append(dict(progress.remaining))
    assert remaining[0] == {"a": 1, "b": 1}
    taken = [[about for method, about in each.calls] for each in group.backends]
    for mine, *others in zip(*taken, strict=True):
        assert all(same_requests(mine, other) for other in others)
    given = [each.arguments[0] for each in sent if hasattr(each, "arguments")]
    assert [set(map(type, each.values())) for each in given[:2]] == [{SamplingRequest}] * 2
    assert all(set(each.values()) == {None} for each in given[2:])
    assert sum(isinstance(each, Yielded) for each in sent) >= 6


def partial_note(sent: list[Any], send: Callable[[bytes], None]) -> Callable[[bytes], None]:
    def noted(body: bytes) -> None:
        sent.append(pickle.loads(body))  # noqa: S301
        send(body)

    return noted


def same_requests(mine: dict[str, SamplingRequest], other: dict[str, SamplingRequest]) -> bool:
    return mine.keys() == other.keys() and all(
        np.array_equal(mine[name].prompt, other[name].prompt)
        and replace(mine[name], prompt=other[name].prompt) == other[name]
        for name in mine
    )


def test_an_error_of_a_client_ends_one_call_only(group: HostGroup) -> None:
    with pytest.raises(ServerError, match="adapter missing does not exist"):
        group.delete_adapter("missing")
    with pytest.raises(UserError):
        group.create_adapter("wide", replace(SMALL, rank=1000))
    group.create_adapter("a", SMALL)
    results = group.optim_steps([("missing", STEP), ("a", STEP)])
    assert isinstance(results[0], ServerError) and isinstance(results[1], Mapping)
    assert not group.ends and not group.losses


def test_the_state_of_an_adapter_is_asked_of_the_leader_alone(group: HostGroup) -> None:
    group.create_adapter("a", SMALL)
    for each in group.backends[1:]:
        each.adapter_state = raising(AssertionError("asked"))
    assert isinstance(group.adapter_state("a", optimizer=True), AdapterState)
    assert group.numerics_id == "fake-1" and group.metrics == {"adapters": 1}


@pytest.mark.parametrize("method", ["forward_backward", "optim_steps"])
def test_a_leader_without_room_in_an_exchange_ends_the_worker(
    groups: Callable[..., HostGroup], method: str
) -> None:
    """Devices of other processes may wait for its own."""
    leader = Noting(**{method: raising(OutOfMemory("the device has no room"))})
    group = groups(leader, Noting())
    group.create_adapter("a", SMALL)
    with pytest.raises(DeviceFailed, match="no room; other processes of this worker may wait"):
        called(group, method)


def called(group: HostGroup, method: str) -> object:
    if method == "optim_steps":
        return group.optim_steps([("a", STEP)])
    return group.forward_backward(batch_of(group, 1))


def test_a_follower_without_room_in_an_exchange_ends_itself(
    groups: Callable[..., HostGroup],
) -> None:
    follower = Noting(forward_backward=raising(OutOfMemory("the device has no room")))
    group = groups(Noting(), follower)
    group.create_adapter("a", SMALL)
    with pytest.raises(DeviceFailed, match="gpu-1, a process of this worker, is lost"):
        group.forward_backward(batch_of(group, 1))
    assert [type(each) for each in group.ends] == [DeviceFailed]
    assert group.lost.wait(WAIT_S)
    assert len(group.losses) == 1 and group.losses[0].startswith("gpu-1: ")


@pytest.mark.parametrize("full", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_an_adapter_without_room_on_any_host_is_on_none(
    groups: Callable[..., HostGroup], full: tuple[int, ...]
) -> None:
    """For example because the disk of one host is full. Everything else goes on."""
    error = OutOfMemory("there is no room for another adapter")
    lacking = {"create_adapter": raising(error)}
    group = groups(*(Noting(**(lacking if number in full else {})) for number in range(3)))
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="a host of this worker has no room for a"):
            group.create_adapter("a", SMALL)
        assert [each.metrics["adapters"] for each in group.backends] == [0, 0, 0]
    for each in group.backends:
        each.on.clear()
    group.create_adapter("a", SMALL)
    group.forward_backward(batch_of(group, 1))
    assert not group.ends and not group.losses


def test_a_program_that_one_process_cannot_compile_ends_the_worker(
    groups: Callable[..., HostGroup],
) -> None:
    """The others wait for it inside theirs."""
    error = ServerError("this server cannot run train_micro_batch")
    error.no_room = True
    group = groups(Noting(), Noting(forward_backward=raising(error)))
    group.create_adapter("a", SMALL)
    with pytest.raises(DeviceFailed, match="gpu-1, a process of this worker, is lost"):
        group.forward_backward(batch_of(group, 1))
    group = groups(Noting(optim_steps=raising(error)), Noting())
    with pytest.raises(DeviceFailed, match="cannot run train_micro_batch; other processes"):
        group.optim_steps([])


def test_after_a_failure_no_call_goes_out(
    groups: Callable[..., HostGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its followers may never answer: whoever tidies up must not wait for them."""
    leader = Noting(forward_backward=raising(OutOfMemory("the device has no room")))
    group = groups(leader, Noting())
    group.create_adapter("a", SMALL)
    with pytest.raises(DeviceFailed):
        group.forward_backward(batch_of(group, 1))
    for call in (
        lambda: group.delete_adapter("a"),
        lambda: group.create_adapter("b", SMALL),
        lambda: group.sample_until({}, lambda: True),
    ):
        with pytest.raises(DeviceFailed, match="about to end: the device has no room"):
            call()
    group.prefetch(["a"])  # does nothing
    assert [method for method, *_ in leader.calls] == ["create_adapter", "forward_backward"]


def test_an_error_that_should_not_be_ends_the_worker(groups: Callable[..., HostGroup]) -> None:
    group = groups(Noting(create_adapter=raising(KeyError("x"))), Noting())
    with pytest.raises(DeviceFailed, match=r"create_adapter failed in one of .* KeyError\('x'\)"):
        group.create_adapter("a", SMALL)
    group = groups(Noting(), Noting(create_adapter=raising(KeyError("x"))))
    with pytest.raises(DeviceFailed, match="gpu-1, a process of this worker, is lost"):
        group.create_adapter("a", SMALL)
    assert [type(each) for each in group.ends] == [DeviceFailed]


def test_processes_with_other_norms_are_out_of_step(group: HostGroup) -> None:
    group.create_adapter("a", SMALL)
    group.backends[2].create_adapter("a", replace(SMALL, seed=2))
    group.forward_backward(batch_of(group, 1))
    with pytest.raises(
        DeviceFailed, match=r"optim_steps ended here with \[\{'grad_norm': .* gpu-2"
    ):
        group.optim_steps([("a", STEP)])


def test_a_norm_that_is_no_number_is_the_same_in_all_processes(
    groups: Callable[..., HostGroup],
) -> None:
    """One tenant's overflow must not end the worker."""

    class Overflowing(Noting):
        def optim_steps(
            self, steps: Sequence[tuple[str, AdamwParams]]
        ) -> list[Mapping[str, float] | Exception]:
            return [{"grad_norm": float("nan")} for _ in steps]

    group = groups(Overflowing(), Overflowing())
    assert len(group.optim_steps([("a", STEP)])) == 1
    assert not group.ends and not group.losses


def test_a_follower_that_answers_nothing_is_lost(
    groups: Callable[..., HostGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneserve_engine.backend.hosts.leader.ANSWER_S", 0.2)
    stuck = threading.Event()
    group = groups(Noting(), Noting(create_adapter=stuck.wait))
    with pytest.raises(DeviceFailed, match=r"it has not answered for 0\.2 s"):
        group.create_adapter("a", SMALL)
    stuck.set()


def test_prefetching_reaches_every_process_and_waits_for_none(group: HostGroup) -> None:
    group.prefetch(["a", "b"])
    group.create_adapter("a", SMALL)  # read after it
    for each in group.backends:
        assert ("prefetch", ("a", "b")) in each.calls


# --- what adapters share ------------------------------------------------------------------------

OSFT = replace(SMALL, kind="osft")


def test_a_kind_is_prepared_once_every_process_is(groups: Callable[..., HostGroup]) -> None:
    may_end = threading.Event()
    group = groups(Noting(), Noting(prepare=lambda: may_end.wait(WAIT_S)))
    group.create_adapter("a", SMALL)
    assert not group.is_prepared(OSFT)
    with ThreadPoolExecutor(1) as pool:
        preparing = pool.submit(group.prepare, OSFT)
        group.forward_backward(batch_of(group, 1))  # meanwhile
        assert not preparing.done() and not group.is_prepared(OSFT)
        may_end.set()
        assert preparing.result(WAIT_S) == ""
    assert group.is_prepared(OSFT)
    assert all(("prepare", "osft") in each.calls for each in group.backends)


def test_a_follower_that_cannot_prepare_refuses_adapters_of_the_kind_everywhere(
    groups: Callable[..., HostGroup],
) -> None:
    follower = Noting(prepare=raising(ServerError("the disk is full; make room, and ask again")))
    group = groups(Noting(), follower)
    refusal = "gpu-1, a host of this worker: the disk is full; make room, and ask again"
    for call in (
        lambda: group.prepare(OSFT),
        lambda: group.create_adapter("a", OSFT),
        lambda: group.load_adapter("a", AdapterState(OSFT, {})),
    ):
        with pytest.raises(ServerError, match=refusal):
            call()
    assert [method for method, *_ in group.backends[0].calls] == ["prepare"]
    for error in (RuntimeError("a bug"), ServerError("the disk is still full")):
        follower.on["prepare"] = raising(error)
        with pytest.raises(ServerError, match=str(error)):
            group.prepare(OSFT)
        with pytest.raises(ServerError, match=str(error)):
            group.create_adapter("a", OSFT)
    follower.on.clear()
    group.prepare(OSFT)
    group.create_adapter("a", OSFT)
    assert not group.ends


def test_an_adapter_is_refused_while_its_kind_is_prepared_again(
    groups: Callable[..., HostGroup],
) -> None:
    may_end, begun = threading.Event(), threading.Event()
    follower = Noting(prepare=raising(ServerError("the disk is full")))
    group = groups(Noting(), follower)
    with pytest.raises(ServerError):
        group.prepare(OSFT)

    def wait() -> None:
        begun.set()
        assert may_end.wait(WAIT_S)

    follower.on["prepare"] = wait
    with ThreadPoolExecutor(1) as pool:
        preparing = pool.submit(group.prepare, OSFT)
        assert begun.wait(WAIT_S)
        with pytest.raises(ServerError, match="the disk is full"):
            group.create_adapter("a", OSFT)
        may_end.set()
        preparing.result(WAIT_S)
    group.create_adapter("a", OSFT)


def test_a_checkpoint_of_a_kind_that_no_host_is_prepared_for_is_not_exported(
    group: HostGroup,
) -> None:
    group.create_adapter("a", SMALL)
    state = group.adapter_state("a", optimizer=False)
    assert group.exported(state).config == SMALL  # a LoRA needs nothing
    with pytest.raises(ServerError, match="kind osft share is not there on every host"):
        group.exported(replace(state, config=OSFT))
    group.prepare(OSFT)
    group.exported(replace(state, config=OSFT))


def test_processes_with_other_decompositions_take_no_adapters_of_the_kind(
    group: HostGroup,
) -> None:
    group.backends[2].shared_id = "other"
    with pytest.raises(ServerError, match=r"gpu-2 has another decomposition .* \(other\)"):
        group.prepare(OSFT)


def test_a_loss_ends_the_wait_for_what_a_follower_prepares(
    groups: Callable[..., HostGroup],
) -> None:
    may_end, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        may_end.wait(WAIT_S)

    group = groups(Noting(), Noting(prepare=wait))
    with ThreadPoolExecutor(1) as pool:
        preparing = pool.submit(group.prepare, OSFT)
        assert begun.wait(WAIT_S)
        group.links[0].lose("killed")
        with pytest.raises(DeviceFailed, match="gpu-1: it has closed the connection"):
            preparing.result(WAIT_S)
        may_end.set()


# --- ends ---------------------------------------------------------------------------------------


def test_a_follower_that_is_asked_to_stop_asks_the_leader(group: HostGroup) -> None:
    group.links[1].send(StopAsked())
    group.create_adapter("a", SMALL)  # its answer comes after the message
    assert group.stops == ["asked"]


def test_followers_are_told_that_the_leader_has_stopped(group: HostGroup) -> None:
    group.end()
    assert group.ends.count("told to") == 2 and not group.losses


def test_a_loss_reaches_whoever_calls(group: HostGroup) -> None:
    group.links[0].lose("killed")
    with pytest.raises(DeviceFailed, match="gpu-1, a process of this worker, is lost"):
        for _ in range(100):
            group.has_snapshot("x")


def test_an_answer_out_of_turn_is_refused(group: HostGroup) -> None:
    group.links[0].send(Agreed("early"))
    with pytest.raises(DeviceFailed, match="has_snapshot ended here with False, on gpu-1 with"):
        group.has_snapshot("x")


def test_snapshots_are_found_where_the_leader_finds_them(group: HostGroup) -> None:
    group.create_adapter("a", SMALL)
    name = snapshot(group, "a")
    assert group.has_snapshot(name) and not group.has_snapshot("other")
    assert all(each.has_snapshot(name) for each in group.backends)


def test_a_grammar_is_compiled_by_every_process_ahead_of_its_samples(
    groups: Callable[..., HostGroup],
) -> None:
    told = [threading.Event(), threading.Event()]
    backends = Noting(), *(Noting(grammar=each.set) for each in told)
    leader, grammar = groups(*backends), Grammar("regex", "a")
    pending = leader.pending_grammar(grammar)
    assert pending is not None
    assert not any(each.compiled for each in backends)
    pending()
    assert all(each.wait(WAIT_S) for each in told)
    assert [each.compiled for each in backends] == [[grammar]] * 3
    assert leader.pending_grammar(grammar) is None
