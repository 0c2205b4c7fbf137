"""Training on micro-batches equals a dense float64 reference, and neighbours change no bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.backend.jax.training import packed_case
from tests.engine.backend.jax.training.conftest import BatchOf, Datum
from tests.engine.backend.jax.training.packed_case import (
    ADAPTERS,
    REMATS,
    SHAPES,
    TINY,
    Ran,
    adapter_of,
    adapter_slots_of,
    flat,
    gradient,
    model_of,
    reference,
    run,
    score,
    tokens_of,
)
from tests.engine.conftest import Row
from tests.paged_rows import PagedRows
from tests.support.nightly import at_night
from tuneserve_engine.backend.base import MicroBatch
from tuneserve_engine.backend.jax.adapters.arrays import TrainingAdapter
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.model.lora import LoraRows
from tuneserve_engine.backend.jax.programs.registry import compiler_options
from tuneserve_engine.backend.jax.training.programs import (
    DeviceMicroBatch,
    score_micro_batch,
    train_micro_batch,
)
from tuneserve_engine.core.adapter import UNEMBED

model = cache(model_of)
IS_ROUNDED = jax.__version_info__ >= (0, 12)
"""Whether ``remat`` changes how XLA fuses, and so rounds, the forward pass: docs/numerics.md."""


def bits(
    ran: Ran, micro_batches: list[MicroBatch], slot: int, adapter: TrainingAdapter
) -> dict[str, bytes]:
    """All results of one request: logprobs, losses and gradient."""
    found = {name: x.tobytes() for name, x in gradient(ran.gradient_slots, slot, adapter).items()}
    for field in ("logprobs", "loss"):
        parts = [
            getattr(out, field)[tokens_of(micro_batch, slot)]
            for out, micro_batch in zip(ran.outs, micro_batches, strict=True)
        ]
        assert np.isfinite(np.concatenate(parts)).all()
        found[field] = np.concatenate(parts).tobytes()
    return found


def assert_close(got: np.ndarray, want: np.ndarray, name: str, part: float = 1e-5) -> None:
    """Compare up to this fraction of the largest number."""
    np.testing.assert_allclose(got, want, rtol=0, atol=part * np.abs(want).max(), err_msg=name)


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.acceptance("C1")
@pytest.mark.parametrize("remat", ["dots", "full", *map(at_night, ("attention", "none"))])
def test_a_micro_batch_of_tenants_gives_the_results_of_each_datum_alone(
    remat: str, ran: Callable[[str], Ran], mixed: MicroBatch, requests: dict[int, list[Row]]
) -> None:
    got = ran(remat)
    for slot, rows in requests.items():
        logprobs, losses, wanted = reference(model(TINY, remat), ADAPTERS[slot], rows)
        places = tokens_of(mixed, slot)
        assert_close(got.outs[0].logprobs[places, 0], np.concatenate(logprobs), "logprobs")
        assert_close(got.outs[0].loss[places], np.concatenate(losses), "loss")
        found = gradient(got.gradient_slots, slot, ADAPTERS[slot])
        assert found.keys() == wanted.keys()
        for name, want in wanted.items():
            assert np.abs(want).max() > 1e-3, name
            assert_close(found[name], want, f"slot {slot}: {name}")


@pytest.mark.parametrize("remat", ["dots", *map(at_night, ("full", "attention", "none"))])
def test_a_micro_batch_of_one_chunk_gives_the_same_results(
    remat: str, ran: Callable[[str], Ran], mixed: MicroBatch
) -> None:
    """Its products are longer, so that their roundings are others."""
    whole = model_of(TINY, remat)
    whole.chunk_blocks = SHAPES.micro_batch_tokens // SHAPES.block
    whole.is_one_chunk = True
    got, want = run(whole, ADAPTERS, mixed), ran(remat)
    for slot, adapter in ADAPTERS.items():
        places = tokens_of(mixed, slot)
        for field in ("logprobs", "loss"):
            found, wanted = (getattr(each.outs[0], field)[places] for each in (got, want))
            assert_close(found, wanted, field)
        wanted = gradient(want.gradient_slots, slot, adapter)
        for name, found in gradient(got.gradient_slots, slot, adapter).items():
            assert_close(found, wanted[name], f"slot {slot}: {name}")


@pytest.mark.acceptance("W3")
@pytest.mark.parametrize("remat", ["full", at_night("attention")])
def test_recomputed_values_have_the_same_bits(
    remat: str, ran: Callable[[str], Ran], mixed: MicroBatch
) -> None:
    """With JAX 0.12, they can differ in their last bits: docs/numerics.md."""
    for slot, adapter in ADAPTERS.items():
        want = bits(ran("none"), [mixed], slot, adapter)
        got = bits(ran(remat), [mixed], slot, adapter)
        if not IS_ROUNDED:
            assert got == want
            continue
        assert got.keys() == want.keys()
        for name, wanted in want.items():
            numbers = (np.frombuffer(each, np.float32) for each in (got[name], wanted))
            assert_close(*numbers, name)


def test_storing_products_gives_the_same_logprobs_and_other_roundings_of_gradients(
    ran: Callable[[str], Ran], mixed: MicroBatch
) -> None:
    """XLA fuses the operations between the products differently, with JAX 0.12 in either pass."""
    kept, everything = ran("dots"), ran("none")
    for slot, adapter in ADAPTERS.items():
        places = tokens_of(mixed, slot)
        for got, want in zip(kept.outs[0], everything.outs[0], strict=True):
            if IS_ROUNDED:
                assert_close(got[places], want[places], "result")
            else:
                np.testing.assert_array_equal(got[places], want[places])
        wanted = gradient(everything.gradient_slots, slot, adapter)
        for name, found in gradient(kept.gradient_slots, slot, adapter).items():
            assert_close(found, wanted[name], name, 1e-5 if IS_ROUNDED else 1e-6)


@pytest.mark.acceptance("C1")
def test_a_model_of_one_layer_trains(
    micro_batch_of: BatchOf, requests: dict[int, list[Row]]
) -> None:
    config = replace(TINY, layers=1)
    decoder, adapter = model(config), adapter_of(4, config)
    micro_batch = micro_batch_of((0, *requests[0]))
    got = run(decoder, {0: adapter}, micro_batch)
    logprobs, _, wanted = reference(decoder, adapter, requests[0])
    assert_close(
        got.outs[0].logprobs[tokens_of(micro_batch, 0), 0], np.concatenate(logprobs), "logprobs"
    )
    for name, found in gradient(got.gradient_slots, 0, adapter).items():
        assert_close(found, wanted[name], name)


def evaluating() -> Decoder:
    decoder = model_of()
    decoder.eval()
    return decoder


@pytest.mark.acceptance("C1")
def test_scoring_gives_the_logprobs_and_losses_of_training(
    ran: Callable[[str], Ran], mixed: MicroBatch
) -> None:
    scored = flat(
        score(
            evaluating(),
            adapter_slots_of(ADAPTERS),
            DeviceMicroBatch.from_host(mixed, SHAPES.block),
        )
    )
    trained = ran("dots").outs[0]
    for slot in ADAPTERS:
        places = tokens_of(mixed, slot)
        for got, want in zip(scored, trained, strict=True):
            assert_close(got[places], want[places], f"slot {slot}")


@pytest.mark.acceptance("C1")
def test_prefill_and_decode_give_the_logprobs_of_training(
    ran: Callable[[str], Ran], mixed: MicroBatch, requests: dict[int, list[Row]]
) -> None:
    (row,), places, before = requests[1], tokens_of(mixed, 1), 11
    decoder, adapter_slots = evaluating(), adapter_slots_of(ADAPTERS)
    lora = LoraRows(
        {name: x[0] if name == UNEMBED else x for name, x in adapter_slots.a.items()},
        {name: x[0] if name == UNEMBED else x for name, x in adapter_slots.b.items()},
        adapter_slots.scale,
        jnp.asarray([1], jnp.int32),
    )
    tokens = jnp.asarray([row.tokens], jnp.int32)

    def target_logprobs(hidden: Any, targets: Any) -> np.ndarray:
        logits = decoder.logits(hidden, lora)
        found = jax.nn.log_softmax(logits, axis=-1)
        return np.asarray(found)[0, np.arange(len(targets)), targets]

    want = ran("dots").outs[0].logprobs[places, 0]
    whole = jax.jit(lambda model: model(tokens, lora))(decoder)
    assert_close(target_logprobs(whole, row.targets), want, "at once")
    paged = PagedRows(decoder, 1, 40, lora)
    read = paged.read(np.asarray(tokens)[:, :before])
    found = [target_logprobs(read, row.targets[:before])]
    for at in range(before, len(row.tokens)):
        hidden = paged.write(np.asarray(tokens)[:, at], np.array([at]))
        found.append(target_logprobs(hidden[:, None], row.targets[at : at + 1]))
    assert_close(np.concatenate(found), want, "token by token")


# --- bits -----------------------------------------------------------------------------------------


@pytest.mark.acceptance("W4")
def test_neighbours_place_and_slot_change_no_bit_of_a_request(
    micro_batch_of: BatchOf, datum: Datum, requests: dict[int, list[Row]]
) -> None:
    rows, mine, other = requests[0], ADAPTERS[0], ADAPTERS[1]
    lone = micro_batch_of((0, *rows))
    want = bits(run(model(), {0: mine}, lone), [lone], 0, mine)
    behind = micro_batch_of((1, datum(7, 9)), (0, *rows), (3, datum(8, 2)))
    further = micro_batch_of((1, datum(8, 24)), (3, datum(7, 30)), (0, *rows))
    for micro_batch in (behind, further):
        got = run(model(), {0: mine, 1: other, 3: other}, micro_batch)
        assert bits(got, [micro_batch], 0, mine) == want
    slot = micro_batch_of((0, datum(7, 9)), (3, *rows))
    assert bits(run(model(), {0: other, 3: mine}, slot), [slot], 3, mine) == want


@pytest.mark.parametrize("remat", ["dots", *map(at_night, ("full", "attention", "none"))])
@pytest.mark.parametrize("dtype", ["bfloat16", at_night("float32")])
def test_a_micro_batch_of_one_chunk_has_the_bits_of_a_longer_one(
    dtype: str,
    remat: str,
    micro_batch_of: BatchOf,
    datum: Datum,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The longer one loops over its chunks, the other one does not. Roundings are a worker's."""
    jit = partial(jax.jit, compiler_options=compiler_options())
    monkeypatch.setattr(packed_case, "train", jit(train_micro_batch, donate_argnums=(1, 2)))
    short = replace(SHAPES, context_length=16, requested_tokens=16)
    adapters = {0: ADAPTERS[0], 1: ADAPTERS[1]}
    found = []
    for static_shapes in (SHAPES, short):
        bins = (1, datum(7, 5)), (0, datum(1, 4), datum(2, 3))
        micro_batch = micro_batch_of(*bins, static_shapes=static_shapes)
        decoder = model_of(TINY, remat, dtype)
        decoder.is_one_chunk = static_shapes.is_one_chunk
        done = run(decoder, adapters, micro_batch)
        decoder.eval()
        on_device = DeviceMicroBatch.from_host(micro_batch, SHAPES.block)
        scored = flat(jit(score_micro_batch)(decoder, adapter_slots_of(adapters), on_device))
        found.append(
            {
                slot: bits(done, [micro_batch], slot, adapter)
                | {"scored": scored.logprobs[tokens_of(micro_batch, slot)].tobytes()}
                for slot, adapter in adapters.items()
            }
        )
    assert short.is_one_chunk and not SHAPES.is_one_chunk
    assert found[0] == found[1]


def test_the_gradient_of_a_request_is_the_sum_of_its_bins_gradients_in_any_company(
    micro_batch_of: BatchOf, datum: Datum, requests: dict[int, list[Row]]
) -> None:
    """Added in float32 by NumPy."""
    first, second, third = requests[0]
    mine, other = ADAPTERS[0], ADAPTERS[1]
    alone = [micro_batch_of((0, first, second)), micro_batch_of((0, third))]
    parts = [gradient(run(model(), {0: mine}, each).gradient_slots, 0, mine) for each in alone]
    done = run(model(), {0: mine}, *alone)
    for name, got in gradient(done.gradient_slots, 0, mine).items():
        np.testing.assert_array_equal(got, parts[0][name] + parts[1][name], name)
    apart = [
        micro_batch_of((1, datum(7, 41)), (0, first, second)),
        micro_batch_of((0, third), (1, datum(8, 9))),
    ]
    got = bits(run(model(), {0: mine, 1: other}, *apart), apart, 0, mine)
    assert got == bits(done, alone, 0, mine)


def test_a_neighbour_of_nan_changes_no_bit(ran: Callable[[str], Ran], mixed: MicroBatch) -> None:
    poisoned = ADAPTERS | {1: adapter_of(5, unembed=False, poison=np.nan)}
    got = run(model(), poisoned, mixed)
    assert np.isnan(got.outs[0].logprobs[tokens_of(mixed, 1)]).all()
    for slot in (0, 2):
        want = bits(ran("dots"), [mixed], slot, ADAPTERS[slot])
        assert bits(got, [mixed], slot, ADAPTERS[slot]) == want


@pytest.mark.acceptance("S5")
@pytest.mark.parametrize("remat", REMATS)
def test_the_buffers_of_earlier_batches_change_no_bit(
    remat: str, ran: Callable[[str], Ran], micro_batch_of: BatchOf, datum: Datum, mixed: MicroBatch
) -> None:
    """The buffers of ``ran`` started with NaN everywhere."""
    clean = run(model(TINY, remat), ADAPTERS, mixed, stale=0.0)
    longer = micro_batch_of((2, datum(20, 40)), (0, datum(21, 50)), (1, datum(22, 30)))
    batch = run(model(TINY, remat), ADAPTERS, longer)
    second = run(model(TINY, remat), ADAPTERS, mixed, after=batch)
    for slot, adapter in ADAPTERS.items():
        want = bits(ran(remat), [mixed], slot, adapter)
        assert bits(clean, [mixed], slot, adapter) == want
        assert bits(second, [mixed], slot, adapter) == want


def test_only_slots_in_use_get_a_gradient(ran: Callable[[str], Ran]) -> None:
    for side in ran("dots").gradient_slots:
        for name, buffer in side.items():
            assert np.isnan(buffer[:, 3]).all(), name
