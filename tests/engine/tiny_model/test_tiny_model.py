"""The embedded base model: its files, its tokenizer, and proof that it has learnt something."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.conftest import STATIC_SHAPES
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData
from tuneserve_engine.worker.execution.packing import PackingRequest, pack, unpack

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "engine/tuneserve_engine/tiny_model"
QWEN_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
HELD_OUT_SEED = 31_337  # the model was trained on seed 0


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, dict[str, Any]]:
    return AutoModelForCausalLM.from_pretrained(FOLDER, output_loading_info=True)


@pytest.fixture(scope="module")
def model(loaded: tuple[Any, dict[str, Any]]) -> Any:
    return loaded[0].eval()


@pytest.fixture(scope="module")
def hf_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Iterator[str]]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("tiny_model.corpus").documents


@pytest.fixture
def separated(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor, int], torch.Tensor]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("build_tiny_model").separated


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo"))
    return importlib.import_module("tasks")


def test_transformers_finds_every_weight_and_no_other(
    loaded: tuple[Any, dict[str, Any]],
) -> None:
    model, info = loaded
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_file_holds_float32_weights_and_no_tied_head() -> None:
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name) for name in file.keys()}
    assert {s.get_dtype() for s in shapes.values()} == {"F32"}
    assert "lm_head.weight" not in shapes
    config = json.loads((FOLDER / "config.json").read_text())
    want = [config["vocab_size"], config["hidden_size"]]
    assert shapes["model.embed_tokens.weight"].get_shape() == want


def test_every_token_has_a_distinct_row(
    separated: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    """322 tokens that never occur in the training text were once 0.03 apart.

    With ``train_unembed`` false, no training could have told them apart.
    """
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        table = file.get_tensor("model.embed_tokens.weight")
    distances = torch.cdist(table, table, compute_mode="donot_use_mm_for_euclid_dist")
    assert distances.fill_diagonal_(torch.inf).min() > 0.25
    assert torch.equal(separated(table, 0), table)


def test_rows_that_training_left_together_are_separated(
    separated: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    random = torch.Generator().manual_seed(3)
    taught = torch.randn(40, 16, generator=random)
    left = torch.ones(30, 16) + 1e-3 * torch.randn(30, 16, generator=random)
    table = torch.cat([taught, left])
    found = separated(table, 0)
    assert torch.equal(found[:40], taught)
    assert torch.equal(found, separated(table, 0))
    away = (found[40:] - left.mean(0)).norm(dim=1)
    usual = (taught - taught.mean(0)).norm(dim=1).mean()
    torch.testing.assert_close(away, usual.expand(30))
    assert torch.cdist(found, found).fill_diagonal_(torch.inf).min() > 1


def test_an_unseen_token_is_learnt_without_the_unembedding() -> None:
    backend = JaxBackend(str(FOLDER), name="tiny", tokenizer_id="t", static_shapes=STATIC_SHAPES)
    config = AdapterConfig(rank=8, alpha=32.0, seed=1, train_unembed=False)
    backend.create_adapter("it", config)
    prompt, (target,) = TOKENIZER.encode("I like").ids, TOKENIZER.encode("it").ids
    tokens = np.int32(prompt)
    targets = np.int32([*prompt[1:], target])[:, None]
    weights = np.zeros_like(targets, np.float32)
    weights[-1] = 1
    data = [DecodedDatum(tokens, targets, weights, True)]
    request = PackingRequest("it", 8, TrainingData("cross_entropy", {}, False, data))
    logprobs = []
    for _ in range(40):
        (packed,) = pack([request], backend.static_shapes)
        result = backend.forward_backward(packed.batch)
        (found,), _ = unpack(packed, result.outputs, 0, request.data)
        logprobs.append(float(found[-1]))
        backend.optim_steps([("it", AdamwParams(learning_rate=5e-3))])
    assert logprobs[0] < -5
    assert logprobs[-1] > -0.5  # it once stayed below -5 despite the training


def test_folder_is_small_enough_to_ship() -> None:
    assert sum(p.stat().st_size for p in FOLDER.iterdir()) < 12e6


def test_vocabulary_matches_the_embedding() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert TOKENIZER.get_vocab_size() == config["vocab_size"]
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(config["vocab_size"]))


@settings(deadline=None)  # the machine may be busy
@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@settings(deadline=None)  # the machine may be busy
@given(st.binary())
def test_any_bytes_survive_the_tokenizer(data: bytes) -> None:
    text = data.decode("latin-1")
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token() -> None:
    # GPT-2's byte alphabet: printable bytes stand for themselves, the rest from U+0100 upwards.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [*map(chr, printable), *(chr(256 + i) for i in range(256 - len(printable)))]
    assert all(TOKENIZER.token_to_id(letter) is not None for letter in alphabet)


@pytest.mark.parametrize("token", QWEN_TOKENS)
def test_a_control_token_is_one_id_also_between_words(token: str, hf_tokenizer: Any) -> None:
    wanted = TOKENIZER.token_to_id(token)
    assert hf_tokenizer.convert_tokens_to_ids(token) == wanted
    assert hf_tokenizer.encode(f"a{token}b", add_special_tokens=False).count(wanted) == 1


def test_transformers_and_tokenizers_encode_alike(hf_tokenizer: Any) -> None:
    text = "A rose is red.  It's 1234\n\n\u212b e\u0301 <|im_end|>"
    assert hf_tokenizer.encode(text) == TOKENIZER.encode(text).ids
    assert hf_tokenizer.decode(hf_tokenizer.encode(text)) == text


def test_generation_ends_at_the_tokenizers_end_tokens(hf_tokenizer: Any) -> None:
    ends = json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"]
    assert hf_tokenizer.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]
    assert (hf_tokenizer.eos_token, hf_tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_chat_template_writes_the_qwen_format(hf_tokenizer: Any) -> None:
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "2 + 2 ="},
    ]
    want = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\n2 + 2 =<|im_end|>\n"
    )
    render = hf_tokenizer.apply_chat_template
    assert render(turns, tokenize=False) == want
    prompt = want + "<|im_start|>assistant\n"
    assert render(turns, tokenize=False, add_generation_prompt=True) == prompt
    without_thinking = render(
        turns, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert without_thinking == prompt + "<think>\n\n</think>\n\n"


def test_chat_template_writes_thoughts_tool_calls_and_tool_answers(hf_tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    turns = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "Ask.", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    text = hf_tokenizer.apply_chat_template(turns, tools=tools, tokenize=False)
    head, rest = text.split("<|im_end|>\n", 1)
    assert head.startswith("<|im_start|>system\n# Tools") and '"name": "weather"' in head
    assert rest == (
        "<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nAsk.\n</think>\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
    )


def test_unseen_text_costs_less_than_a_third_of_token_frequencies(
    model: Any, documents: Callable[[int], Iterator[str]]
) -> None:
    rows = [TOKENIZER.encode(text).ids for text in itertools.islice(documents(HELD_OUT_SEED), 100)]
    total = 0.0
    for row in rows:
        ids = torch.tensor([row])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits
        total += float(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum"))
    seen = Counter(itertools.chain.from_iterable(row[1:] for row in rows))
    count = sum(seen.values())
    # A model that ignores context cannot beat the entropy of the text's own token frequencies.
    unigram = -sum(n / count * math.log(n / count) for n in seen.values())
    uniform = math.log(TOKENIZER.get_vocab_size())
    assert total / count < unigram / 3 < uniform / 3


def test_base_model_answers_the_demo_questions_plainly(model: Any, tasks: Any) -> None:
    facts = {fact.question: fact for fact in tasks.FACTS}
    for question in tasks.HELD_OUT:
        ids = torch.tensor([TOKENIZER.encode(tasks.prompt(question)).ids])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24
        )
        answer = TOKENIZER.decode(out[0, ids.shape[1] :].tolist())
        assert answer == facts[question].sentence


def test_demo_tasks_are_short_and_reproducible_and_hold_out_their_questions(tasks: Any) -> None:
    for task in tasks.TASKS:
        pairs = list(itertools.islice(task.examples(seed=3), 200))
        assert pairs == list(itertools.islice(task.examples(seed=3), 200))
        assert max(len(TOKENIZER.encode(a + b).ids) for a, b in pairs) <= 48
        asked = {prompt for prompt, _ in pairs}
        assert asked.isdisjoint(tasks.prompt(question) for question in tasks.HELD_OUT)
