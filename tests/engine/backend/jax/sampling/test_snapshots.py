"""Snapshots on the host and on the device, and the order in which they are evicted."""

from typing import Any

import jax
import pytest

from tests.engine.backend.jax.sampling.test_sampler import (
    CONFIG,
    LANES,
    RANK_BYTES,
    ROOMY,
    STATIC_SHAPES,
    assert_same_bits,
    model,
    programs,
    request,
    sampler,
    state,
)
from tuneserve_engine.backend.base import OutOfMemory
from tuneserve_engine.backend.jax.adapters.arrays import restored_weights, target_shapes
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.sampling import snapshots as snapshots_module
from tuneserve_engine.backend.jax.sampling.sampler import JaxSampler
from tuneserve_engine.backend.jax.sampling.snapshots import Snapshots
from tuneserve_engine.core.errors import UserError

__all__ = ["model", "programs", "sampler"]

HOST_BYTES = 2 * RANK_BYTES
"""Bytes of a snapshot of rank 2."""


def kept(
    *names: str, device_bytes: int = ROOMY, host_bytes: int = ROOMY, rank: int = 2
) -> Snapshots:
    """Snapshots of these names, of rank 2, with no pins left."""
    found = Snapshots(
        target_shapes(CONFIG), STATIC_SHAPES, device_bytes=device_bytes, host_bytes=host_bytes
    )
    for name in names:
        found.register(name, state(rank=rank, seed=ord(name)))
    found.release_pins()
    return found


def on_host(snapshots: Snapshots) -> str:
    return "".join(snapshots._host)


def on_device(snapshots: Snapshots) -> str:
    return "".join(snapshots._device)


def load(snapshots: Snapshots, name: str) -> None:
    snapshot = snapshots.get(name)
    assert snapshot is not None
    snapshots.on_device(snapshot)


def test_the_least_recently_used_are_evicted_from_the_host() -> None:
    snapshots = kept("a", "b", host_bytes=2 * HOST_BYTES)
    assert snapshots.get("a")
    snapshots.register("c", state(rank=2, seed=1))
    assert on_host(snapshots) == "ac"
    assert snapshots.get("b") is None


def test_pinned_snapshots_stay_in_host_memory() -> None:
    """A call that needs more snapshots than fit has all of them at once."""
    snapshots = kept("a", "b", host_bytes=HOST_BYTES)
    assert on_host(snapshots) == "b"
    for name in "cd":
        snapshots.register(name, state(rank=2, seed=1))
    assert on_host(snapshots) == "cd"
    snapshots.release_pins()
    assert on_host(snapshots) == "d"


def test_the_least_recently_used_are_evicted_from_the_device() -> None:
    snapshots = kept(*"abc", device_bytes=2 * 2 * RANK_BYTES)
    for name in "abac":
        load(snapshots, name)
    assert on_device(snapshots) == "ac"
    assert on_host(snapshots) == "bac"  # snapshots that leave the device stay on the host


def test_a_large_snapshot_evicts_many() -> None:
    """A snapshot larger than the limit still fits, alone."""
    snapshots = kept(*"abcd", device_bytes=(32 + 2 + 2) * RANK_BYTES)
    snapshots.register("e", state(rank=3, seed=1))
    for name in "abcde":
        load(snapshots, name)
    assert on_device(snapshots) == "cde"
    crowded = kept(*"ab", device_bytes=5 * RANK_BYTES)
    crowded.register("c", state(rank=32, seed=1))
    for name in "abc":
        load(crowded, name)
    assert on_device(crowded) == "c"


def test_room_is_made_before_a_snapshot_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = kept(*"abc", device_bytes=2 * 2 * RANK_BYTES)
    seen: list[str] = []

    def restored(*args: Any) -> Any:
        seen.append(on_device(snapshots))
        return restored_weights(*args)

    monkeypatch.setattr(snapshots_module, "restored_weights", restored)
    for name in "abc":
        load(snapshots, name)
    assert seen == ["", "a", "b"]


class Full:
    """A device that has no room the first few times."""

    def __init__(self, real: Any, times: int) -> None:
        self.real, self.times = real, times

    def __call__(self, *args: Any) -> Any:
        self.times -= 1
        if self.times >= 0:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return self.real(*args)


def test_if_the_device_has_less_room_than_planned_old_snapshots_are_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshots = kept(*"abcdef")
    for name in "abcd":
        load(snapshots, name)
    monkeypatch.setattr(snapshots_module, "restored_weights", Full(restored_weights, 2))
    load(snapshots, "e")
    assert on_device(snapshots) == "cde"
    monkeypatch.setattr(snapshots_module, "restored_weights", Full(restored_weights, 9))
    with pytest.raises(OutOfMemory):
        load(snapshots, "f")


def test_a_call_without_room_is_repeated_after_evicting_all_snapshots(
    sampler: JaxSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = request(snapshot_id="rank 2", temperature=0.7)
    (want,) = sampler.sample([mine])
    monkeypatch.setattr(sampler._programs, "decode", Full(sampler._programs.decode, 1))
    (got,) = sampler.sample([mine])
    assert_same_bits(got, want)
    assert on_device(sampler.snapshots) == "rank 2"
    sampler.snapshots.leave_device()
    sampler.sample([mine])  # its decode slot still has the weights
    monkeypatch.setattr(sampler._programs, "decode", Full(sampler._programs.decode, 2))
    with pytest.raises(OutOfMemory):
        sampler.sample([mine])
    assert_same_bits(sampler.sample([mine])[0], want)


def sampler_of(model: Decoder, *, device_bytes: int, host_bytes: int) -> JaxSampler:
    return JaxSampler(
        ProgramRegistry(),
        model,
        STATIC_SHAPES,
        None,
        slots=LANES,
        snapshot_bytes=device_bytes,
        snapshot_host_bytes=host_bytes,
    )


def test_a_request_starts_again_although_its_snapshot_is_nowhere_else(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has room for one snapshot, and the device fails once."""
    small = sampler_of(model, device_bytes=ROOMY, host_bytes=HOST_BYTES)
    asked = {name: request(snapshot_id=name, max_tokens=20) for name in "ab"}
    for name in "ab":
        small.load_snapshot(name, state(rank=2, seed=ord(name)))
    small.sample_until(asked, lambda: True)
    assert on_host(small.snapshots) == "b"
    monkeypatch.setattr(small._programs, "decode", Full(small._programs.decode, 1))
    given = small.sample_until(asked, lambda: False)
    for name, one in asked.items():
        small.load_snapshot(name, state(rank=2, seed=ord(name)))
        got = given.finished[name]
        assert not isinstance(got, Exception)
        assert_same_bits(got, small.sample([one])[0])


def test_more_snapshots_than_fit_are_sampled_in_one_call(model: Decoder) -> None:
    """Ten checkpoints of a model, while device and host have room for one each."""
    names = "abcdefghij"
    small = sampler_of(model, device_bytes=2 * RANK_BYTES, host_bytes=HOST_BYTES)
    roomy = sampler_of(model, device_bytes=ROOMY, host_bytes=ROOMY)
    asked = [request(snapshot_id=name, max_tokens=6, temperature=0.8) for name in names]
    for each in (small, roomy):
        for name in names:
            each.load_snapshot(name, state(rank=2, seed=ord(name)))
    together = small.sample(asked)
    for one, got in zip(asked, together, strict=True):
        assert_same_bits(got, roomy.sample([one])[0])
    assert len({tuple(result.sequences[0].logprobs.tolist()) for result in together}) == 10
    assert on_host(small.snapshots) == "j"


def test_a_snapshot_is_unaffected_by_changes_of_the_host_copy(sampler: JaxSampler) -> None:
    saved = state(rank=2, seed=7)
    sampler.load_snapshot("frozen", saved)
    one = request(snapshot_id="frozen", max_tokens=1, prompt_logprobs=True)
    (before,) = sampler.sample([one])
    for tensor in saved.weights.values():
        tensor += 1.0
    sampler.snapshots.leave_device()
    sampler._forget_all()
    assert_same_bits(sampler.sample([one])[0], before)


def test_a_snapshot_of_another_model_is_refused(sampler: JaxSampler) -> None:
    wrong = state(rank=2, seed=1)
    wrong.weights["q_proj.A"] = wrong.weights["q_proj.A"][:, :-1]
    with pytest.raises(UserError, match=r"q_proj\.A"):
        sampler.load_snapshot("wrong", wrong)
    assert not sampler.has_snapshot("wrong")
