"""Requests that start, continue and are dropped in slices: no bit of a result changes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.backend.jax.sampling.test_sampler import (
    COMPANY,
    DECODE_SLOTS,
    ROOMY,
    STATIC_SHAPES,
    TENANTS,
    Letters,
    alone,
    assert_same_bits,
    load_tenants,
    model,
    programs,
    request,
    sampler,
)
from tests.engine.worker.scheduling.test_fairness import QUICK
from tests.support.token_listener import Listener
from tuneserve_engine.backend.base import SampleProgress, SampleResult, SamplingRequest
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.sampling.kv_pages import least_pages
from tuneserve_engine.backend.jax.sampling.sampler import JaxSampler

pytestmark = pytest.mark.bits

__all__ = ["alone", "model", "programs", "sampler"]


def after(steps: int) -> Callable[[], bool]:
    """A function that returns True from its ``steps``-th call on."""
    left = steps

    def should_yield() -> bool:
        nonlocal left
        left -= 1
        return left <= 0

    return should_yield


def to_the_end(
    sampler: JaxSampler,
    asked: Mapping[str, SamplingRequest],
    steps: int = 1,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """The results of the requests, sampled in slices of ``steps`` steps."""
    ended: dict[str, Any] = {}
    left = dict(asked)
    while left:
        given = sampler.sample_until(left, after(steps))
        if listener is not None:
            listener.hear(given)
        ended |= given.finished
        left = {name: left[name] for name in given.remaining}
    return ended


@settings(max_examples=12, deadline=None, phases=QUICK)
@given(seed=st.integers(0, 2**32))
def test_a_random_schedule_changes_no_bit_of_a_request(
    sampler: JaxSampler, alone: list[SampleResult], seed: int
) -> None:
    check_schedule(sampler, alone, seed)


@pytest.fixture(scope="module")
def crowded(model: Decoder) -> JaxSampler:
    """A sampler whose pages suffice for one sequence as long as the context."""
    sampler = JaxSampler(
        ProgramRegistry(),
        model,
        STATIC_SHAPES,
        Letters(),
        slots=DECODE_SLOTS,
        snapshot_bytes=ROOMY,
        pages=least_pages(STATIC_SHAPES),
    )
    load_tenants(sampler)
    return sampler


@settings(max_examples=12, deadline=None, phases=QUICK)
@given(seed=st.integers(0, 2**32))
def test_in_few_pages_sequences_start_anew_without_another_bit(
    crowded: JaxSampler, alone: list[SampleResult], seed: int
) -> None:
    check_schedule(crowded, alone, seed)


def test_too_few_pages_for_the_context_are_refused(model: Decoder) -> None:
    with pytest.raises(ValueError, match=r"pages is 9; .* needs 10"):
        JaxSampler(
            ProgramRegistry(), model, STATIC_SHAPES, None, slots=2, snapshot_bytes=ROOMY, pages=9
        )


def test_three_sequences_as_long_as_the_context_end_in_pages_for_one(
    sampler: JaxSampler, crowded: JaxSampler
) -> None:
    longest = [request(3, seed=seed, owner=f"owner {seed}", max_tokens=61) for seed in range(3)]
    before = crowded.counts.preempted
    for one, got in zip(longest, crowded.sample(longest), strict=True):
        assert_same_bits(got, sampler.sample([one])[0])
    assert crowded.counts.preempted > before


def test_an_owner_without_a_decode_slot_gets_pages_of_the_owner_with_the_most_and_no_other_bit(
    sampler: JaxSampler, crowded: JaxSampler
) -> None:
    """Nine pages: two long sequences hold too many for the other owner's prompt. Two of another
    rank bucket, of the owner that decodes already, wait behind it.
    """
    busy = {str(seed): request(3, seed=seed, owner="busy", max_tokens=61) for seed in range(2)}
    busy |= {
        str(seed): request(30, seed=seed, snapshot_id="rank 4", owner="busy") for seed in (2, 3)
    }
    new = request(15, seed=7, snapshot_id="rank 2", owner="new", max_tokens=2, prompt_logprobs=True)
    decoding = dict(list(busy.items())[:2])
    assert len(crowded.sample_until(decoding, after(5)).remaining) == 2
    crowded.sample_until(busy, after(1))
    before = crowded.counts.preempted
    ended = {}
    for _ in range(6):
        progress = crowded.sample_until(busy | {"new": new}, after(1))
        ended |= progress.finished
        if "new" in ended:
            break
    assert ended.keys() == {"new"}
    assert crowded.counts.preempted == before + 1
    assert_same_bits(ended["new"], sampler.sample([new])[0])
    for name, got in to_the_end(crowded, busy).items():
        assert_same_bits(got, sampler.sample([busy[name]])[0])


def test_no_sequence_starts_anew_for_one_that_finds_too_few_pages_even_so(
    sampler: JaxSampler, crowded: JaxSampler
) -> None:
    """The new owner's prompt needs seven of nine pages, and the other owner keeps a sequence."""
    busy = {str(seed): request(3, seed=seed, owner="busy", max_tokens=61) for seed in range(2)}
    new = request(55, seed=7, owner="new", max_tokens=2)
    assert len(crowded.sample_until(busy, after(5)).remaining) == 2
    before = crowded.counts.preempted
    assert len(crowded.sample_until(busy | {"new": new}, after(1)).remaining) == 3
    assert crowded.counts.preempted == before
    assert_same_bits(to_the_end(crowded, busy | {"new": new})["new"], sampler.sample([new])[0])


def check_schedule(sampler: JaxSampler, alone: list[SampleResult], seed: int) -> None:
    """Requests arrive one after the other, some are dropped and return, and slices end anywhere.

    Owners differ, so some lose their decode slots to others and start again. Listeners of some
    requests receive the tokens that the results will have.
    """
    random = Random(seed)
    everyone = {
        str(number): replace(one, owner=random.choice("xyz"), stream=random.random() < 0.5)
        for number, one in enumerate(COMPANY)
    }
    listener = Listener()
    waiting = random.sample(sorted(everyone), len(everyone))
    asked: dict[str, SamplingRequest] = {}
    ended: dict[str, Any] = {}
    give_ups = random.randrange(4)
    while waiting or asked:
        for _ in range(min(random.randrange(5), len(waiting))):
            name = waiting.pop()
            asked[name] = everyone[name]
        given = sampler.sample_until(asked, after(random.randint(1, 6)))
        assert given.finished.keys() | given.remaining.keys() == asked.keys()
        assert all(asked[name].stream for name in given.new_tokens)
        listener.hear(given)
        ended |= given.finished
        asked = {name: asked[name] for name in given.remaining}
        if asked and give_ups:
            give_ups -= 1
            name = random.choice(sorted(asked))
            del asked[name]
            waiting.insert(0, name)
    for number, want in enumerate(alone):
        assert_same_bits(ended[str(number)], want)
        listener.assert_heard(str(number), want)
    assert sampler._cache.pool.room == sampler._pages - 1  # no request holds a page


def test_a_slice_reports_its_work(sampler: JaxSampler) -> None:
    """Three sequences of 11 tokens from a prompt of 5, four at a time, in four decode slots."""
    sampler._forget_all()
    one = request(5, num_samples=3, max_tokens=11)
    first = sampler.sample_until({"one": one}, after(1))
    # One sequence prefilled the prompt, which the others share. Then each decoded four tokens.
    assert first == SampleProgress({}, {"one": 3}, {"one": 4 / 32 + 3 * 4})
    second = sampler.sample_until({"one": one}, after(1))
    assert second == SampleProgress({}, {"one": 3}, {"one": 3 * 4})
    third = sampler.sample_until({"one": one}, after(1))
    assert third.work == {"one": 3 * 3}
    assert third.remaining == {}
    assert third.finished.keys() == {"one"}
    assert sampler.sample_until({}, after(1)) == SampleProgress({}, {}, {})


def test_a_request_that_is_no_longer_asked_for_loses_its_decode_slots(sampler: JaxSampler) -> None:
    long = request(5, num_samples=DECODE_SLOTS + 2, max_tokens=40, stop_tokens=frozenset())
    sampler.sample_until({"long": long}, after(1))
    assert sum(len(slots.sequences) for slots in sampler._decode_batches.values()) == DECODE_SLOTS
    short = request(7, max_tokens=1)
    given = sampler.sample_until({"short": short}, after(1))
    assert given.finished.keys() == {"short"}
    assert not any(slots.sequences for slots in sampler._decode_batches.values())
    assert not sampler._waiting


def test_an_owner_without_a_decode_slot_gets_one_from_the_owner_with_most(
    sampler: JaxSampler,
) -> None:
    """The sequence that lost its slot starts again and ends as it would have."""
    flood = request(5, num_samples=3 * DECODE_SLOTS, max_tokens=24, stop_tokens=frozenset())
    (want,) = sampler.sample([flood])
    flood = replace(flood, owner="flood", stream=True)
    light = request(7, max_tokens=4, owner="light")
    asked = {"flood": flood}
    listener = Listener()
    given = sampler.sample_until(asked, after(2))
    work = given.work["flood"]
    listener.hear(given)
    given = sampler.sample_until(asked | {"light": light}, after(2))
    work += given.work["flood"]
    listener.hear(given)
    assert given.finished.keys() == {"light"}
    assert given.remaining == {"flood": 3 * DECODE_SLOTS}
    ended = to_the_end(sampler, asked, listener=listener)
    assert_same_bits(ended["flood"], want)
    listener.assert_heard("flood", want)
    assert listener.repeated > 0


def test_an_owners_only_decode_slot_is_not_taken(sampler: JaxSampler) -> None:
    asked = {
        owner: request(5, max_tokens=20, owner=owner, stop_tokens=frozenset())
        for owner in "abcd"[:DECODE_SLOTS]
    }
    sampler.sample_until(asked, after(1))
    one_more = request(5, max_tokens=1, owner="e")
    given = sampler.sample_until(asked | {"e": one_more}, after(1))
    assert given.remaining == dict.fromkeys([*asked, "e"], 1)
    assert given.work["e"] == 0
    assert to_the_end(sampler, asked | {"e": one_more}).keys() == {*asked, "e"}


def test_more_owners_than_decode_slots_take_turns(sampler: JaxSampler) -> None:
    """A newcomer gets the first free slot, even if the others have much to do."""
    never = frozenset[int]()
    asked = {
        owner: request(5, num_samples=40, max_tokens=8, owner=owner, stop_tokens=never)
        for owner in "abcd"[:DECODE_SLOTS]
    }
    sampler.sample_until(asked, after(1))
    asked["e"] = request(5, max_tokens=1, owner="e", stop_tokens=never)
    for _ in range(4):  # two dispatches end the running sequences, one prefills, one decodes
        given = sampler.sample_until(asked, after(1))
        asked = {name: asked[name] for name in given.remaining}
    assert "e" not in asked
    sampler.sample_until({}, after(1))


def test_an_endless_series_of_prompts_does_not_stop_decoding(
    sampler: JaxSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def noted(name: str) -> None:
        program = getattr(sampler._programs, name)

        def call(*args: Any) -> Any:
            done.append(name[0])
            return program(*args)

        monkeypatch.setattr(sampler._programs, name, call)

    writer = request(3, max_tokens=40, owner="a", stop_tokens=frozenset())
    sampler.sample_until({"writer": writer}, after(2))
    noted("prefill")
    noted("decode")
    asked = {"writer": writer}
    for number in range(30):  # four chunks each
        prompt = (request(60).prompt + number) % 67
        asked[str(number)] = replace(request(60, max_tokens=1, owner="b"), prompt=prompt)
    while "writer" in asked:
        given = sampler.sample_until(asked, after(1))
        asked = {name: asked[name] for name in given.remaining}
    assert "p" * 4 + "d" in "".join(done)
    assert "p" * 5 not in "".join(done)
    sampler.sample_until({}, after(1))


def test_a_request_that_cannot_run_fails_alone(
    sampler: JaxSampler, alone: list[SampleResult]
) -> None:
    asked = {"0": COMPANY[0], "gone": request(snapshot_id="gone"), "1": COMPANY[1]}
    first = sampler.sample_until(asked, after(1))
    assert first.finished.keys() == {"gone"}
    assert "not loaded" in str(first.finished["gone"])
    ended = to_the_end(sampler, {name: asked[name] for name in "01"})
    assert_same_bits(ended["0"], alone[0])
    assert_same_bits(ended["1"], alone[1])


@pytest.mark.parametrize("tenant", TENANTS)
def test_a_running_request_whose_snapshot_was_dropped_keeps_its_weights(
    sampler: JaxSampler, tenant: str
) -> None:
    one = request(6, snapshot_id=tenant, num_samples=DECODE_SLOTS + 1, max_tokens=9)
    (want,) = sampler.sample([one])
    sampler.sample_until({"one": one}, after(1))
    held = sampler.snapshots._host.pop(tenant)
    sampler.snapshots.leave_device()
    assert sampler.has_snapshot(tenant), "otherwise every slice would read it from its file"
    try:
        assert_same_bits(to_the_end(sampler, {"one": one})["one"], want)
    finally:
        sampler.snapshots._host[tenant] = held


def test_a_device_failure_loses_only_the_running_sequences(
    sampler: JaxSampler, alone: list[SampleResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {str(number): one for number, one in enumerate(COMPANY)}
    sampler.sample_until(asked, after(2))

    def broken(*_: object) -> None:
        raise RuntimeError("the device is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(sampler._programs, "decode", broken)
        with pytest.raises(RuntimeError, match="on fire"):
            sampler.sample_until(asked, after(2))
    ended = to_the_end(sampler, asked, steps=3)
    for number, want in enumerate(alone):
        assert_same_bits(ended[str(number)], want)
