"""Checks of sampling: stops, seeds, logprobs and frozen weights."""

import math

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_server.conformance.checks import SAMPLING, SDK, Checks
from tuneserve_server.conformance.futures import example
from tuneserve_server.conformance.target import ServerUnderTest, TestedSampler, expect
from tuneserve_server.conformance.tensors import datum, floats_in, integers, integers_in

CHECKS = Checks()

_PROMPT = [11, 8, 23, 9]
_GREEDY = {"temperature": 0.0, "stop": [], "max_tokens": 6}
_CLOSE = 0.05
"""The difference of logprobs of one token, in sampler and trainer, that bfloat16 explains."""


def _drawn(found: wire.SampleResponse) -> list[int]:
    return integers_in(found.sequences[0].tokens)


def _base(target: ServerUnderTest) -> TestedSampler:
    return target.new_sampler()


@CHECKS.rule(SDK)
def sequence_ids(target: ServerUnderTest) -> None:
    """The answer of asample names each sequence in sample_sequence_ids, in order."""
    names = _base(target).accepted(_PROMPT, count=3).get("sample_sequence_ids")
    expect(isinstance(names, list), "sample_sequence_ids is missing")
    assert names is not None
    expect(len(set(names)) == 3, f"three samples have {len(set(names))} ids")


@CHECKS.rule(SDK)
def samples(target: ServerUnderTest) -> None:
    """Each of num_samples sequences has tokens and a logprob for each token."""
    found = _base(target).sample(_PROMPT, count=3, params={"max_tokens": 5, "stop": []})
    expect(len(found.sequences) == 3, f"three samples have {len(found.sequences)} sequences")
    for each in found.sequences:
        tokens, logprobs = integers_in(each.tokens), floats_in(each.logprobs)
        expect(len(tokens) == 5, f"without stops, 5 tokens were asked for and {len(tokens)} came")
        expect(len(logprobs) == 5, f"5 tokens have {len(logprobs)} logprobs")
        expect(all(-1000 < lp <= 0 for lp in logprobs), f"the logprobs are {logprobs}")
        expect(each.stop_reason == wire.STOP_REASON_LENGTH, "the stop reason is not length")


@CHECKS.rule(SAMPLING)
def seeds(target: ServerUnderTest) -> None:
    """Samples without a seed differ; the same seed gives the same sample."""
    sampler, params = _base(target), {"max_tokens": 12, "stop": []}
    one, same = (_drawn(sampler.sample(_PROMPT, params={**params, "seed": 7})) for _ in range(2))
    expect(one == same, "the same seed gave two samples")
    free = [
        tuple(_drawn(sampler.sample(_PROMPT, params={**params, "seed": None, "temperature": 3.0})))
        for _ in range(4)
    ]
    expect(len(set(free)) > 1, "four samples without a seed are equal")


@CHECKS.rule(SAMPLING)
def greedy(target: ServerUnderTest) -> None:
    """Temperature 0 draws the likeliest token."""
    sampler = _base(target)
    found = sampler.sample(_PROMPT, params=_GREEDY, topk_sample_logprobs=2)
    top = found.sequences[0].topk_sampled_logprobs
    first = integers_in(top.token_ids)[:: max(top.k, 1)]
    expect(first == _drawn(found), f"the likeliest tokens are {first}, drawn were {_drawn(found)}")


@CHECKS.rule(SAMPLING)
def stop_tokens(target: ServerUnderTest) -> None:
    """A stop token ends the sequence, is in it once, and has a logprob."""
    sampler = _base(target)
    free = _drawn(sampler.sample(_PROMPT, params=_GREEDY))
    found = sampler.sample(_PROMPT, params={**_GREEDY, "stop": [free[2]]}).sequences[0]
    expected = free[: free.index(free[2]) + 1]
    got = integers_in(found.tokens)
    expect(got == expected, f"the tokens are {got}; up to the stop they are {expected}")
    expect(found.stop_reason == wire.STOP_REASON_STOP, "the stop reason is not stop")
    expect(len(floats_in(found.logprobs)) == len(got), "a token has no logprob")


@CHECKS.rule(SDK)
def prompts_in_chunks(target: ServerUnderTest) -> None:
    """A prompt may come in many chunks without a change."""
    sampler = _base(target)
    whole = _drawn(sampler.sample(_PROMPT, params=_GREEDY))
    parts = _drawn(sampler.sample(_PROMPT, params=_GREEDY, in_chunks=True))
    expect(whole == parts, f"in one chunk the tokens are {whole}, in many {parts}")


@CHECKS.rule(SDK)
def large_numbers(target: ServerUnderTest) -> None:
    """The seq_id of a sample is a 64-bit integer: copies of a client count from 1e9 times an id."""
    names = _base(target).accepted(_PROMPT, seq_id=999_999_999 * 10**9 + 5)
    expect("request_id" in names, "the request has no request_id")


@CHECKS.rule(SAMPLING)
def prompt_logprobs(target: ServerUnderTest) -> None:
    """Prompt logprobs are one per token, of which the first is NaN, and equal the trainer's."""
    ids = [*_PROMPT, 17, 12]
    found = _base(target).sample(ids, prompt_logprobs=True, params={"max_tokens": 1})
    sampled = floats_in(found.prompt_logprobs)
    expect(len(sampled) == len(ids), f"{len(ids)} tokens have {len(sampled)} prompt logprobs")
    expect(math.isnan(sampled[0]), f"the first prompt logprob is {sampled[0]}, not NaN")
    trained = target.new_model().gradient(
        [datum(ids[:-1], target_tokens=integers(ids[1:]))], forward_only=True
    )
    _equal(sampled[1:], trained.logprobs[0], "prompt logprobs")


@CHECKS.rule(SAMPLING)
def sampled_logprobs(target: ServerUnderTest) -> None:
    """At temperature 1 the logprobs of drawn tokens equal the trainer's."""
    found = _base(target).sample(_PROMPT, params={"max_tokens": 6, "stop": [], "seed": 3})
    drawn = _drawn(found)
    ids = [*_PROMPT, *drawn]
    trained = target.new_model().gradient(
        [datum(ids[:-1], target_tokens=integers(ids[1:]))], forward_only=True
    )
    logprobs = floats_in(found.sequences[0].logprobs)
    _equal(logprobs, trained.logprobs[0][len(_PROMPT) - 1 :], "logprobs")


@CHECKS.rule(SAMPLING)
def temperature(target: ServerUnderTest) -> None:
    """Logprobs of drawn tokens are of the distribution at the temperature of the request."""
    sampler, heat = _base(target), 2.0
    found = sampler.sample(
        _PROMPT, count=8, params={"max_tokens": 1, "stop": [], "temperature": heat, "seed": 5}
    )
    hot = {integers_in(each.tokens)[0]: floats_in(each.logprobs)[0] for each in found.sequences}
    expect(len(hot) > 1, "eight samples at temperature 2 are one token; choose another base model")
    one, other = list(hot)[:2]
    cold = [
        floats_in(
            sampler.sample(
                [*_PROMPT, token], prompt_logprobs=True, params={"max_tokens": 1}
            ).prompt_logprobs
        )[-1]
        for token in (one, other)
    ]
    gaps = hot[one] - hot[other], (cold[0] - cold[1]) / heat
    expect(
        abs(gaps[0] - gaps[1]) < _CLOSE,
        f"two logprobs differ by {gaps[0]:.4g} at temperature 2; by the prompt's, {gaps[1]:.4g}",
    )


@CHECKS.rule(SAMPLING)
def frozen_weights(target: ServerUnderTest) -> None:
    """A sampler keeps the weights of its save, whatever is trained later."""
    model = target.new_model()
    path = model.saved("save_weights_for_sampler")
    sampler = target.new_sampler(path)
    ids = [5 + n % 30 for n in range(7)]

    def scores() -> list[float]:
        found = sampler.sample(ids, prompt_logprobs=True, params={"max_tokens": 1})
        return floats_in(found.prompt_logprobs)[1:]

    before = scores()
    for _ in range(3):
        model.gradient([example()])
        model.step(learning_rate=0.05)
    expect(scores() == before, "the sampler's logprobs changed with the model")
    trained = model.gradient([datum(ids[:-1], target_tokens=integers(ids[1:]))], forward_only=True)
    change = max(abs(a - b) for a, b in zip(before, trained.logprobs[0], strict=True))
    expect(change > _CLOSE, f"three steps changed no logprob by more than {change:.2g}")
    newer = target.new_sampler(model.saved("save_weights_for_sampler"))
    found = newer.sample(ids, prompt_logprobs=True, params={"max_tokens": 1})
    _equal(floats_in(found.prompt_logprobs)[1:], trained.logprobs[0], "a new sampler's logprobs")


@CHECKS.rule(SDK)
def samplers(target: ServerUnderTest) -> None:
    """A sampler tells its base model and checkpoint."""
    path = target.new_model().saved("save_weights_for_sampler")
    about = target.ask("GET", f"samplers/{target.new_sampler(path).id}")
    for name in ("sampler_id", "base_model"):
        expect(about.get(name), f"the sampler has no {name}")
    expect(about.get("model_path") in (path, None), f"model_path is {about.get('model_path')!r}")


@CHECKS.rule(SDK)
def unnamed_saves(target: ServerUnderTest) -> None:
    """A save without a name answers a sampler of the weights, in the model's session."""
    model = target.new_model()
    number = target.next_sampler_number()
    body = {
        "model_id": model.id,
        "seq_id": model.next_seq,
        "sampling_session_seq_id": number,
        "kind": "snapshot",
        "type": "save_weights_for_sampler",
    }
    made = target.result(target.submit("save_weights_for_sampler", body))
    expect(made.get("sampling_session_id"), "the result has no sampling_session_id")
    sampler = TestedSampler(target, str(made["sampling_session_id"]))
    expect(_drawn(sampler.sample(_PROMPT)), "the sampler draws nothing")


def _equal(got: list[float], expected: list[float], what: str) -> None:
    expect(len(got) == len(expected), f"there are {len(got)} {what} for {len(expected)} tokens")
    worst = max(abs(a - b) for a, b in zip(got, expected, strict=True))
    expect(worst < _CLOSE, f"{what} differ from the trainer's by up to {worst:.3g}")
