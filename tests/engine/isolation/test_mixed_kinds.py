"""Tenants of different adapter kinds share batches, snapshots and samples."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig

LORA = AdapterConfig(rank=8, alpha=32, seed=1)
RSLORA = AdapterConfig(rank=4, alpha=32, seed=2, kind="rslora", train_unembed=False)
STEP = AdamwParams(learning_rate=0.02, weight_decay=0.01, grad_clip_norm=5.0)
fresh_ids = count()


def osft(form: str = "factors", **options: str) -> AdapterConfig:
    options = options or {"unfreeze_ratio": "0.3"}
    options = {"form": form, **options}
    return AdapterConfig(5, 0.0, 0, train_unembed=False, kind="osft", options=options)


KINDS = (LORA, RSLORA, osft(), osft("short_fixed"), osft("core"))


@pytest.fixture
def created(backend: JaxBackend) -> Callable[[AdapterConfig], str]:
    def created(config: AdapterConfig) -> str:
        adapter_id = f"kind-{next(fresh_ids)}"
        backend.create_adapter(adapter_id, config)
        return adapter_id

    return created


@pytest.fixture
def logprobs(
    backend: JaxBackend, micro_batch_of: Any, batch_of: Any, datum: Any
) -> Callable[..., Any]:
    """Logprobs of one datum under each of the adapters, all in one batch."""

    def logprobs(*adapter_ids: str, seed: int = 7) -> list[Any]:
        rows = [(i, datum(seed, 11)) for i in range(len(adapter_ids))]
        micro_batch = micro_batch_of(*rows)
        batch = batch_of(adapter_ids, [micro_batch], forward_only=True)
        (out,) = backend.forward_backward(batch).outputs
        return [out.logprobs[micro_batch.segment_ids == i] for i in range(len(adapter_ids))]

    return logprobs


@pytest.fixture
def train(
    backend: JaxBackend, micro_batch_of: Any, batch_of: Any, datum: Any
) -> Callable[..., None]:
    """Take ``steps`` steps of all adapters. Each batch has one datum of each."""

    def train(adapter_ids: list[str], steps: int = 3) -> None:
        for step in range(steps):
            rows = [(i, datum(100 * i + step, 11)) for i in range(len(adapter_ids))]
            result = backend.forward_backward(batch_of(adapter_ids, [micro_batch_of(*rows)]))
            assert result.finite == (True,) * len(adapter_ids)
            for metrics in backend.optim_steps([(name, STEP) for name in adapter_ids]):
                assert not isinstance(metrics, Exception), metrics
                assert 0 < metrics["grad_norm"] < np.inf

    return train


def assert_same_state(a: AdapterState, b: AdapterState) -> None:
    assert (a.config, a.step) == (b.config, b.step)
    for part in ("weights", "first_moment", "second_moment"):
        mine, theirs = getattr(a, part), getattr(b, part)
        assert mine.keys() == theirs.keys() and mine
        for name, x in mine.items():
            assert x.tobytes() == theirs[name].tobytes(), (part, name)


@pytest.mark.acceptance("O1")
@pytest.mark.parametrize("config", KINDS, ids=str)
def test_a_new_adapter_of_any_kind_has_the_base_models_bits(config, created, logprobs):
    base = created(AdapterConfig(rank=1, alpha=1.0, seed=0))
    new, blank = logprobs(created(config), base)
    assert new.tobytes() == blank.tobytes()


def test_tenants_of_all_kinds_have_the_same_bits_as_alone(created, train, backend):
    together = [created(config) for config in KINDS]
    train(together)
    for index, config in enumerate(KINDS):
        blanks = [created(AdapterConfig(1, 1.0, 0)) for _ in range(index)]
        alone = created(config)
        train([*blanks, alone])
        assert_same_state(
            backend.adapter_state(together[index], optimizer=True),
            backend.adapter_state(alone, optimizer=True),
        )


@pytest.mark.parametrize("config", KINDS, ids=str)
def test_a_saved_adapter_continues_with_the_same_bits(config, created, train, backend):
    name = created(config)
    train([name], 2)
    saved = backend.adapter_state(name, optimizer=True, accumulator=True)
    train([name], 2)
    other = f"kind-{next(fresh_ids)}"
    backend.load_adapter(other, saved)
    train([other], 2)
    assert_same_state(
        backend.adapter_state(name, optimizer=True), backend.adapter_state(other, optimizer=True)
    )


@pytest.mark.acceptance("O12")
@pytest.mark.parametrize("config", KINDS[1:], ids=str)
def test_an_export_is_a_lora_with_the_same_logprobs(config, created, train, backend, logprobs):
    name = created(config)
    train([name])
    exported = backend.exported(backend.adapter_state(name, optimizer=False))
    assert exported.config.kind == "lora"
    assert all(name[-2:] in (".A", ".B") for name in exported.weights)
    lora = f"kind-{next(fresh_ids)}"
    backend.load_adapter(lora, exported)
    live, served = logprobs(name, lora)
    np.testing.assert_array_equal(served, live)
    base = logprobs(created(AdapterConfig(1, 1.0, 0)))[0]
    assert np.abs(live - base).max() > 0.01  # it has learnt something


@pytest.mark.parametrize("config", [osft(), osft("core")], ids=["factors", "core"])
def test_an_export_between_micro_batches_of_evicted_adapters_changes_no_bit(
    config: AdapterConfig,
    created: Any,
    train: Any,
    backend: JaxBackend,
    micro_batch_of: Any,
    batch_of: Any,
    datum: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device has room for one adapter, so each export evicts the batch's."""
    exported, one, other = created(config), created(config), created(config)
    train([exported])
    saved = backend.adapter_state(exported, optimizer=True)
    live = backend.exported_adapter(exported)
    batch = partial(batch_of, micro_batches=[micro_batch_of((0, datum(n, 11))) for n in range(3)])
    backend.forward_backward(batch([one]))
    monkeypatch.setattr(backend._adapters, "_device_limit", 0)
    before, found = backend._adapters.evictions, []
    backend.forward_backward(batch([other]), lambda: found.append(backend.exported(saved)))
    assert len(found) == 2
    assert backend._adapters.evictions >= before + 4
    found.append(backend.exported_adapter(exported))  # which has been evicted, too
    for each in found:
        assert each.config == live.config
        assert all(x.tobytes() == live.weights[name].tobytes() for name, x in each.weights.items())
    sums = [backend.adapter_state(x, optimizer=False, accumulator=True) for x in (one, other)]
    mine, theirs = (each.accumulator for each in sums)
    assert mine and all(x.tobytes() == theirs[name].tobytes() for name, x in mine.items())
    assert not [name for name in backend._adapters.ids if name.startswith("exported")]
