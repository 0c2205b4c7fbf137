"""The official OpenAI client against the real service. Its answers must equal the SDK's samples."""

import json
import os
import re
import sqlite3
import typing
from contextlib import closing

import jsonschema
import numpy as np
import openai
import pydantic
import pytest
import torch
import transformers
from tinker import types

from tests.quick_service import QUICK
from tests.sdk import service_client
from tests.support.nightly import at_night
from tests.support.random_schemas import random_schema
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.cli.local_server import LocalServer

pytestmark = [
    # The SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
KEY = "tml-openai"
PROMPT = "The sky is"
MESSAGES = [
    {"role": "system", "content": "Answer like a pirate."},
    {"role": "user", "content": "What color is the sky?"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    os.environ["HF_HUB_OFFLINE"] = "1"
    with LocalServer(tmp_path_factory.mktemp("service"), **QUICK) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def service(server):
    with service_client(server.url, KEY) as made:
        yield made


@pytest.fixture(scope="module")
def trained(service, server):
    """The path of sampler weights that differ from the base model's."""
    trainer = service.create_lora_training_client(server.base_model, rank=4, seed=7).result()
    tokens = list(range(5, 25))
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 19},
    )
    trainer.forward_backward([datum], "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=1e-1)).result()
    return trainer.save_weights_for_sampler("for-openai").result().path


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY_MODEL)


def sampled(service, tokens, count=1, **what):
    """The SDK's samples. ``what`` names the weights, and the rest are sampling parameters."""
    weights = {name: what.pop(name) for name in ("base_model", "model_path") if name in what}
    sampler = service.create_sampling_client(**weights).result()
    prompt = types.ModelInput.from_ints(tokens)
    return sampler.sample(prompt, count, types.SamplingParams(**what)).result().sequences


def test_greedy_completions_are_the_sdks_samples(client, service, server, tokenizer):
    tokens = tokenizer.encode(PROMPT)
    (expected,) = sampled(
        service, tokens, base_model=server.base_model, max_tokens=12, temperature=0.0
    )
    for prompt in (PROMPT, tokens):
        answer = client.completions.create(
            model=server.base_model, prompt=prompt, max_tokens=12, temperature=0, logprobs=2
        )
        (choice,) = answer.choices
        found = choice.logprobs
        assert choice.text == tokenizer.decode(expected.tokens, skip_special_tokens=True)
        assert choice.finish_reason == expected.stop_reason
        assert len(found.tokens) >= 1
        assert found.token_logprobs == expected.logprobs[: len(found.tokens)]
        # The likeliest token is the one that greedy sampling takes.
        assert [max(top.values()) for top in found.top_logprobs] == found.token_logprobs
        assert answer.usage.completion_tokens == len(expected.tokens)
        assert answer.usage.prompt_tokens == len(tokens)


def test_several_choices_under_a_seed_are_the_sdks_samples(client, service, server, tokenizer):
    expected = sampled(
        service,
        tokenizer.encode(PROMPT),
        2,
        base_model=server.base_model,
        max_tokens=10,
        seed=11,
    )
    answer = client.completions.create(
        model=server.base_model, prompt=PROMPT, max_tokens=10, seed=11, n=2
    )
    said = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in expected]
    assert [choice.text for choice in answer.choices] == said
    assert said[0] != said[1]


def test_a_chat_uses_the_models_template(client, service, server, tokenizer):
    tokens = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    (expected,) = sampled(
        service, tokens, base_model=server.base_model, max_tokens=12, temperature=0.0
    )
    answer = client.chat.completions.create(
        model=server.base_model,
        messages=MESSAGES,
        max_completion_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer.decode(expected.tokens, skip_special_tokens=True)
    scored = choice.logprobs.content
    assert len(scored) >= 1
    assert [each.logprob for each in scored] == expected.logprobs[: len(scored)]
    assert all(len(each.top_logprobs) == 3 for each in scored)
    assert answer.usage.prompt_tokens == len(tokens)


def test_streams_have_the_text_of_whole_answers(client, server):
    ask = {"model": server.base_model, "max_tokens": 10, "seed": 3}
    whole = client.chat.completions.create(messages=MESSAGES, **ask)
    with client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **ask
    ) as stream:
        *chunks, last = list(stream)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage


def test_a_stream_in_pieces_is_the_whole_answer(client, server):
    """It has logprobs, parallel choices of several prompts, and stop strings that some of them
    meet.

    The temperature is so high that all kinds of tokens occur, even parts of characters.
    """
    ask = {"model": server.base_model, "prompt": [PROMPT, "日本"], "n": 3, "max_tokens": 300}
    ask |= {"seed": 5, "logprobs": 2, "temperature": 4}
    said = [choice.text for choice in client.completions.create(**ask).choices]
    for stop in (None, [said[0][40:43], said[4][60:62]]):
        whole = client.completions.create(stop=stop, **ask)
        with client.completions.create(stop=stop, stream=True, **ask) as stream:
            pieces = [chunk.choices[0] for chunk in stream]
        assert len({piece.index for piece in pieces[: len(pieces) // 2]}) > 1
        for choice in whole.choices:
            mine = [piece for piece in pieces if piece.index == choice.index]
            assert "".join(piece.text for piece in mine) == choice.text
            assert [piece.finish_reason for piece in mine[:-1]] == [None] * (len(mine) - 1)
            assert mine[-1].finish_reason == choice.finish_reason
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                found = [each for piece in mine for each in getattr(piece.logprobs, name) or []]
                assert found == getattr(choice.logprobs, name)
        if stop is None:
            assert len(pieces) > 2 * len(whole.choices)


def test_a_stop_string_is_cut(client, server):
    ask = {"model": server.base_model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    (whole,) = client.completions.create(**ask).choices
    stop = whole.text[4:7]
    (cut,) = client.completions.create(stop=[stop], **ask).choices
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert cut.finish_reason == "stop"


def test_sampler_weights_are_a_model_named_by_their_path(
    client, service, server, tokenizer, trained
):
    assert [each.id for each in client.models.list()] == [server.base_model, trained]
    assert client.models.retrieve(trained).id == trained
    assert client.models.retrieve(server.base_model).id == server.base_model
    tokens = tokenizer.encode(PROMPT)
    (expected,) = sampled(service, tokens, model_path=trained, max_tokens=12, temperature=0.0)
    ask = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 0}
    (found,) = client.completions.create(model=trained, **ask).choices
    (base,) = client.completions.create(model=server.base_model, **ask).choices
    assert found.text == tokenizer.decode(expected.tokens, skip_special_tokens=True)
    assert found.logprobs.token_logprobs == expected.logprobs[: len(found.logprobs.token_logprobs)]
    assert found.logprobs.token_logprobs != base.logprobs.token_logprobs


class ChangedLogits:
    """A greedy sample with changed logits, by transformers and NumPy."""

    def __init__(self, *, bias, presence=0.0, frequency=0.0):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(TINY_MODEL)
        self.bias, self.presence, self.frequency = bias, presence, frequency

    def logits(self, tokens):
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0, -1].double().numpy()

    def sample(self, prompt, count):
        """Return the tokens, and their logprobs before the changes."""
        drawn, logprobs = [], []
        for _ in range(count):
            logits = self.logits([*prompt, *drawn])
            changed = logits.copy()
            for token, bias in self.bias.items():
                changed[token] += bias
            for token in set(drawn):
                changed[token] -= self.presence + drawn.count(token) * self.frequency
            drawn.append(int(changed.argmax()))
            logprobs.append(logits[drawn[-1]] - np.logaddexp.reduce(logits))
        return drawn, logprobs


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": {787: -100, 13: -2.0, 300: 6.0}},
        {"presence": 2.0},
        {"frequency": 2.0},
        {"bias": {300: 20.0, 301: 19.5}, "presence": 1.0, "frequency": 0.5},
    ],
)
def test_biases_and_penalties_give_the_tokens_that_transformers_and_numpy_give(
    client, server, tokenizer, changes
):
    prompt, no_end = tokenizer.encode(PROMPT), {998: -100, 999: -100}
    changes = {**changes, "bias": no_end | changes.get("bias", {})}
    drawn, logprobs = ChangedLogits(**changes).sample(prompt, 16)
    assert drawn != ChangedLogits(bias=no_end).sample(prompt, 16)[0]
    ask = {
        "model": server.base_model,
        "prompt": prompt,
        **{"max_tokens": 16, "temperature": 0, "logprobs": 0},
        "logit_bias": {str(token): bias for token, bias in changes["bias"].items()},
        "presence_penalty": changes.get("presence"),
        "frequency_penalty": changes.get("frequency"),
        "extra_body": {"return_tokens_as_token_ids": True},
    }
    (found,) = client.completions.create(**ask).choices
    assert found.logprobs.tokens == [f"token_id:{token}" for token in drawn]
    assert found.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-3)
    pieces = [each.choices[0] for each in client.completions.create(**ask, stream=True)]
    assert "".join(each.text for each in pieces) == found.text


def test_the_best_of_several_samples_has_the_highest_mean_logprob(client, server):
    ask = {"model": server.base_model, "prompt": PROMPT, "seed": 3, "max_tokens": 8, "logprobs": 0}
    drawn = client.completions.create(**ask, n=6).choices
    means = [sum(each.logprobs.token_logprobs) / 8 for each in drawn]
    ranked = sorted(drawn, key=lambda each: -means[each.index])
    found = client.completions.create(**ask, n=2, best_of=6).choices
    assert [each.text for each in found] == [each.text for each in ranked[:2]]


def formed(client, server, schema, **options):
    """The texts of a chat's answers under a schema. All of them end by themselves."""
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    ask = {"model": server.base_model, "messages": MESSAGES, "response_format": form} | options
    choices = client.chat.completions.create(**ask).choices
    assert {each.finish_reason for each in choices} == {"stop"}
    return [each.message.content for each in choices]


@pytest.mark.parametrize(
    ("schemas", "each"), [(range(6), 10), at_night(range(100, 150), 20, id="1,000 answers")]
)
def test_every_answer_under_a_schema_parses_and_validates(client, server, schemas, each):
    """At temperature 1, with a model that was never trained on JSON."""
    for seed in schemas:
        schema = random_schema(seed)
        answers = formed(client, server, schema, n=each, seed=seed, max_tokens=1500)
        assert len(answers) == each
        for answer in answers:
            jsonschema.validate(json.loads(answer), schema)


class Colour(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    shade: typing.Literal["light", "dark"]
    parts: list[int] = pydantic.Field(max_length=3)


def test_the_client_parses_answers_into_a_pydantic_model(client, server):
    ask = {"messages": MESSAGES, "response_format": Colour, "max_tokens": 1000, "seed": 4}
    answer = client.chat.completions.parse(model=server.base_model, **ask)
    found = answer.choices[0].message.parsed
    assert isinstance(found, Colour)
    with client.chat.completions.stream(model=server.base_model, **ask) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.parsed == found
    assert streamed.content == answer.choices[0].message.content


def test_an_answer_is_any_json_object_a_choice_or_a_regular_expression(client, server):
    ask = {"model": server.base_model, "max_tokens": 1500, "seed": 8}
    chat = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
    (found,) = client.chat.completions.create(**ask, **chat, temperature=0.5).choices
    if found.finish_reason == "stop":
        assert isinstance(json.loads(found.message.content), dict)
    else:
        assert found.message.content.startswith("{")
    for outputs, pattern in (
        ({"choice": ["red", "dark blue"]}, "red|dark blue"),
        ({"regex": "[0-9]{3}-[xyz]+"}, "[0-9]{3}-[xyz]+"),
    ):
        extra = {"structured_outputs": outputs}
        (text,) = client.completions.create(**ask, prompt=PROMPT, extra_body=extra).choices
        assert re.fullmatch(pattern, text.text)


def test_a_schema_that_cannot_be_used_is_refused_with_the_reason(client, server):
    bad = {"type": "array", "items": {}, "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match=r"Unimplemented keys.*uniqueItems"):
        formed(client, server, bad)
    with pytest.raises(openai.BadRequestError, match="no text has this form"):
        formed(client, server, {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}})


def test_errors_are_those_of_the_openai_client(client, server, trained):
    with pytest.raises(openai.NotFoundError, match="gpt-4") as unknown:
        client.completions.create(model="gpt-4", prompt=PROMPT)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="frequency_penalty") as refused:
        client.completions.create(model=server.base_model, prompt=PROMPT, frequency_penalty=3)
    assert refused.value.param == "frequency_penalty"
    with pytest.raises(openai.BadRequestError, match="context of 2048"):
        client.completions.create(model=server.base_model, prompt=[5] * 2048)
    with pytest.raises(openai.AuthenticationError, match="tml-"):
        client.with_options(api_key="sk-other").models.list()
    with pytest.raises(openai.NotFoundError):
        client.with_options(api_key="tml-somebody-else").models.retrieve(trained)


def test_text_arrives_before_the_last_token_is_decoded(client, server):
    """It is never decoded: the client leaves when it has read the first of 128 long texts."""
    ask = {"model": server.base_model, "prompt": PROMPT, "temperature": 4}
    with client.completions.create(n=128, max_tokens=2000, stream=True, **ask) as stream:
        first = next(iter(stream))
    assert first.choices[0].text
    assert first.choices[0].finish_reason is None
    second = client.completions.create(max_tokens=4, **ask)
    server.stop()  # only one process may open the store
    with closing(sqlite3.connect(server.data_dir / "store.db")) as store:
        ended = dict(store.execute("SELECT scope, error FROM jobs"))
    server.start()
    assert "was cancelled" in ended[first.id]
    assert ended[second.id] is None
