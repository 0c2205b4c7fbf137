"""Adapters in three memories have the bits that they have in one, within the limits of each."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.support.adapters import SMALL, bits, commit, live, on_device, random_state, settled
from tests.support.nightly import at_night
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import DeviceFailed, OutOfMemory
from tuneserve_engine.backend.jax.adapters import cache as paging
from tuneserve_engine.backend.jax.adapters.arrays import (
    LoraWeights,
    TrainingAdapter,
    adapter_bytes,
    arrays_of,
    saved_state,
)
from tuneserve_engine.backend.jax.adapters.cache import AdapterCache
from tuneserve_engine.backend.jax.training.adamw import start_step
from tuneserve_engine.backend.jax.training.adapter_slots import new_adapter_slots, write_slot
from tuneserve_engine.core.adapter import UNEMBED, AdamwParams
from tuneserve_engine.core.errors import ServerError, UserError

RANK_CLASSES = (4, 8)
ONE = adapter_bytes(SMALL, 8)
"""The bytes of one adapter on the device, in the larger rank bucket."""
PARAMS = AdamwParams(learning_rate=0.1, weight_decay=0.1)


def rank_bucket(rank: int) -> int:
    return next(x for x in RANK_CLASSES if rank <= x)


def settle(cache: AdapterCache) -> None:
    """Wait until the background thread is idle."""
    cache._background.submit(lambda: None).result()


def on_the_device(cache: AdapterCache) -> list[str]:
    return [name for name, entry in cache._entries.items() if entry.device is not None]


def in_files(directory: Path) -> int:
    return len(list(directory.iterdir()))


def same(a: AdapterState, b: AdapterState) -> bool:
    mine, other = a.to_tensors(), b.to_tensors()
    return (
        (a.config, a.step, mine.keys()) == (b.config, b.step, other.keys())
        and all(mine[name].tobytes() == other[name].tobytes() for name in mine)
    )  # fmt: skip


def put(cache: AdapterCache, *names: str, seed: int = 0, step: int = 5) -> None:
    for index, name in enumerate(names):
        cache.register(name, random_state(seed + index, rank=8, step=step), 8)


@pytest.fixture
def cache_of(tmp_path: Path) -> Callable[..., AdapterCache]:
    """``cache_of(2)``: a cache with room for two adapters on the device and none in host memory."""

    def make(device: float, host_bytes: int = 0) -> AdapterCache:
        return AdapterCache(tmp_path, SMALL, device_bytes=int(device * ONE), host_bytes=host_bytes)

    return make


# --- bits ----------------------------------------------------------------------------------------


class Model:
    """Adapters that never leave the device."""

    def __init__(self) -> None:
        self.adapters: dict[str, TrainingAdapter] = {}

    def state(self, name: str) -> AdapterState:
        return saved_state(self.adapters[name], optimizer=True, accumulator=True)


def train(adapter: TrainingAdapter, seed: int) -> None:
    """Run a gradient, a step or both, through the real programs."""
    config, random = adapter.config, np.random.default_rng(seed)
    if seed % 3:
        weights = saved_state(adapter, optimizer=False, accumulator=False).weights
        gradient = {
            name: random.standard_normal(x.shape, np.float32) for name, x in weights.items()
        }
        padded = on_device(AdapterState(config, gradient), adapter.rank_bucket).weights
        trained = np.bool_(UNEMBED in config.targets)
        adapter_slots = new_adapter_slots(SMALL, adapter.rank_bucket, 2)
        adapter_slots = write_slot(adapter_slots, np.int32(1), padded, np.float32(1), trained)
        gradient_slots = LoraWeights(adapter_slots.a, adapter_slots.b)
        adapter.accumulator, _ = commit(
            adapter.accumulator, gradient_slots, 1, trained=bool(trained)
        )
        adapter.accumulated = True
    if seed % 2:
        start_step(adapter, PARAMS)


def check_limits(cache: AdapterCache, directory: Path, asked: Sequence[str]) -> None:
    with cache._exclusive(), cache._state:
        entries = dict(cache._entries)
        device = {name: x.device_bytes for name, x in entries.items() if x.device is not None}
        host = sum(x.host_bytes for x in entries.values() if x.host is not None)
        files = sum(x.file is not None for x in entries.values())
        for entry in entries.values():
            assert sum(x is not None for x in (entry.device, entry.host, entry.file)) == 1
        assert sum(device.values()) <= cache._device_limit or device.keys() <= set(asked)
        assert host <= cache._host_limit
        assert in_files(directory) == files


@pytest.mark.parametrize(
    ("device", "host_bytes", "seed"),
    [(2.5, 0, 1), (1, 10_000, 2), at_night(1, 10_000, 3), at_night(1, 10**9, 4)],
)
def test_any_order_of_calls_gives_the_bits_of_adapters_that_never_move(
    cache_of: Callable[..., AdapterCache],
    tmp_path: Path,
    device: float,
    host_bytes: int,
    seed: int,
):
    random, cache, model = np.random.default_rng(seed), cache_of(device, host_bytes), Model()
    names = [f"adapter {number}" for number in range(8)]
    asked: list[str] = []
    calls = ["put"] * 8 + random.choice(
        ["put", "drop", "state", "ahead", "get"], 40, p=[0.1, 0.05, 0.1, 0.25, 0.5]
    ).tolist()
    for number, call in enumerate(calls):
        known = list(model.adapters)
        some = random.choice(known, min(len(known), int(random.integers(1, 4)))).tolist()
        if call == "put" or not known:
            name, rank = names[number % len(names)], int(random.integers(1, 9))
            stepped, accumulated = int(random.integers(2)), bool(random.integers(2))
            state = random_state(number, rank, step=stepped, accumulated=accumulated)
            cache.register(name, state, rank_bucket(rank))
            model.adapters[name] = on_device(state, rank_bucket(rank))
        elif call == "get":
            asked = some
            for name, adapter in zip(some, cache.get(some), strict=True):
                assert same(
                    saved_state(adapter, optimizer=True, accumulator=True), model.state(name)
                )
                gradient = int(random.integers(6))
                train(adapter, gradient)
                train(model.adapters[name], gradient)
        elif call == "ahead":
            cache.prefetch([*some, "nobody"])
        elif call == "state":
            assert same(
                cache.state(some[0], optimizer=True, accumulator=True), model.state(some[0])
            )
        elif call == "drop":
            cache.remove(some[0])
            del model.adapters[some[0]]
        assert set(cache.ids) == model.adapters.keys()
        check_limits(cache, tmp_path, asked)
    for name in model.adapters:
        assert same(cache.state(name, optimizer=True, accumulator=True), model.state(name))
        assert bits(cache.get([name])[0]) == bits(model.adapters[name])
    assert cache.loads > 5 and cache.evictions > 5


def test_concurrent_calls_and_prefetches_lose_no_step(cache_of: Callable[..., AdapterCache]):
    cache, done = cache_of(3, 15_000), threading.Event()
    names = [f"adapter {number}" for number in range(9)]
    put(cache, *names)

    def prefetch(seed: int) -> None:
        random = np.random.default_rng(seed)
        while not done.is_set():
            cache.prefetch(random.choice(names, 4).tolist())
            time.sleep(0.001)

    threads = [threading.Thread(target=prefetch, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        random = np.random.default_rng(0)
        steps = dict.fromkeys(names, 5)
        for _ in range(40):
            some = random.choice(names, 2, replace=False).tolist()
            for name, adapter in zip(some, cache.get(some), strict=True):
                assert adapter.step == steps[name]
                start_step(adapter, PARAMS)
                steps[name] += 1
    finally:
        done.set()
        for thread in threads:
            thread.join()
    for index, name in enumerate(names):
        alone = on_device(random_state(index, rank=8))
        for _ in range(steps[name] - 5):
            start_step(alone, PARAMS)
        want = saved_state(alone, optimizer=True, accumulator=True)
        assert same(cache.state(name, optimizer=True, accumulator=True), want)


@pytest.mark.parametrize("place", ["device", "host", "file"])
@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("accumulator", [False, True])
@pytest.mark.parametrize("step", [0, 5])
def test_a_state_is_a_copy_and_the_same_wherever_the_adapter_is(
    cache_of: Callable[..., AdapterCache],
    place: str,
    optimizer: bool,
    accumulator: bool,
    step: int,
):
    cache = cache_of(1, 0 if place == "file" else 10**9)
    given = random_state(1, step=step)
    cache.register("mine", given, 8)
    for tensor in given.to_tensors().values():
        tensor += 1  # the cache no longer uses this copy
    if place == "device":
        cache.get(["mine"])
    before = on_device(random_state(1, step=step))
    want = saved_state(before, optimizer=optimizer, accumulator=accumulator)
    for _ in range(2):
        state = cache.state("mine", optimizer=optimizer, accumulator=accumulator)
        assert same(state, want)
        for tensor in state.to_tensors().values():
            tensor += 1
    assert bits(cache.get(["mine"])[0]) == bits(before)


def test_loading_an_adapter_again_replaces_it_wherever_it_was(
    cache_of: Callable[..., AdapterCache], tmp_path: Path
):
    cache = cache_of(1)
    for asked in ([], ["mine"]):
        put(cache, "mine", "other")
        for name in asked:
            cache.get([name])
        cache.register("mine", random_state(9), 8)
        assert in_files(tmp_path) == 2
        assert bits(cache.get(["mine"])[0]) == bits(on_device(random_state(9)))


# --- limits --------------------------------------------------------------------------------------


def test_the_least_recently_used_adapter_is_evicted_first(cache_of: Callable[..., AdapterCache]):
    cache = cache_of(2)
    put(cache, "a", "b", "c", "d")
    for name in ("a", "b", "a", "c"):
        cache.get([name])
    assert on_the_device(cache) == ["a", "c"]
    assert (cache.loads, cache.evictions) == (3, 1)


def test_requested_adapters_stay_until_the_next_call_even_beyond_the_limit(
    cache_of: Callable[..., AdapterCache],
):
    cache = cache_of(2)
    put(cache, "a", "b", "c", "d")
    adapters = cache.get(["a", "b", "c", "a"])
    assert adapters[0] is adapters[3]
    cache.prefetch(["d"])
    settle(cache)
    assert on_the_device(cache) == ["b", "c", "a"]
    cache.get(["a"])
    assert on_the_device(cache) == ["c", "a"]


def test_an_evicted_adapter_cannot_be_trained_by_mistake(
    cache_of: Callable[..., AdapterCache],
):
    cache = cache_of(1)
    put(cache, "a", "b")
    (stale,) = cache.get(["a"])
    cache.get(["b"])
    assert all(array.is_deleted() for array in arrays_of(stale))
    with pytest.raises(RuntimeError, match="deleted"):
        start_step(stale, PARAMS)


def test_loading_and_evicting_leave_nothing_on_the_device(cache_of: Callable[..., AdapterCache]):
    cache = cache_of(2, 8_000)
    put(cache, "a", "b", "c", "d")
    cache.get(["a", "b"])
    before = settled()
    for number in range(20):
        cache.get([["a", "b", "c", "d"][number % 4]])
        assert live() == before


def test_a_fresh_adapter_is_stored_without_its_zeros(
    cache_of: Callable[..., AdapterCache], tmp_path: Path
):
    cache = cache_of(1)
    state = random_state(2, rank=8, step=0, accumulated=False)
    cache.register("fresh", state, 8)
    cache.get(["fresh"])
    put(cache, "other")
    cache.get(["other"])
    (file,) = tmp_path.iterdir()
    weights = sum(tensor.nbytes for tensor in state.weights.values())
    assert weights < file.stat().st_size < weights + 3000


@pytest.mark.parametrize("what", ["dropped", "replaced"])
def test_a_deleted_adapter_leaves_the_device_at_once(
    cache_of: Callable[..., AdapterCache], what: str
):
    """The trainer may still hold a reference to it, to recognise copied weights."""
    cache = cache_of(2)
    put(cache, "a", "b")
    (adapter,) = cache.get(["a"])
    if what == "dropped":
        cache.remove("a")
    else:
        cache.register("a", random_state(9), 8)
    assert all(array.is_deleted() for array in arrays_of(adapter))


# --- prefetching ---------------------------------------------------------------------------------


def test_prefetching_loads_the_next_adapters_so_that_no_call_waits(
    cache_of: Callable[..., AdapterCache], monkeypatch: pytest.MonkeyPatch
):
    cache = cache_of(3)
    put(cache, "a", "b", "c", "d", "e")
    cache.get(["a"])
    cache.prefetch(["d", "e"])
    settle(cache)
    assert on_the_device(cache) == ["a", "e", "d"]
    monkeypatch.setattr(paging, "restored_adapter", None)  # no further adapter is loaded
    waited_s = cache.waited_s
    assert [x.config.seed for x in cache.get(["e", "d"])] == [4, 3]
    assert cache.waited_s - waited_s < 0.1


def test_prefetching_spares_adapters_in_use_and_more_urgent_ones(
    cache_of: Callable[..., AdapterCache],
):
    cache = cache_of(3)
    put(cache, "a", "b", "c", "d", "e")
    cache.get(["b", "c"])
    cache.get(["a"])
    cache.prefetch(["d", "c", "e", "b"])
    settle(cache)
    assert set(on_the_device(cache)) == {"a", "c", "d"}
    assert cache.evictions == 1


def test_prefetching_evicts_nothing_in_vain(cache_of: Callable[..., AdapterCache]):
    cache = cache_of(1.5)
    cache.register("small", random_state(1, rank=4), 4)
    put(cache, "large", "other")
    cache.get(["small"])
    cache.get(["large"])
    cache.prefetch(["other"])
    settle(cache)
    assert on_the_device(cache) == ["small", "large"]


def test_a_new_list_replaces_the_rest_of_the_old_one(
    cache_of: Callable[..., AdapterCache], monkeypatch: pytest.MonkeyPatch
):
    cache, gate = cache_of(5), Gate(paging.restored_adapter)
    monkeypatch.setattr(paging, "restored_adapter", gate)
    put(cache, "a", "b", "c", "d")
    cache.prefetch(["a", "b", "c"])
    gate.reached.wait()
    cache.prefetch(["d"])
    gate.open.set()
    settle(cache)
    assert on_the_device(cache) == ["a", "d"]


class Gate:
    """Hold the first call until the gate is opened."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call, self.reached, self.open = call, threading.Event(), threading.Event()

    def __call__(self, *args: object) -> object:
        self.reached.set()
        assert self.open.wait(30)
        return self._call(*args)


@pytest.fixture
def moving(
    cache_of: Callable[..., AdapterCache], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[AdapterCache, Gate]]:
    """A cache with ``a`` on the device, whose background thread is about to load ``b``."""
    cache, gate = cache_of(2), Gate(paging.restored_adapter)
    put(cache, "a", "b", "c")
    cache.get(["a"])
    monkeypatch.setattr(paging, "restored_adapter", gate)
    cache.prefetch(["b", "c"])
    gate.reached.wait()
    yield cache, gate
    gate.open.set()
    settle(cache)


def test_an_adapter_on_the_device_is_available_while_another_moves(
    moving: tuple[AdapterCache, Gate],
):
    cache, _ = moving
    assert cache.get(["a"])[0].config.seed == 0
    cache.prefetch(["c"])
    assert set(cache.ids) == {"a", "b", "c"}


def test_a_call_for_an_adapter_being_loaded_waits_for_it(moving: tuple[AdapterCache, Gate]):
    cache, gate = moving
    threading.Timer(0.2, gate.open.set).start()
    started_s = time.monotonic()
    assert cache.get(["b"])[0].config.seed == 1
    assert time.monotonic() - started_s >= 0.15
    assert cache.waited_s >= 0.15
    assert cache.loads == 2


def test_an_adapter_deleted_while_it_moves_is_gone(moving: tuple[AdapterCache, Gate]):
    cache, gate = moving
    threading.Timer(0.1, gate.open.set).start()
    cache.remove("b")
    settle(cache)
    assert set(cache.ids) == {"a", "c"}
    with pytest.raises(ServerError, match="'b' is not on this device"):
        cache.get(["b"])


# --- failures ------------------------------------------------------------------------------------


def test_an_unknown_adapter_is_named(cache_of: Callable[..., AdapterCache]):
    cache = cache_of(1)
    put(cache, "a")
    for call in (
        lambda: cache.get(["a", "b"]),
        lambda: cache.remove("b"),
        lambda: cache.state("b", optimizer=True, accumulator=True),
    ):
        with pytest.raises(ServerError, match=r"'b' is not on this device \(1 are\)"):
            call()


def test_a_state_of_another_base_model_is_refused_at_once(cache_of: Callable[..., AdapterCache]):
    cache = cache_of(1)
    state = random_state(1)
    state.weights["q_proj.A"] = np.zeros((1, 2, 3), np.float32)
    with pytest.raises(UserError, match=r"weights\[q_proj.A\]"):
        cache.register("a", state, 8)
    assert cache.ids == ()


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_an_unreadable_file_is_a_device_failure(
    cache_of: Callable[..., AdapterCache], tmp_path: Path, damage: str
):
    cache = cache_of(2)
    put(cache, "a")
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.unlink()
    if damage == "short":
        file.write_bytes(content[:-5])
    cache.prefetch(["a"])
    settle(cache)
    with pytest.raises(DeviceFailed, match=f"could not be read from {file}"):
        cache.get(["a"])
    file.write_bytes(content)
    put(cache, "b", seed=1)
    cache.prefetch(["b"])  # the background thread has survived
    settle(cache)
    assert on_the_device(cache) == ["b"]
    assert bits(cache.get(["a"])[0]) == bits(on_device(random_state(0, rank=8)))


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_does_not_stop_training(
    cache_of: Callable[..., AdapterCache],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Adapters that cannot be written exceed the host's memory until the disk has room."""
    cache, model = cache_of(1), Model()
    put(cache, "a", "b", "c")
    model.adapters = {name: on_device(random_state(i, rank=8)) for i, name in enumerate("abc")}
    monkeypatch.setattr("tuneserve_engine.backend.jax.adapters.spill_files.save_file", full)
    for name in "abcabc":
        (adapter,) = cache.get([name])
        start_step(adapter, PARAMS)
        start_step(model.adapters[name], PARAMS)
    assert [record.message for record in caplog.records] == [
        f"an adapter of {cache._entries['a'].host_bytes} bytes could not be written to {tmp_path}: "
        "[Errno 28] No space left on device; make room there, or give adapters more of the host's "
        "memory; until then they take more of it than they should"
    ]
    assert in_files(tmp_path) == 0
    monkeypatch.undo()
    cache.get(["b"])
    check_limits(cache, tmp_path, ["b"])
    assert in_files(tmp_path) == 2
    for name in "abc":
        assert bits(cache.get([name])[0]) == bits(model.adapters[name])


def test_a_full_disk_refuses_new_adapters_only(
    cache_of: Callable[..., AdapterCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache = cache_of(1)
    put(cache, "a", "b")
    files = in_files(tmp_path)
    monkeypatch.setattr("tuneserve_engine.backend.jax.adapters.spill_files.save_file", full)
    with pytest.raises(OutOfMemory, match=r"could not be written to .*No space left"):
        put(cache, "c", seed=2)
    assert set(cache.ids) == {"a", "b"} and in_files(tmp_path) == files
    put(cache, "b", seed=3)
    for seed, name in ((0, "a"), (3, "b")):
        assert bits(cache.get([name])[0]) == bits(on_device(random_state(seed, rank=8)))


def test_spill_files_leave_the_reserved_disk_space_free(tmp_path: Path):
    cache = AdapterCache(tmp_path, SMALL, device_bytes=ONE, host_bytes=0, min_free_bytes=2**60)
    with pytest.raises(OutOfMemory, match=r"could not be written to .*\(min_free_bytes\)"):
        put(cache, "a", "b")
    assert in_files(tmp_path) == 0


def test_a_file_that_cannot_be_deleted_does_not_stop_training(
    cache_of: Callable[..., AdapterCache], monkeypatch: pytest.MonkeyPatch
):
    cache = cache_of(1)
    put(cache, "a", "b")

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tuneserve_engine.backend.jax.adapters.spill_files.save_file", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    for seed, name in ((0, "a"), (1, "b")):
        assert bits(cache.get([name])[0]) == bits(on_device(random_state(seed, rank=8)))
    cache.remove("a")


def test_a_full_device_is_reported_to_the_caller_and_may_have_room_later(
    cache_of: Callable[..., AdapterCache], monkeypatch: pytest.MonkeyPatch
):
    cache = cache_of(1, 10**9)
    put(cache, "a", "b")

    def full(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(paging, "restored_adapter", full)
    cache.prefetch(["a"])
    settle(cache)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        cache.get(["a"])
    monkeypatch.undo()
    cache.prefetch(["a"])
    settle(cache)
    assert on_the_device(cache) == ["a"]
    assert bits(cache.get(["a"])[0]) == bits(on_device(random_state(0, rank=8)))
