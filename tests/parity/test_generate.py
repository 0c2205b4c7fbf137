"""Generation and scores equal those of transformers and PEFT, on random tiny models."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import peft
import pytest
import torch
from scipy import stats

from tests.support.nightly import at_night
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import SamplingRequest
from tuneserve_engine.backend.jax.model.weights import load_base_model
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.sampling.sampler import JaxSampler
from tuneserve_engine.core.adapter import ATTENTION, UNEMBED, AdapterConfig
from tuneserve_engine.core.shapes import StaticShapes

# PEFT asks transformers 5.23 for a property under its old name.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)
TOLERANCE = 1.5e-5
VOCAB = 67
EOS = 2
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "llama": {"head_dim": 10},
    "qwen2": {"num_key_value_heads": 1},
}
ADAPTERS = {
    "everything": AdapterConfig(rank=3, alpha=6, seed=0),
    "mlp_and_head": AdapterConfig(rank=8, alpha=16, seed=0, train_attn=False),
    "attention": AdapterConfig(rank=5, alpha=4, seed=0, train_mlp=False, train_unembed=False),
    "head": AdapterConfig(rank=2, alpha=2, seed=0, train_attn=False, train_mlp=False),
}
"""Every part, alone or with others."""
TENANTS = (None, *ADAPTERS)


class Pair:
    """Our sampler and their model, both with the same base and adapters."""

    def __init__(self, hf: Any) -> None:
        self.theirs = peft_model(hf.model)
        model, config = load_base_model(str(hf.folder), dtype="float32")
        static_shapes = StaticShapes(config.context_length, block=8, chunk=16)
        model.use_shapes(static_shapes)
        self.ours = JaxSampler(
            ProgramRegistry(), model, static_shapes, None, slots=4, snapshot_bytes=1 << 30
        )
        for name, adapter in ADAPTERS.items():
            self.ours.load_snapshot(name, adapter_state(self.theirs, name, adapter))

    def run(self, adapter: str | None, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call their model's method under the adapter."""
        with torch.no_grad():
            if adapter is None:
                with self.theirs.disable_adapter():
                    return getattr(self.theirs, method)(*args, **kwargs)
            self.theirs.set_adapter(adapter)
            return getattr(self.theirs, method)(*args, **kwargs)

    def generate(self, prompt: Any, adapter: str | None, max_tokens: int) -> list[int]:
        ids = torch.from_numpy(prompt).long()[None]
        options = {"do_sample": False, "eos_token_id": EOS, "pad_token_id": 0}
        mask = torch.ones_like(ids)
        out = self.run(
            adapter,
            "generate",
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            **options,
        )
        return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    def logprobs(self, tokens: Any, adapter: str | None, temperature: float = 1.0) -> Any:
        """Their logprobs of every next token, float64 [T, V]."""
        ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
        logits = self.run(adapter, "forward", input_ids=ids).logits[0].double()
        return torch.log_softmax(logits / temperature, dim=-1).numpy()


def peft_model(base: Any) -> Any:
    torch.manual_seed(1)
    configs = {
        name: peft.LoraConfig(
            r=config.rank,
            lora_alpha=int(config.alpha),
            target_modules=["lm_head" if t == UNEMBED else t for t in config.targets],
        )
        for name, config in ADAPTERS.items()
    }
    (first, *others) = configs
    model = peft.get_peft_model(copy.deepcopy(base), configs[first], adapter_name=first)
    for name in others:
        model.add_adapter(name, configs[name])
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def adapter_state(model: Any, name: str, config: AdapterConfig) -> AdapterState:
    """PEFT's adapter as ours. PEFT stores A as [r, d_in] and B as [d_out, r]."""
    base = model.base_model.model

    def side(module: Any, letter: str) -> Any:
        return getattr(module, f"lora_{letter}")[name].weight.detach().numpy().T

    weights = {}
    for target in config.targets:
        part = "self_attn" if target in ATTENTION else "mlp"
        for letter in "AB":
            stacked = (
                side(base.lm_head, letter)
                if target == UNEMBED
                else np.stack(
                    [side(getattr(getattr(x, part), target), letter) for x in base.model.layers]
                )
            )
            weights[f"{target}.{letter}"] = np.array(stacked, order="C")
    return AdapterState(config, weights)


@pytest.fixture(scope="module")
def pair_of(reference: Any) -> Callable[[str], Pair]:
    return cache(lambda name: Pair(reference(name, **MODELS[name])))


@pytest.fixture(params=["qwen3", *(at_night(name) for name in MODELS if name != "qwen3")])
def pair(request: pytest.FixtureRequest, pair_of: Callable[[str], Pair]) -> Pair:
    return pair_of(request.param)


@pytest.fixture
def qwen3(pair_of: Callable[[str], Pair]) -> Pair:
    return pair_of("qwen3")


def prompt_of(length: int, seed: int = 0) -> Any:
    return np.random.default_rng(100 * seed + length).integers(3, VOCAB, length).astype(np.int32)


def request(length: int, adapter: str | None, **options: Any) -> SamplingRequest:
    defaults = {"seed": 1, "num_samples": 1, "max_tokens": 1}
    return SamplingRequest(prompt_of(length), adapter, **(defaults | options))


def assert_close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_greedy_sampling_equals_generate_in_one_mixed_call(pair: Pair) -> None:
    """Prompts of about 16 tokens in decode slots of 32, for the base and both adapters."""
    asked = [
        request(length, adapter, max_tokens=15, temperature=0.0, stop_tokens=frozenset({EOS}))
        for length in (2, 15, 17)
        for adapter in TENANTS
    ]
    for one, result in zip(asked, pair.ours.sample(asked), strict=True):
        (sequence,) = result.sequences
        want = pair.generate(one.prompt, one.snapshot_id, one.max_tokens)
        assert sequence.tokens.tolist() == want
        assert sequence.stop_reason == ("stop" if want[-1] == EOS else "length")


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 1.8])
def test_sampled_logprobs_belong_to_the_scaled_distribution(pair: Pair, temperature: float) -> None:
    """Truncation changes the draws but not the logprobs. At 0 they belong to temperature 1."""
    options = {"max_tokens": 11, "temperature": temperature, "topk_sample": 5, "num_samples": 2}
    asked = [request(7, adapter, top_k=20, top_p=0.9, **options) for adapter in TENANTS]
    for one, result in zip(asked, pair.ours.sample(asked), strict=True):
        for sequence in result.sequences:
            text = np.concatenate([one.prompt, sequence.tokens])
            want = pair.logprobs(text, one.snapshot_id, temperature or 1.0)[6:-1]
            assert_close(sequence.logprobs, want[np.arange(11), sequence.tokens])
            assert sequence.topk is not None
            assert_top(sequence.topk, want, 5)


def assert_top(top: Any, logprobs: Any, k: int) -> None:
    best = np.argsort(-logprobs, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(top.token_ids, best)
    assert_close(top.logprobs, np.take_along_axis(logprobs, best, axis=-1))


@pytest.mark.parametrize("length", [2, 16, 33])
def test_prompt_scores_equal_theirs(pair: Pair, length: int) -> None:
    targets = np.random.default_rng(length).integers(-1, VOCAB, (length - 1, 3)).astype(np.int32)
    targets[0] = [-1, 5, -1]
    asked = [
        request(
            length, adapter, prompt_logprobs=True, topk_prompt=3, targets=targets, temperature=0.5
        )
        for adapter in TENANTS
    ]
    for one, result in zip(asked, pair.ours.sample(asked), strict=True):
        want = pair.logprobs(one.prompt, one.snapshot_id)[:-1]
        rows = np.arange(length - 1)
        assert result.prompt_logprobs is not None and np.isnan(result.prompt_logprobs[0])
        assert_close(result.prompt_logprobs[1:], want[rows, one.prompt[1:]])
        assert_top(result.topk_prompt, want, 3)
        asked_for = want[rows[:, None], np.maximum(targets, 0)]
        assert_close(result.target_logprobs, np.where(targets < 0, 0.0, asked_for))


def test_long_prompts_are_scored_in_chunks_with_the_same_numbers(qwen3: Pair) -> None:
    """A prompt of 40 in chunks of 16, the last one short."""
    one = request(40, "everything", prompt_logprobs=True, alt_tokens=2, topk_prompt=2)
    (result,) = qwen3.ours.sample([one])
    want = qwen3.logprobs(one.prompt, "everything")[:-1]
    assert result.prompt_logprobs is not None and result.alt_tokens is not None
    assert_close(result.prompt_logprobs[1:], want[np.arange(39), one.prompt[1:]])
    assert_top(result.topk_prompt, want, 2)
    ids = result.alt_tokens.token_ids
    assert_close(result.alt_tokens.logprobs, np.take_along_axis(want, ids, axis=-1))


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_alternative_tokens_have_logprobs_at_the_temperature(
    qwen3: Pair, temperature: float
) -> None:
    one = request(30, "mlp_and_head", alt_tokens=8, temperature=temperature)
    (result,) = qwen3.ours.sample([one])
    assert result.alt_tokens is not None
    want = qwen3.logprobs(one.prompt, "mlp_and_head", temperature)[:-1]
    ids = result.alt_tokens.token_ids
    assert ids.shape == (29, 8)
    assert_close(result.alt_tokens.logprobs, np.take_along_axis(want, ids, axis=-1))


@pytest.mark.parametrize(
    "adapter,top_k,top_p,temperature",
    [
        at_night(None, -1, 1.0, 1.5),
        ("everything", 8, 1.0, 2.0),
        at_night("mlp_and_head", -1, 0.7, 2.5),
    ],
)
def test_first_and_second_tokens_follow_their_distribution(
    qwen3: Pair, adapter: str | None, top_k: int, top_p: float, temperature: float
) -> None:
    """The prompt's pass draws the first token, and a decode step the second."""

    def exact(tokens: Any) -> Any:
        logprobs = qwen3.logprobs(tokens, adapter, temperature)[-1]
        return truncated(logprobs, top_k, top_p)

    options = {"top_k": top_k, "top_p": top_p, "temperature": temperature}
    one = request(15, adapter, seed=11, max_tokens=2, num_samples=800, **options)
    (result,) = qwen3.ours.sample([one])
    tokens = np.array([s.tokens for s in result.sequences])
    first = np.bincount(tokens[:, 0], minlength=VOCAB)
    assert chi_square(first, 800 * exact(one.prompt)) > 0.01
    seconds = sum(first[t] * exact(np.append(one.prompt, t)) for t in np.flatnonzero(first))
    assert chi_square(np.bincount(tokens[:, 1], minlength=VOCAB), seconds) > 0.01


def truncated(logprobs: Any, top_k: int, top_p: float) -> Any:
    """The distribution after top-k and then top-p, by sorting."""
    order = np.argsort(-logprobs, kind="stable")[: top_k if top_k > 0 else None]
    weights = np.exp(logprobs[order])
    if top_p < 1:
        count = int(np.argmax(np.cumsum(weights) >= top_p * weights.sum())) + 1
        order, weights = order[:count], weights[:count]
    exact = np.zeros_like(logprobs)
    exact[order] = weights / weights.sum()
    return exact


def chi_square(seen: Any, expected: Any) -> float:
    """The p-value of the counts. The rarest tokens are counted together, 8 expected or more."""
    assert (expected[seen > 0] > 0).all()
    order = np.argsort(-expected)
    tail = np.cumsum(expected[order][::-1])[::-1]  # expected from here on
    single = int(((expected[order] >= 8) & (tail >= 8)).sum()) - 1
    cells = [*order[:single, None], order[single:]]
    return float(
        stats.chisquare([seen[c].sum() for c in cells], [expected[c].sum() for c in cells]).pvalue
    )
