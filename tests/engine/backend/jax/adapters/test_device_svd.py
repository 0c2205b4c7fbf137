"""Adapters that share a decomposition on the device: its room, and their bits in three memories."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.backend.jax.training.packed_case import TINY, model_of
from tests.engine.conftest import TINY as BASE
from tests.engine.conftest import write_base_model
from tests.support.adapters import live, settled
from tuneserve_engine.adapters.kinds import kind_of
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.jax.adapters import cache as paging
from tuneserve_engine.backend.jax.adapters.arrays import (
    adapter_bytes,
    initial_weights,
    target_shapes,
)
from tuneserve_engine.backend.jax.adapters.cache import AdapterCache
from tuneserve_engine.backend.jax.adapters.device_svd import DeviceSvd, layers_in_files
from tuneserve_engine.backend.jax.model.weights import load_base_model
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import ServerError

MAX_RANK = 8
SHAPES = target_shapes(TINY)
LORA = AdapterConfig(5, 16.0, 1, train_mlp=False)
RSLORA = AdapterConfig(3, 16.0, 1, train_mlp=False, train_unembed=False, kind="rslora")


def osft(form: str = "factors") -> AdapterConfig:
    """A configuration of 3 directions, for weights with 12 or 16."""
    options = {"form": form}
    return AdapterConfig(
        3, 0.0, 0, train_mlp=False, train_unembed=False, kind="osft", options=options
    )


def on_device(config: AdapterConfig) -> int:
    return adapter_bytes(SHAPES, MAX_RANK, kind_of(config))


SHARED = 4 * 3 * (
    3 * (24 * 16 + 8 + 8 * 16)  # q_proj, gate_proj and up_proj: u has all directions
    + 2 * (12 * 8 + 8 + 12 * 16)  # k_proj and v_proj: v has all directions
    + 2 * (16 * 8 + 8 + 16 * 24)  # o_proj and down_proj: v has all directions
)  # fmt: skip
"""By hand. The shorter side of a weight has the directions that adapters may use."""


def layers_of(model: Any) -> Callable[[str], Any]:
    return lambda name: np.asarray(model.layers[name][...])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_come_from_the_files_as_the_device_has_them_until_these_change(
    tmp_path: Path, dtype: Any
) -> None:
    folder = write_base_model(tmp_path / "model", BASE)
    model, _ = load_base_model(str(folder), dtype=dtype)
    layers = layers_in_files(folder, dtype)
    for name in ("q_proj", "down_proj"):
        wanted = np.asarray(model.layers[name][...])
        assert [each.tobytes() for each in layers(name)] == [each.tobytes() for each in wanted]
    write_base_model(folder, BASE | {"rope_theta": 5000.0})
    with pytest.raises(ValueError, match="has changed since the worker started; restart the wor"):
        layers("q_proj")


@pytest.fixture
def frozen(tmp_path: Path) -> DeviceSvd:
    found = DeviceSvd(tmp_path / "directions", layers_of(model_of()), SHAPES, MAX_RANK)
    found.decomposition.prepare()
    return found


@pytest.fixture
def cache_of(tmp_path: Path, frozen: DeviceSvd) -> Callable[..., AdapterCache]:
    """``cache_of(room)`` has this many bytes on the device, and none in host memory."""

    def make(room: int, host_bytes: int = 0) -> AdapterCache:
        pages = tmp_path / "pages"
        pages.mkdir()
        return AdapterCache(pages, SHAPES, device_bytes=room, host_bytes=host_bytes, frozen=frozen)

    return make


def random_state(config: AdapterConfig, frozen: DeviceSvd, seed: int = 0) -> AdapterState:
    """The state of a trained adapter with a gradient."""
    random = np.random.default_rng(seed)
    own = {n: x.shape for n, x in initial_weights(config, SHAPES, frozen.svd_factors).items()}
    kind = kind_of(config)
    pairs = {}
    for name in config.targets:
        *layers, inputs, outputs = SHAPES[name]
        rank = kind.rank(config, SHAPES[name])
        pairs |= {f"{name}.A": (*layers, inputs, rank), f"{name}.B": (*layers, rank, outputs)}

    def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
        return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}

    return AdapterState(
        config,
        drawn(own),
        step=4,
        first_moment=drawn(own),
        second_moment={name: x**2 for name, x in drawn(own).items()},
        accumulator=drawn(pairs),
    )


def test_shared_weights_are_on_the_device_once_and_leave_with_their_last_user(cache_of, frozen):
    cache, before = cache_of(10**9), settled()[1]
    for name, config in (("a", osft()), ("b", osft("core")), ("lora", LORA)):
        cache.register(name, random_state(config, frozen), MAX_RANK)
    first, second, lora = map(on_device, (osft(), osft("core"), LORA))
    expected = [
        (lambda: cache.get(["lora"]), lora),
        (lambda: cache.get(["a"]), lora + SHARED + first),
        (lambda: cache.get(["b", "lora"]), lora + SHARED + first + second),
        (lambda: cache.remove("a"), lora + SHARED + second),
        (lambda: cache.remove("b"), lora),
    ]
    assert frozen.bytes == SHARED
    for do, taken in expected:
        do()
        assert live()[1] - before == taken == cache._device_bytes()


def test_shared_weights_count_towards_the_devices_limit(cache_of, frozen):
    config = osft()
    cache, before = cache_of(SHARED + 2 * on_device(config)), settled()[1]
    for name in "abc":
        cache.register(name, random_state(config, frozen), MAX_RANK)
    assert cache.groups(["a", "b", "c"]) == [["a", "b"], ["c"]]
    for names, there in (("ab", 2), ("c", 2), ("abc", 3)):
        cache.get(list(names))
        assert cache.on_device == there
        assert live()[1] - before == SHARED + there * on_device(config)


def test_loras_take_the_place_of_shared_weights(cache_of, frozen):
    cache, before = cache_of(SHARED + on_device(osft())), settled()[1]
    cache.register("osft", random_state(osft(), frozen), MAX_RANK)
    cache.get(["osft"])
    room = SHARED + on_device(osft())
    names = [f"lora-{n}" for n in range(room // on_device(LORA))]
    assert len(names) >= 1
    for name in names:
        cache.register(name, random_state(LORA, frozen), MAX_RANK)
    cache.get(names)
    assert live()[1] - before == len(names) * on_device(LORA)
    assert cache.groups(["osft", *names]) == [["osft"], names]


@pytest.mark.parametrize("host_bytes", [0, 10**9], ids=["in files", "on the host"])
def test_adapters_of_all_kinds_are_loaded_with_the_same_bits(
    cache_of, frozen, host_bytes, tmp_path
):
    configs = [LORA, RSLORA, osft(), osft("short_fixed"), osft("core")]
    cache = cache_of(1, host_bytes)
    states = {str(n): random_state(config, frozen, n) for n, config in enumerate(configs)}
    for name, state in states.items():
        cache.register(name, state, MAX_RANK)
    for _ in range(2):
        for name, state in states.items():
            (adapter,) = cache.get([name])
            assert adapter.config == state.config
            assert cache.on_device == 1  # the others were evicted
            assert bool(list((tmp_path / "pages").iterdir())) is (host_bytes == 0)
            for there in (name, "0"):  # on the device, and in the spill file
                cache.get([there])
                found = cache.state(name, optimizer=True, accumulator=True)
                assert (found.config, found.step) == (state.config, state.step)
                mine, theirs = state.to_tensors(), found.to_tensors()
                assert mine.keys() == theirs.keys()
                for tensor, array in mine.items():
                    assert array.tobytes() == theirs[tensor].tobytes(), tensor


def test_room_is_made_for_shared_weights_even_if_their_only_user_is_evicted(cache_of, frozen):
    """The LoRA must be evicted too: the directions stay for the adapter being loaded."""
    config = osft()
    limit = SHARED + on_device(config) + on_device(LORA) - 4
    cache, before = cache_of(limit), settled()[1]
    for name, state in (("a", config), ("b", config), ("lora", LORA)):
        cache.register(name, random_state(state, frozen), MAX_RANK)
    cache.get(["a"])
    cache.get(["b"])
    cache.get(["lora"])
    for names in (["a"], ["b"], ["lora"], ["b"]):
        cache.get(names)
        assert live()[1] - before <= limit
        assert live()[1] - before == cache._device_bytes()


def test_an_adapter_that_fails_to_load_leaves_no_shared_weights(cache_of, frozen, monkeypatch):
    cache, before = cache_of(10**9), settled()[1]
    cache.register("a", random_state(osft(), frozen), MAX_RANK)

    def no_room(*_: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(paging, "restored_adapter", no_room)
        with pytest.raises(MemoryError):
            cache.get(["a"])
    assert live()[1] == before
    cache.get(["a"])
    assert live()[1] - before == SHARED + on_device(osft())


def test_a_model_that_differs_in_one_number_has_its_own_directions(tmp_path, frozen):
    again = DeviceSvd(tmp_path / "directions", layers_of(model_of()), SHAPES, MAX_RANK)
    again.decomposition.require()  # computes nothing
    other = model_of()
    weight = np.array(other.layers["down_proj"][...])
    weight[-1, 5, 7] = np.nextafter(weight[-1, 5, 7], np.float32(9))
    other.layers["down_proj"][...] = jnp.asarray(weight)
    merged = DeviceSvd(tmp_path / "directions", layers_of(other), SHAPES, MAX_RANK)
    with pytest.raises(ServerError, match="not there yet"):
        merged.decomposition.require()
    merged.decomposition.prepare()
    assert merged.decomposition.id != frozen.decomposition.id == again.decomposition.id
    assert len(list((tmp_path / "directions").iterdir())) == 2
