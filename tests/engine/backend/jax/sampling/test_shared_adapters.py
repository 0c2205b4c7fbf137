"""Decode slots that share adapter slots, as on a GPU, by kernels that JAX interprets."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from tests.engine.backend.jax.sampling.test_decode_batch import after, to_the_end
from tests.engine.backend.jax.sampling.test_programs import scanning, state
from tests.engine.backend.jax.sampling.test_sampler import (
    Letters,
    _plain,
    assert_same_bits,
    request,
)
from tests.support.decoders import random_decoder
from tuneserve_engine.backend.base import SamplingRequest
from tuneserve_engine.backend.jax.model import block
from tuneserve_engine.backend.jax.model.block import BEFORE
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.sampling import adapter_slots
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
    model.block, model.chunk_blocks = SHAPES.block, 2
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
        patches.enter_context(mock.patch.object(adapter_slots, "_MOST_ADAPTERS", ADAPTER_SLOTS))
        yield new_sampler()


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
    with mock.patch.object(block, "add_deltas", wraps=block.add_deltas) as kernels:
        together = sampler.sample(COMPANY)
    groups = [call.args[2] for call in kernels.call_args_list]
    assert groups == [BEFORE, ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",), ("unembed",)]
    for one, got in zip(COMPANY, together, strict=True):
        assert_same_bits(got, sampler.sample([one])[0])


def test_the_samples_are_those_of_slots_that_share_nothing(sampler: JaxSampler) -> None:
    clean = [one for one in COMPANY if one.snapshot_id != NAN]
    got = sampler.sample(clean)
    with (
        mock.patch.object(adapter_slots, "scans_layers", lambda: False),
        mock.patch("tuneserve_engine.backend.jax.sampling.programs.scans_layers", lambda: False),
        mock.patch(
            "tuneserve_engine.backend.jax.sampling.decode_batch.scans_layers", lambda: False
        ),
    ):
        want = new_sampler().sample(clean)
    for one, other in zip(got, want, strict=True):
        mine, its = (jax.tree.leaves(_plain(each)) for each in (one, other))
        for x, y in zip(mine, its, strict=True):
            if isinstance(x, str):
                assert x == y
            else:  # ids are equal, and logprobs close
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def long(snapshot_id: str, **options: Any) -> SamplingRequest:
    return request(5, snapshot_id=snapshot_id, max_tokens=40, stop_tokens=frozenset(), **options)


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


def test_owners_of_one_adapter_each_keep_it_and_a_newcomer_is_next(sampler: JaxSampler) -> None:
    """No other sequence starts in between: otherwise the newcomer could wait forever."""
    sampler._forget_all()
    asked = {"one": long("a", owner="x"), "two": long("b", owner="y")}
    sampler.sample_until(asked, after(1))
    asked |= {"three": long("c", owner="z"), "four": long("a", owner="x", seed=2)}
    sampler.sample_until(asked, after(1))
    assert decoding(sampler) == {("x", "a"): 1, ("y", "b"): 1}
    ended: list[str] = []
    while "three" not in ended:
        given = sampler.sample_until(asked, after(1))
        ended += given.finished
        asked = {name: asked[name] for name in given.remaining}
    assert ended[:2] in (["one", "two"], ["two", "one"])
