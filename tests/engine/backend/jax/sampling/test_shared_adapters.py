"""Decode slots that share adapter slots, as on a GPU, by kernels that JAX interprets."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.engine.backend.jax.sampling.test_decode_batch import after, to_the_end
from tests.engine.backend.jax.sampling.test_programs import assert_close, scanning, state
from tests.engine.backend.jax.sampling.test_sampler import (
    Letters,
    assert_same_bits,
    request,
)
from tests.support.decoders import random_decoder
from tuneserve_engine.backend.base import SamplingRequest
from tuneserve_engine.backend.jax.attention.paged import Pages
from tuneserve_engine.backend.jax.model import block
from tuneserve_engine.backend.jax.model.block import AFTER, BEFORE
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.sampling import adapter_slot_table, programs
from tuneserve_engine.backend.jax.sampling.sampler import JaxSampler
from tuneserve_engine.core.shapes import StaticShapes

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SLOTS, ADAPTER_SLOTS = 4, 2
CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=128,
    hidden=128,
    layers=2,
    heads=1,
    kv_heads=1,
    head_dim=128,
    intermediate=128,
    context_length=64,
    qk_norm=True,
)
"""The kernels take multiples of 128."""
SHAPES = StaticShapes(CONFIG.context_length, block=8, chunk=16, rank_buckets=(2,))
NAN = "full of NaN"


def new_sampler() -> JaxSampler:
    model = random_decoder(CONFIG, std=0.24)
    model.use_shapes(SHAPES)
    sampler = JaxSampler(
        ProgramRegistry(), model, SHAPES, Letters(), slots=SLOTS, snapshot_bytes=2**30
    )
    for seed, name in enumerate("abcd"):
        sampler.load_snapshot(name, state(CONFIG, seed))
    broken = state(CONFIG, 9)
    for tensor in broken.weights.values():
        tensor[:] = np.nan
    sampler.load_snapshot(NAN, broken)
    return sampler


@pytest.fixture(scope="module")
def sampler() -> Iterator[JaxSampler]:
    with ExitStack() as patches:
        patches.enter_context(scanning())
        patches.enter_context(
            mock.patch.object(adapter_slot_table, "_MOST_ADAPTERS", ADAPTER_SLOTS)
        )
        kernels = mock.patch.object(block, "add_deltas", wraps=block.add_deltas)
        calls = patches.enter_context(kernels).call_args_list
        yield new_sampler()
    groups = [call.args[2] for call in calls]  # of the only time that decoding was traced
    assert groups == [*BEFORE, *AFTER, ("unembed",)]


COMPANY = (
    request(5, snapshot_id="a", num_samples=3, max_tokens=9),
    request(7, snapshot_id="b", seed=2, temperature=0.7, prompt_logprobs=True, owner="y"),
    request(5, snapshot_id="a", seed=3, max_tokens=6, owner="y"),
    request(6, snapshot_id=NAN, seed=4, max_tokens=7, num_samples=2, owner="z"),
    request(3, seed=5, max_tokens=5, owner="z"),
    request(9, snapshot_id="c", seed=6, max_tokens=7),
    request(4, snapshot_id="d", seed=7, max_tokens=11, num_samples=2, topk_sample=2),
)


def test_neighbours_change_no_bit_of_a_request(sampler: JaxSampler) -> None:
    together = sampler.sample(COMPANY)
    for one, got in zip(COMPANY, together, strict=True):
        assert_same_bits(got, sampler.sample([one])[0])


def test_the_samples_are_those_of_slots_that_share_nothing(sampler: JaxSampler) -> None:
    clean = [one for one in COMPANY if one.snapshot_id != NAN]
    got = sampler.sample(clean)
    with scanning(scans=False):
        want = new_sampler().sample(clean)
    assert_close(got, want)


def long(snapshot_id: str, **options: Any) -> SamplingRequest:
    return request(5, snapshot_id=snapshot_id, max_tokens=40, **options)


def decoding(sampler: JaxSampler) -> Counter[tuple[str, str]]:
    """Count the sequences that have a decode slot by owner and snapshot."""
    (batch,) = sampler._decode_batches.values()
    return Counter((each.request.owner, each.snapshot.name) for each in batch.sequences)


def test_an_adapter_too_many_makes_only_its_owner_wait(sampler: JaxSampler) -> None:
    sampler._forget_all()
    asked = {"one": long("a", owner="x"), "two": long("b", owner="y")}
    sampler.sample_until(asked, after(1))
    asked |= {"three": long("c", owner="x"), "four": long("b", owner="y", seed=2)}
    sampler.sample_until(asked, after(1))
    assert decoding(sampler) == {("x", "a"): 1, ("y", "b"): 2}
    assert to_the_end(sampler, asked).keys() == asked.keys()


def test_an_owner_without_a_slot_gets_one_from_the_owner_of_several_adapters(
    sampler: JaxSampler,
) -> None:
    """The adapter with the least work done makes room, and its sample starts again."""
    sampler._forget_all()
    (want,) = sampler.sample([long("b", owner="x")])
    asked = {"one": long("a", owner="x")}
    sampler.sample_until(asked, after(2))
    asked |= {"two": long("b", owner="x")}
    sampler.sample_until(asked, after(2))
    assert decoding(sampler) == {("x", "a"): 1, ("x", "b"): 1}
    asked |= {"three": long("c", owner="y")}
    sampler.sample_until(asked, after(1))
    assert decoding(sampler) == {("x", "a"): 1, ("y", "c"): 1}
    ended = to_the_end(sampler, asked)
    assert_same_bits(ended["two"], want)


def test_the_oldest_adapter_ends_for_a_newcomer_and_the_others_fill_the_slots(
    sampler: JaxSampler,
) -> None:
    """Otherwise new sequences of the oldest could keep the newcomer out forever."""
    sampler._forget_all()
    asked = {"one": long("a", owner="x"), "two": long("b", owner="y")}
    sampler.sample_until(asked, after(1))
    asked |= {
        "three": long("c", owner="z"),
        "four": long("a", owner="x", seed=2),
        "five": long("b", owner="y", seed=2, num_samples=3),
    }
    sampler.sample_until(asked, after(1))
    assert decoding(sampler) == {("x", "a"): 1, ("y", "b"): 3}
    order: list[str] = []
    while asked:
        given = sampler.sample_until(asked, after(1))
        held = decoding(sampler)
        assert "three" not in given.remaining or held["x", "a"] <= 1
        order += given.finished
        asked = {name: asked[name] for name in given.remaining}
    assert order.index("one") < order.index("three") < order.index("four")


def test_a_newcomer_to_full_slots_without_an_adapter_slot_costs_no_work(
    sampler: JaxSampler,
) -> None:
    """A decode slot would be of no use to it."""
    sampler._forget_all()
    asked = {
        "one": long("a", owner="x", num_samples=2),
        "two": long("b", owner="y", num_samples=2),
    }
    sampler.sample_until(asked, after(1))
    asked |= {"three": long("c", owner="z")}
    sampler.sample_until(asked, after(1))
    assert decoding(sampler) == {("x", "a"): 2, ("y", "b"): 2}
    assert all(not run.lost for run in sampler._running.values())
    assert to_the_end(sampler, asked).keys() == asked.keys()


def test_an_idle_slot_reads_no_adapter_of_its_own() -> None:
    """Its row joins those of a slot that decodes."""
    model, pages, adapters = (
        mock.Mock(spec=kind) for kind in (Decoder, Pages, programs.DecodeAdapters)
    )
    adapters.of_tokens.side_effect = StopIteration
    state = programs.no_slots(SLOTS, 8, 64, 32)
    state.adapter_slot[:] = 1, 0, 1, 0
    state.positions[2] = 17
    with scanning(), pytest.raises(StopIteration):
        programs._decode(model, pages, (), adapters, state)
    (slot,) = adapters.of_tokens.call_args.args
    assert slot.tolist() == [1, 1, 1, 1]
