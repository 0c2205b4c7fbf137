"""Training passes whose adapters are computed by the kernels for GPUs, interpreted.

They are compared with a reference in float64, and with the passes of other devices.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.backend.jax.training import packed_case
from tests.engine.backend.jax.training.lm_head_case import (
    EPS,
    Request,
    Sizes,
    adapters_of,
    head_of,
    micro_of,
    stale_gradient_slots,
)
from tests.engine.backend.jax.training.packed_case import TINY, adapter_of, gradient, model_of
from tests.engine.conftest import Row
from tests.support.compiled import UNOPTIMISED
from tests.support.nightly import at_night
from tuneserve_engine.backend.base import MicroBatch
from tuneserve_engine.backend.jax.model import block_lora
from tuneserve_engine.backend.jax.training.lm_head import (
    HeadScored,
    HeadTrained,
    LmHead,
    score_lm_head,
    train_lm_head,
)
from tuneserve_engine.backend.jax.training.programs import (
    DeviceMicroBatch,
    score_micro_batch,
    train_micro_batch,
)

WIDE = replace(TINY, hidden=128, layers=2, heads=4, kv_heads=2, head_dim=64, intermediate=256)
"""Widths in whole tiles. The vocabulary is not, so no kernel computes the head's adapters."""
HEAD = Sizes(block=16, hidden=128, vocabulary=256)
REQUESTS = (
    Request(1, 0, (3, 38, 9), "ppo"),
    Request(2, 1, (20,)),
    Request(3, 2, (11, 2, 30), "gspo"),
)
"""Eight blocks. Slot 1's adapter does not train the head, and is NaN there."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Use the kernels, even for blocks that Triton would not take. Returns their calls."""
    seen: list[str] = []
    contract = block_lora._contract

    def noted(*given: Any, **options: Any) -> Any:
        seen.append("contract")
        return contract(*given, **options)

    monkeypatch.setattr(block_lora, "_is_gpu", lambda: True)
    monkeypatch.setattr(block_lora, "_LEAST_SIZE", 8)
    monkeypatch.setattr(block_lora, "_contract", noted)
    # A function of its own: JAX would not trace the same one again.
    jit = partial(jax.jit, compiler_options=UNOPTIMISED)
    train = jit(lambda *given: train_micro_batch(*given), donate_argnums=(1, 2))
    monkeypatch.setattr(packed_case, "train", train)
    monkeypatch.setattr(packed_case, "score", jit(lambda *given: score_micro_batch(*given)))
    return seen


@pytest.mark.parametrize("remat", ["dots", at_night("full")])
def test_a_micro_batch_of_tenants_gives_the_results_of_each_datum_alone(
    remat: str,
    calls: list[str],
    datum: Callable[..., Row],
    micro_batch_of: Callable[..., MicroBatch],
) -> None:
    """In float64 by torch, to 1e-5 of the largest number, as without the kernels.

    Scoring gives the bits of training.
    """
    requests = {0: [datum(1, 21), datum(2, 5)], 1: [datum(4, 37)], 2: [datum(5, 3)]}
    adapters = {slot: adapter_of(seed, WIDE) for slot, seed in enumerate((4, 5, 4))}
    mixed = micro_batch_of(*((slot, *rows) for slot, rows in requests.items()))
    model = model_of(WIDE, remat)
    ran = packed_case.run(model, adapters, mixed)
    assert calls
    calls.clear()
    device_batch = DeviceMicroBatch.from_host(mixed, model.block)
    model.eval()
    scored = packed_case.score(model, packed_case.adapter_slots_of(adapters, WIDE), device_batch)
    assert calls
    logprobs = np.asarray(scored.logprobs).reshape(ran.outs[0].logprobs.shape)
    real = mixed.segment_ids >= 0
    np.testing.assert_array_equal(logprobs[real], ran.outs[0].logprobs[real])
    for slot, rows in requests.items():
        expected, _, wanted = packed_case.reference(model, adapters[slot], rows)
        mine = np.repeat(mixed.block_request == slot, model.block) & (mixed.segment_ids >= 0)
        found = gradient(ran.gradient_slots, slot, adapters[slot])
        found["logprobs"] = ran.outs[0].logprobs[mine, 0]
        for name, want in {"logprobs": np.concatenate(expected), **wanted}.items():
            error = np.abs(found[name] - want).max()
            assert error <= 1e-5 * np.abs(want).max(), f"slot {slot}: {name}"


def test_a_request_has_the_same_bits_alone_and_in_company(
    calls: list[str], datum: Callable[..., Row], micro_batch_of: Callable[..., MicroBatch]
) -> None:
    """Its neighbour's adapter is NaN in company, and its blocks lie in other chunks."""
    mine, model = [datum(1, 37), datum(2, 5)], model_of(WIDE, "full")
    company = micro_batch_of((1, datum(3, 5)), (0, *mine))
    alone = micro_batch_of((0, *mine))
    adapters = {0: adapter_of(4, WIDE), 1: adapter_of(5, WIDE, poison=np.nan)}
    found = []
    for batch in (company, alone):
        ran = packed_case.run(model, adapters, batch)
        places = np.repeat(batch.block_request == 0, model.block) & (batch.segment_ids >= 0)
        results = gradient(ran.gradient_slots, 0, adapters[0])
        found.append({**results, "logprobs": ran.outs[0].logprobs[places]})
    assert calls
    for name, want in found[1].items():
        assert np.isfinite(want).all()
        np.testing.assert_array_equal(found[0][name], want, err_msg=name)


def head(chunk: int = 4, dtype: Any = jnp.float32) -> tuple[HeadTrained, HeadScored]:
    """Train and score the requests' blocks in chunks of ``chunk`` blocks.

    The second of slot 0's four blocks has no gradient.
    """
    x, targets, inputs, blocks, used = micro_of(REQUESTS, HEAD, n=12)
    inputs.weights[1], inputs.advantages[1] = 0, 0
    table = LmHead(*(each.astype(dtype) for each in head_of(HEAD)))
    same = table, jnp.asarray(x, dtype), targets, inputs, adapters_of(HEAD), blocks, used
    options = {"eps": EPS, "chunk_blocks": chunk}
    jit = partial(jax.jit, compiler_options=UNOPTIMISED | {"xla_allow_excess_precision": False})
    trained = jit(partial(train_lm_head, **options))(*same, stale_gradient_slots(HEAD))
    return trained, jit(partial(score_lm_head, **options))(*same)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_head_gives_the_results_of_other_devices(dtype: Any, calls: list[str]) -> None:
    """To 1e-6 of the largest number; adapters that do not train the head are never read.

    With a base model in bfloat16, to 2e-6, since three parts of a number have its last bits but
    not those of every product. The gradient by hidden states is rounded to their dtype.
    """
    got, least = head(dtype=dtype), 2e-6 if dtype == jnp.bfloat16 else 1e-6
    assert calls
    with pytest.MonkeyPatch.context() as without:
        without.setattr(block_lora, "_is_gpu", lambda: False)
        want = head(dtype=dtype)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        part = 2.0**-7 if one.dtype == jnp.bfloat16 else least
        one, other = (np.asarray(each, np.float32) for each in (one, other))
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
        np.testing.assert_allclose(one, other, rtol=0, atol=part * np.nanmax(np.abs(other)))


def test_the_head_has_the_same_bits_in_any_chunks(calls: list[str]) -> None:
    """Gradients of adapters of the head, which are added from chunk to chunk."""
    for one, other in zip(*(jax.tree.leaves(head(chunk)) for chunk in (4, 12)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert calls
