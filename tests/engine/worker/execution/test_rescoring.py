"""Samples carry the trainer's logprobs, bit for bit, if the setting asks for them."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tuneserve_engine.backend.base import OutOfMemory, SampleResult, SamplingRequest
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.errors import ServerError
from tuneserve_engine.worker.execution.device_timer import DeviceTimer
from tuneserve_engine.worker.execution.rescoring import Rescoring

CONFIG = AdapterConfig(rank=5, alpha=32, seed=3)
PROMPT = np.array([7, 1, 30, 2], np.int32)


def drawn(backend: JaxBackend, request: SamplingRequest) -> SampleResult:
    (result,) = backend.sample([request])
    return result


def trained(backend: JaxBackend, micro_batch_of: Any, batch_of: Any, datum: Any, name: str) -> None:
    backend.create_adapter(name, CONFIG)
    for seed in range(3):
        backend.forward_backward(batch_of([name], [micro_batch_of((0, datum(seed, 20)))]))
        backend.optim_steps([(name, AdamwParams(learning_rate=0.05))])
    backend.load_snapshot(name, backend.adapter_state(name, optimizer=False))


def test_rescored_logprobs_equal_those_of_training_on_the_same_text(
    backend: JaxBackend, micro_batch_of: Any, batch_of: Any, datum: Any
) -> None:
    trained(backend, micro_batch_of, batch_of, datum, "policy")
    rescoring = Rescoring(
        backend,
        DeviceTimer(time.monotonic, lambda: 0.0),
        lambda name: backend.adapter_state(name, optimizer=False),
    )
    request = SamplingRequest(PROMPT, "policy", seed=5, num_samples=3, max_tokens=12)
    base = replace(request, snapshot_id=None, temperature=0.0)
    warm = replace(request, temperature=0.7)
    asked = {"policy": request, "base": base, "warm": warm}
    ended = {name: drawn(backend, one) for name, one in asked.items()}
    scored = rescoring.rescore(asked, ended)
    assert scored["warm"] is ended["warm"]
    backend.create_adapter("base model", CONFIG)  # its B is zero
    for name, adapter in (("policy", "policy"), ("base", "base model")):
        result = scored[name]
        assert isinstance(result, SampleResult)
        for before, after in zip(ended[name].sequences, result.sequences, strict=True):
            text = [*PROMPT.tolist(), *before.tokens.tolist()]
            row = replace(datum(0, 1), tokens=text[:-1], targets=text[1:])
            row = replace(row, weights=[1.0] * len(row.tokens))
            batch = batch_of([adapter], [micro_batch_of((0, row))])
            (output,) = backend.forward_backward(batch).outputs  # not forward only: as in training
            want = output.logprobs[len(PROMPT) - 1 : len(text) - 1, 0]
            np.testing.assert_array_equal(after.logprobs, want)
            np.testing.assert_array_equal(after.tokens, before.tokens)
            np.testing.assert_allclose(after.logprobs, before.logprobs, rtol=1e-4, atol=1e-4)
    for name in ("rescoring policy", "rescoring "):
        with pytest.raises(ServerError, match="is not on this device"):
            backend.adapter_state(name, optimizer=False)


def test_a_sample_that_cannot_be_scored_fails_alone(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Returning other logprobs than the requested ones would be a silent error."""
    request = SamplingRequest(PROMPT, None, seed=5, num_samples=1, max_tokens=3)
    ended = {name: drawn(backend, request) for name in ("one", "other")}
    calls = iter([OutOfMemory("no room")])

    run_batch = backend.forward_backward

    def run(batch: Any) -> Any:
        for error in calls:
            raise error
        return run_batch(batch)

    def read(name: str) -> Any:
        raise AssertionError(name)

    monkeypatch.setattr(backend, "forward_backward", run)
    rescoring = Rescoring(backend, DeviceTimer(time.monotonic, lambda: 0.0), read)
    scored = rescoring.rescore(dict.fromkeys(ended, request), ended)
    assert isinstance(scored["one"], OutOfMemory)
    assert isinstance(scored["other"], SampleResult)
