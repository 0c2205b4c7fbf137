"""Results on a random tiny model: neighbours, seeds, decode slots, snapshots and programs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.compiled import memory_of
from tests.support.decoders import random_decoder, zero_decoder
from tests.support.small_tokenizer import small_tokenizer
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import SampleResult, SamplingRequest
from tuneserve_engine.backend.jax.adapters.arrays import TargetShapes, target_shapes
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.sampling import programs as sample_programs
from tuneserve_engine.backend.jax.sampling.decode_batch import DecodeBatch
from tuneserve_engine.backend.jax.sampling.grammars import GrammarCompiler
from tuneserve_engine.backend.jax.sampling.programs import (
    MAX_TOP_TOKENS,
    STEPS_PER_DISPATCH,
    Programs,
)
from tuneserve_engine.backend.jax.sampling.sampler import JaxSampler
from tuneserve_engine.backend.jax.sampling.sequence import DecodedSequence
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import ServerError, UserError
from tuneserve_engine.core.grammar import Grammar
from tuneserve_engine.core.sampling_options import MAX_TOP_K
from tuneserve_engine.core.shapes import StaticShapes

DECODE_SLOTS = 4
CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=67,
    hidden=16,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=24,
    context_length=64,
    qk_norm=True,
)
STATIC_SHAPES = StaticShapes(CONFIG.context_length, block=8, chunk=16, rank_buckets=(2, 32))
"""Sequences of up to eight pages."""
RANK_BYTES = 4 * (16 + 32 + 2 * (16 + 16) + 32 + 16 + 3 * (16 + 24) + 16 + 67)
"""Bytes of a snapshot per rank of its bucket: inputs and outputs of every target."""
ROOMY = 6 * 32 * RANK_BYTES
NAN = "full of NaN"
TENANTS = ("rank 2", "rank 4", "attention only")


class Letters:
    """A tokenizer with one letter per token."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token % 26) for token in ids)

    def id_to_token(self, id: int) -> str:
        return self.decode([id])


@pytest.fixture(scope="module")
def model() -> Decoder:
    decoder = random_decoder(CONFIG, std=0.24)  # 0.02 gives near-uniform logits that hide mistakes
    decoder.use_shapes(STATIC_SHAPES)
    return decoder


@pytest.fixture(scope="module")
def programs() -> ProgramRegistry:
    return ProgramRegistry()


@pytest.fixture(scope="module")
def sampler(programs: ProgramRegistry, model: Decoder) -> JaxSampler:
    sampler = JaxSampler(
        *(programs, model, STATIC_SHAPES, Letters()),
        slots=DECODE_SLOTS,
        snapshot_bytes=ROOMY,
        grammars=GrammarCompiler(small_tokenizer(67).to_str, 67, (66,)),
    )
    programs.compile_ahead(threads=2)
    assert programs.wait(300)
    assert programs.metrics["programs_failed"] == 0
    load_tenants(sampler)
    return sampler


def load_tenants(sampler: JaxSampler) -> None:
    sampler.load_snapshot("rank 2", state(rank=2, seed=1))
    sampler.load_snapshot("rank 4", state(rank=4, seed=2))
    sampler.load_snapshot("attention only", state(rank=1, seed=3, train_mlp=False))
    broken = state(rank=2, seed=4)
    for tensor in broken.weights.values():
        tensor[:] = np.nan
    sampler.load_snapshot(NAN, broken)


def state(*, rank: int, seed: int, train_mlp: bool = True) -> AdapterState:
    config = AdapterConfig(rank=rank, alpha=8.0, seed=seed, train_mlp=train_mlp)
    shapes: TargetShapes = target_shapes(CONFIG)
    rng = np.random.default_rng(seed)
    weights = {}
    for name in config.targets:
        *layers, inputs, outputs = shapes[name]
        for side, shape in (("A", (inputs, rank)), ("B", (rank, outputs))):
            random = rng.normal(scale=0.2, size=(*layers, *shape))
            weights[f"{name}.{side}"] = random.astype(np.float32)
    return AdapterState(config, weights)


def request(
    length: int = 5, *, snapshot_id: str | None = None, seed: int = 1, **options: Any
) -> SamplingRequest:
    prompt = np.random.default_rng(length).integers(0, 67, length).astype(np.int32)
    defaults = {"num_samples": 1, "max_tokens": 10}
    return SamplingRequest(prompt, snapshot_id, seed, **(defaults | options))


def assert_same_bits(got: SampleResult, want: SampleResult) -> None:
    jax.tree.map(np.testing.assert_array_equal, _plain(got), _plain(want))


def _plain(result: SampleResult) -> Any:
    return [
        [
            (s.tokens, s.logprobs, s.stop_reason, vars(s.topk) if s.topk else 0)
            for s in result.sequences
        ],
        result.prompt_logprobs if result.prompt_logprobs is not None else 0,
        vars(result.topk_prompt) if result.topk_prompt else 0,
        result.target_logprobs if result.target_logprobs is not None else 0,
        vars(result.alt_tokens) if result.alt_tokens else 0,
    ]


COMPANY = (
    request(5, seed=1, num_samples=3, max_tokens=9, topk_sample=3),
    request(7, seed=2, snapshot_id="rank 2", temperature=0.7, prompt_logprobs=True),
    request(3, seed=3, snapshot_id="rank 2", top_k=3, max_tokens=2, topk_prompt=2),
    request(5, seed=4, snapshot_id="attention only", top_p=0.5, num_samples=2),
    request(4, seed=5, snapshot_id=NAN, num_samples=2, prompt_logprobs=True),
    request(6, seed=6, snapshot_id="rank 4", temperature=0.0, topk_sample=2),
    request(5, seed=7, snapshot_id="rank 4", num_samples=6, max_tokens=5, alt_tokens=3),
    request(5, seed=8, max_tokens=1, num_samples=5),
    request(17, seed=9, max_tokens=12, num_samples=2),
    request(1, seed=10, stop_tokens=frozenset(range(40)), max_tokens=15, prompt_logprobs=True),
    request(5, seed=11, num_samples=2, max_tokens=20, logit_bias={3: 4.0, 66: -100.0}),
    request(
        4, seed=12, snapshot_id="rank 2", temperature=0.0, frequency_penalty=2.0, max_tokens=24
    ),
    request(3, seed=13, frequency_penalty=-0.5, presence_penalty=1.5, num_samples=3, topk_sample=2),
)


@pytest.fixture(scope="module")
def alone(sampler: JaxSampler) -> list[SampleResult]:
    return [sampler.sample([one])[0] for one in COMPANY]


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(len(COMPANY))), count=st.integers(1, len(COMPANY)))
def test_neighbours_change_no_bit_of_a_request(
    sampler: JaxSampler, alone: list[SampleResult], order: list[int], count: int
) -> None:
    chosen = order[:count]
    results = sampler.sample([COMPANY[i] for i in chosen])
    for index, result in zip(chosen, results, strict=True):
        assert_same_bits(result, alone[index])


def test_dropped_requests_free_their_pages_in_the_order_in_which_they_came(
    sampler: JaxSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processes of one worker must have their pages in the same order.

    The order of a set of names is another one in every process.
    """
    names = [f"request-{number}" for number in range(DECODE_SLOTS)]
    asked = {name: request(5, seed=n, max_tokens=15) for n, name in enumerate(names)}
    sampler.sample_until(asked, lambda: True)
    freed: list[int] = []
    evict = DecodeBatch.evict

    def noted(batch: DecodeBatch, sequence: DecodedSequence) -> None:
        freed.append(sequence.request.seed)
        evict(batch, sequence)

    monkeypatch.setattr(DecodeBatch, "evict", noted)
    sampler.sample_until({}, lambda: True)
    assert freed == list(range(DECODE_SLOTS)) and len(freed) > 3


def test_a_nan_adapter_in_the_same_decode_slots_leaves_nothing_behind(sampler: JaxSampler) -> None:
    """There are more NaN sequences than decode slots, longer than the following ones and their
    padded prompt.

    The following requests reuse their KV pages without overwriting all of them.
    """
    spoilt = request(7, snapshot_id=NAN, num_samples=2 * DECODE_SLOTS, max_tokens=20)
    clean = request(3, snapshot_id="rank 2", seed=5, num_samples=2 * DECODE_SLOTS, max_tokens=15)
    (want,) = sampler.sample([clean])
    result, got = sampler.sample([spoilt, clean])
    assert np.isnan(result.sequences[0].logprobs).all()
    assert all(np.isfinite(sequence.logprobs).all() for sequence in got.sequences)
    assert_same_bits(got, want)


def test_the_same_seed_repeats_and_another_does_not(sampler: JaxSampler) -> None:
    one = request(seed=2**63 + 5, max_tokens=11)
    first, again, other = sampler.sample([one, one, replace(one, seed=5)])
    assert_same_bits(first, again)
    assert first.sequences[0].tokens.tolist() != other.sequences[0].tokens.tolist()


def test_samples_of_one_request_differ(sampler: JaxSampler) -> None:
    (result,) = sampler.sample([request(num_samples=9, temperature=2.0)])
    assert len({tuple(s.tokens.tolist()) for s in result.sequences}) == 9


def test_a_sample_does_not_depend_on_the_number_of_samples(sampler: JaxSampler) -> None:
    few, many = sampler.sample([request(num_samples=2), request(num_samples=9)])
    assert_same_bits(replace(many, sequences=many.sequences[:2]), few)


def test_a_shorter_budget_gives_a_prefix(sampler: JaxSampler) -> None:
    """Both prompts and budgets fit 16 positions."""
    long, short = sampler.sample([request(max_tokens=11), request(max_tokens=6)])
    assert short.sequences[0].stop_reason == "length"
    np.testing.assert_array_equal(short.sequences[0].tokens, long.sequences[0].tokens[:6])
    np.testing.assert_array_equal(short.sequences[0].logprobs, long.sequences[0].logprobs[:6])


@pytest.mark.parametrize("position", [0, 1, 4, 9])
def test_the_stop_token_is_returned_once_at_the_end_with_its_logprob(
    sampler: JaxSampler, position: int
) -> None:
    (free,) = sampler.sample([request(seed=3, temperature=2.0)])
    tokens = free.sequences[0].tokens
    stop = int(tokens[position])
    end = tokens.tolist().index(stop) + 1
    (stopped,) = sampler.sample([request(seed=3, temperature=2.0, stop_tokens=frozenset({stop}))])
    assert stopped.sequences[0].stop_reason == "stop"
    np.testing.assert_array_equal(stopped.sequences[0].tokens, tokens[:end])
    np.testing.assert_array_equal(stopped.sequences[0].logprobs, free.sequences[0].logprobs[:end])


def test_options_beyond_the_range_of_the_device_are_clamped(sampler: JaxSampler) -> None:
    every, unlimited = sampler.sample([request(top_k=2**40), request(top_k=-1)])
    assert_same_bits(every, unlimited)
    (flat,) = sampler.sample([request(temperature=1e300, topk_sample=2, alt_tokens=2)])
    np.testing.assert_allclose(flat.sequences[0].logprobs, -np.log(67), rtol=1e-5)
    (narrow,) = sampler.sample([request(temperature=1e-300, top_p=1e-300)])
    assert len(narrow.sequences[0].tokens) == 10


def test_a_prompt_and_budget_may_fill_the_whole_context(sampler: JaxSampler) -> None:
    full, last = sampler.sample([request(50, max_tokens=14), request(63, max_tokens=1)])
    assert len(full.sequences[0].tokens) == 14
    assert len(last.sequences[0].tokens) == 1


@pytest.mark.parametrize("length", [1, 8, 9, 50, 64, 65])
def test_a_scored_prompt_has_the_logprobs_of_a_sampled_one(
    sampler: JaxSampler, length: int
) -> None:
    """Of 65 tokens the last is only a target: the model prefills 64, its whole context."""
    asked = request(length, max_tokens=0, num_samples=2, prompt_logprobs=True)
    scored, beside = sampler.sample([asked, request(20, max_tokens=5)])
    assert [len(each.tokens) for each in scored.sequences] == [0, 0]
    assert {each.stop_reason for each in scored.sequences} == {"length"}
    assert len(beside.sequences[0].tokens) == 5
    shorter = replace(asked, prompt=asked.prompt[:63], max_tokens=1)
    (want,) = sampler.sample([shorter])
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == length
    np.testing.assert_array_equal(scored.prompt_logprobs[:63], want.prompt_logprobs[:63])
    assert np.isfinite(scored.prompt_logprobs[1:]).all()


@pytest.mark.timeout(120)
def test_a_single_decode_slot_has_room_for_the_longest_sequence(model: Decoder) -> None:
    """The last page of its prompt exists twice: as prefilled, and as a copy to decode into."""
    sampler = JaxSampler(
        ProgramRegistry(), model, STATIC_SHAPES, None, slots=1, snapshot_bytes=ROOMY
    )
    for length in (58, 63, 57):
        (full,) = sampler.sample([request(length, max_tokens=64 - length)])
        assert len(full.sequences[0].tokens) == 64 - length


def test_a_program_that_cannot_be_compiled_fails_its_own_requests_only(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: no such instruction")

    monkeypatch.setattr(sample_programs, "token_logprobs", broken)
    sampler = JaxSampler(
        ProgramRegistry(), model, STATIC_SHAPES, None, slots=DECODE_SLOTS, snapshot_bytes=ROOMY
    )
    for _ in range(2):
        with pytest.raises(ServerError, match=r"cannot run score 2, .*no such instruction"):
            sampler.sample([request(9, prompt_logprobs=True)])
        (result,) = sampler.sample([request(9, max_tokens=2)])
        assert len(result.sequences[0].tokens) == 2


def parts_read(sampler: JaxSampler, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that receives the position of each page of a prompt that is prefilled from now on."""
    parts: list[int] = []
    prefill = sampler._programs.prefill

    def counted(*args: Any) -> Any:
        parts.extend(start for start in args[-1].start if start >= 0)
        return prefill(*args)

    monkeypatch.setattr(sampler._programs, "prefill", counted)
    return parts


def test_many_samples_of_a_prompt_cost_one_prefill(
    sampler: JaxSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many decode slots wait for it, each page of a prompt is prefilled once."""
    parts, before = parts_read(sampler, monkeypatch), replace(sampler.counts)
    sampler.sample([request(45, num_samples=16), request(46, num_samples=3)])
    # 44 and 45 tokens are prefilled before the first is decoded, in blocks of 8.
    assert sorted(parts) == sorted(2 * [0, 8, 16, 24, 32, 40])
    assert sampler.counts.prompt_tokens - before.prompt_tokens == 44 + 45
    assert sampler.counts.prompt_tokens_prefilled - before.prompt_tokens_prefilled == 44 + 45


def test_pages_that_another_request_of_the_same_weights_prefilled_are_reused(
    sampler: JaxSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = request(41, snapshot_id="rank 2")
    turns = np.concatenate([first.prompt, request(7).prompt])
    alone = sampler.sample([replace(first, prompt=turns, snapshot_id="rank 4")])
    sampler.sample([first])
    parts = parts_read(sampler, monkeypatch)
    (again,) = sampler.sample([replace(first, prompt=turns)])
    assert parts == [40], "five whole blocks are cached already"
    assert again.prompt_cache_hit_tokens == 40
    parts.clear()
    (same,) = sampler.sample([replace(first, prompt=turns, snapshot_id="rank 4")])
    assert parts == []
    assert_same_bits(same, alone[0])
    (other,) = sampler.sample([replace(first, prompt=turns, owner="another")])
    assert other.prompt_cache_hit_tokens == 0, "otherwise it would reveal the requests of others"
    assert_same_bits(other, again)


def test_a_decode_slot_is_refilled_before_the_longest_sequence_ends(
    sampler: JaxSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but one slot with long sequences plus many short ones take as long as the long ones
    alone.
    """
    calls = []
    decode = sampler._programs.decode

    def counted(*args: Any) -> Any:
        calls.append(args)
        return decode(*args)

    monkeypatch.setattr(sampler._programs, "decode", counted)
    long = request(3, num_samples=DECODE_SLOTS - 1, max_tokens=13)
    sampler.sample([long])
    alone = len(calls)
    calls.clear()
    before = replace(sampler.counts)
    sampler.sample([long, request(4, num_samples=alone, max_tokens=3)])
    assert len(calls) == alone
    assert sampler.counts.tokens - before.tokens == (DECODE_SLOTS - 1) * 13 + alone * 3
    assert (
        sampler.counts.slot_steps - before.slot_steps == alone * STEPS_PER_DISPATCH * DECODE_SLOTS
    )


@pytest.mark.parametrize("string", [True, False])
def test_a_stop_ends_a_sequence_within_four_steps(
    sampler: JaxSampler, monkeypatch: pytest.MonkeyPatch, string: bool
) -> None:
    (free,) = sampler.sample([request(9, seed=5, max_tokens=40)])
    tokens = free.sequences[0].tokens
    third = int(tokens[2])
    assert third not in tokens[:2]
    text = Letters().decode(tokens[:3].tolist())
    stop: Any = {"stop_strings": (text[1:],)} if string else {"stop_tokens": frozenset({third})}
    before = replace(sampler.counts)
    (stopped,) = sampler.sample([request(9, seed=5, max_tokens=40, **stop)])
    np.testing.assert_array_equal(stopped.sequences[0].tokens, tokens[:3])
    assert stopped.sequences[0].stop_reason == "stop"
    assert sampler.counts.slot_steps - before.slot_steps == STEPS_PER_DISPATCH * DECODE_SLOTS


def test_scores_of_a_prompt_of_one_token_are_empty(sampler: JaxSampler) -> None:
    targets = np.zeros((0, 2), np.int32)
    (result,) = sampler.sample(
        [request(1, prompt_logprobs=True, topk_prompt=3, alt_tokens=2, targets=targets)]
    )
    assert result.prompt_logprobs is not None and np.isnan(result.prompt_logprobs).tolist() == [
        True
    ]
    assert result.topk_prompt is not None and result.topk_prompt.token_ids.shape == (0, 3)
    assert result.alt_tokens is not None and result.alt_tokens.logprobs.shape == (0, 2)
    assert result.target_logprobs is not None and result.target_logprobs.shape == (0, 2)


def test_scores_that_were_not_requested_are_none(sampler: JaxSampler) -> None:
    (result,) = sampler.sample([request()])
    assert result.sequences[0].topk is None
    assert (result.prompt_logprobs, result.topk_prompt) == (None, None)
    assert (result.target_logprobs, result.alt_tokens) == (None, None)


def test_an_empty_call_returns_no_results(sampler: JaxSampler) -> None:
    assert sampler.sample([]) == []


def test_an_unloaded_snapshot_is_named_before_anything_runs(
    sampler: JaxSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler._programs, "prefill", None)
    with pytest.raises(ServerError, match=r"snapshot 'gone' is not loaded.*load it again"):
        sampler.sample([request(), request(snapshot_id="gone")])


@pytest.mark.parametrize("asked", [{"topk_prompt": 65}, {"topk_sample": 65}, {"alt_tokens": 65}])
def test_more_top_tokens_than_programs_compute_are_refused(
    sampler: JaxSampler, asked: dict[str, int]
) -> None:
    with pytest.raises(UserError, match=r"65 .* at most 64"):
        sampler.sample([request(**asked)])


def test_programs_compute_as_many_top_tokens_as_the_wire_allows() -> None:
    assert MAX_TOP_TOKENS == MAX_TOP_K


@st.composite
def any_request(draw: st.DrawFn) -> SamplingRequest:
    """Any request for a context of 64 and a vocabulary of 67, with more samples than slots."""
    length = draw(st.integers(1, 63))
    targets = draw(st.integers(0, 64))
    return request(
        length,
        snapshot_id=draw(st.sampled_from([None, *TENANTS, NAN, "new"])),
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
        num_samples=draw(st.integers(1, DECODE_SLOTS + 2)),
        max_tokens=draw(st.integers(1, 64 - length)),
        temperature=draw(st.sampled_from([0.0, 1e-30, 0.7, 1.0, 1e30])),
        top_k=draw(st.sampled_from([-1, 1, 5, 67, 2**40])),
        top_p=draw(st.sampled_from([1.0, 0.9, 1e-9])),
        logit_bias=draw(st.dictionaries(st.integers(0, 66), st.floats(-100, 100), max_size=67)),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -2.0, 0.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 2.0])),
        grammar=draw(st.sampled_from([None, None, Grammar("regex", '[a-z]+|["{}]{1,9}')])),
        stop_tokens=frozenset({66}) | frozenset(draw(st.sets(st.integers(0, 66), max_size=3))),
        stop_strings=tuple(draw(st.lists(st.sampled_from(["ab", "x"]), max_size=2))),
        prompt_logprobs=draw(st.booleans()),
        topk_prompt=draw(st.sampled_from([0, 1, 8, 64])),
        topk_sample=draw(st.sampled_from([0, 1, 8, 64])),
        alt_tokens=draw(st.sampled_from([0, 1, 8, 64])),
        targets=np.full((length - 1, targets), 66, np.int32) if targets else None,
    )


@settings(max_examples=40, deadline=None)
@given(asked=st.lists(any_request(), min_size=1, max_size=4), rank=st.integers(1, 32))
def test_no_request_compiles_anything(
    programs: ProgramRegistry, sampler: JaxSampler, asked: list[SamplingRequest], rank: int
) -> None:
    before = programs.compilations_after_ready
    for name in (*TENANTS, NAN):
        assert sampler.has_snapshot(name)  # another is evicted for the new ones
    for name in (f"never used {rank}", "new"):
        sampler.load_snapshot(name, state(rank=rank, seed=rank, train_mlp=rank % 2 == 0))
    results = sampler.sample(asked)
    assert programs.compilations_after_ready == before
    assert [len(result.sequences) for result in results] == [one.num_samples for one in asked]


def test_decoding_copies_no_weights(model: Decoder) -> None:
    """An additional layer takes less than half of its weights, because they are read in place."""

    def temporary_bytes(layers: int) -> int:
        config = replace(CONFIG, hidden=64, intermediate=256, layers=layers)
        deep = zero_decoder(config)
        static_shapes = StaticShapes(16, block=8, chunk=16, rank_buckets=(2,))
        programs = Programs(ProgramRegistry(), deep, static_shapes, slots=DECODE_SLOTS, pages=9)
        (shape,) = programs.decode.shapes()
        return int(memory_of(shape.lowered(lambda x: x)).temp_size_in_bytes)

    weights = 4 * 3 * 64 * 256  # weights of the MLP alone
    assert temporary_bytes(5) - temporary_bytes(2) < 3 * weights / 2
