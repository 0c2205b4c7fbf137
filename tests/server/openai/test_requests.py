"""OpenAI's bodies as commands: what their fields become, and the fields that are refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.fake_backend import FAKE_INFO
from tuneserve_engine.core.jobs import SampleCommand
from tuneserve_server.errors import InvalidField
from tuneserve_server.openai import requests
from tuneserve_server.openai.requests import Echo, Scoring
from tuneserve_server.openai.types import ChatCompletionRequest, CompletionRequest


def completion(**fields: Any) -> CompletionRequest:
    body = {"model": "m", "prompt": [1, 2, 3], "seed": 7} | fields
    return requests.parse(CompletionRequest, json.dumps(body).encode())


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "seed": 7} | fields
    return requests.parse(ChatCompletionRequest, json.dumps(body).encode())


def commands(request: Any, *prompts: list[int]) -> list[SampleCommand]:
    return requests.samples(request, prompts or [[1, 2, 3]], "f-1", FAKE_INFO)


PLAIN = SampleCommand([1, 2, 3], 7, "f-1")


def test_a_completion_has_16_tokens_and_a_chat_the_rest_of_the_context_unless_it_says_so() -> None:
    assert commands(completion()) == [replace(PLAIN, max_tokens=16)]
    assert commands(chat()) == [PLAIN]
    assert commands(chat(max_tokens=4)) == [replace(PLAIN, max_tokens=4)]
    assert commands(chat(max_tokens=4, max_completion_tokens=5)) == [replace(PLAIN, max_tokens=5)]


def test_options_reach_the_command_of_every_prompt() -> None:
    request = completion(
        n=3, max_tokens=2, temperature=0.0, top_p=0.5, top_k=0, stop=["a"], logprobs=4
    )
    expected = replace(
        PLAIN,
        num_samples=3,
        max_tokens=2,
        temperature=0.0,
        top_p=0.5,
        stop_strings=["a"],
        topk_sample_logprobs=4,
    )
    assert commands(request, [1, 2, 3], [4]) == [expected, replace(expected, prompt=[4])]


def test_biases_and_penalties_reach_the_command() -> None:
    fields = {"logit_bias": {"5": -100, "07": 0.5}, "presence_penalty": -2, "frequency_penalty": 2}
    expected = {"logit_bias": {5: -100, 7: 0.5}, "presence_penalty": -2, "frequency_penalty": 2}
    assert commands(completion(**fields)) == [replace(PLAIN, max_tokens=16, **expected)]
    assert commands(chat(**fields)) == [replace(PLAIN, **expected)]


def test_best_of_is_the_number_of_samples() -> None:
    request = completion(n=2, best_of=5)
    assert commands(request) == [replace(PLAIN, max_tokens=16, num_samples=5)]
    assert requests.kept(request) == 2
    assert commands(completion(n=3, best_of=3, stream=True))[0].num_samples == 3


def test_null_means_the_default() -> None:
    fields = dict.fromkeys(("n", "max_tokens", "stop", "temperature", "top_p", "logprobs", "tools"))
    assert commands(completion(**fields)) == [replace(PLAIN, max_tokens=16)]


def test_no_stops_are_no_additional_stops() -> None:
    (command,) = commands(completion(stop=[]))
    assert (command.stop_tokens, command.stop_strings) == (None, None)


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"temperature": -1.0}, "temperature", "it must be finite and at least 0"),
        ({"top_p": 0.0}, "top_p", "it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p", "it must be above 0 and at most 1"),
        ({"n": 0}, "n", "it must be 1 to 256"),
        ({"max_tokens": 0}, "max_tokens", "it must be 1 to"),
        ({"logprobs": 6}, "logprobs", "it must be 0 to 5"),
        ({"stop": ["a", ""]}, "stop", "empty string"),
        ({"seed": -1}, "seed", "it must be 0 to"),
        ({"presence_penalty": -2.1}, "presence_penalty", "-2.1; it must be -2 to 2"),
        ({"frequency_penalty": 3}, "frequency_penalty", "it must be -2 to 2"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "101.* for token 5; it must be -100 to 100"),
        ({"logit_bias": {"64": 1}}, "logit_bias", "token 64; tokens of .* are 0 to 63"),
        ({"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias", "301 tokens; .* is 300"),
        ({"n": 3, "best_of": 2}, "best_of", "2, below n, which is 3"),
        ({"best_of": 257}, "best_of", "it must be 1 to 256"),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of", "leave out stream or best_of"),
    ],
)
def test_a_value_outside_its_limits_is_refused_by_name(
    fields: dict[str, Any], param: str, told: str
) -> None:
    with pytest.raises(InvalidField, match=f"^{param} .*{told}") as refused:
        commands(completion(**fields))
    assert refused.value.param == param


def test_fields_that_ask_for_nothing_or_change_no_answer_are_accepted() -> None:
    completion(user="me", best_of=1, logit_bias={}, min_p=0, suffix="", tools=None)
    completion(n=3, best_of=3)
    chat(echo=False, store=True, tool_choice="auto", response_format={"type": "text"})


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"logit_bias": {"a": 1}}, "logit_bias", "token id in decimal digits"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "token id in decimal digits"),
        ({"logit_bias": [5]}, "logit_bias", "^logit_bias"),
        ({"logit_bias": {"5": "much"}}, "logit_bias", "^logit_bias"),
        ({"min_p": 0.1}, "min_p", "or send 0"),
        ({"colour": 1}, "colour", "not a field that this server knows"),
        ({"max_token": 1}, "max_token", r"did you mean max_tokens\? Rename it"),
        ({"prompt": 5}, "prompt", "^prompt"),
        ({"temperature": "hot"}, "temperature", "^temperature"),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(
    fields: dict[str, Any], param: str, told: str
) -> None:
    with pytest.raises(InvalidField, match=told) as refused:
        completion(**fields)
    assert refused.value.param == param


def test_a_field_of_a_message_is_refused_with_its_place() -> None:
    noted = {"role": "assistant", "content": "", "annotations": [{"type": "url_citation"}]}
    with pytest.raises(InvalidField, match=r"^messages\[1\]\.annotations is not supported"):
        chat(messages=[{"role": "user", "content": "hi"}, noted])


def test_a_problem_names_a_field_only_if_it_begins_with_one() -> None:
    assert requests.named(CompletionRequest, "prompt: too long").param == "prompt"
    assert requests.named(CompletionRequest, "the body is not JSON").param is None
    assert requests.named(CompletionRequest, "").param is None


def test_a_prompt_is_tokens_or_several_lists_of_them() -> None:
    text: Any = None  # tokens need no tokenizer
    assert requests.prompts(completion(), text, FAKE_INFO) == [[1, 2, 3]]
    assert requests.prompts(completion(prompt=[[1], [2, 3]]), text, FAKE_INFO) == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([], "prompt has 0 prompts; one request takes 1 to 128"),
        ([[1]] * 129, "prompt has 129 prompts"),
        ([64], "the prompt has token 64"),
        ([1] * 64, "the prompt has 64 tokens"),
    ],
)
def test_prompts_beyond_the_limits_are_refused(prompt: Any, told: str) -> None:
    text: Any = None
    with pytest.raises(InvalidField, match=told):
        requests.prompts(completion(prompt=prompt), text, FAKE_INFO)


@pytest.mark.parametrize(
    ("logprobs", "wanted", "top"),
    [(None, False, 0), (False, False, 0), (True, True, 1), (0, True, 0), (5, True, 5)],
)
def test_logprobs_of_a_completion_are_a_number_or_a_switch(
    logprobs: Any, wanted: bool, top: int
) -> None:
    assert requests.scoring(completion(logprobs=logprobs)) == Scoring(wanted, top)


def test_logprobs_of_a_chat_have_their_own_number() -> None:
    assert requests.scoring(chat()) == Scoring(False, 0)
    assert requests.scoring(chat(logprobs=True, top_logprobs=20)) == Scoring(True, 20)
    with pytest.raises(InvalidField, match="top_logprobs is 2 without logprobs"):
        requests.scoring(chat(top_logprobs=2))
    with pytest.raises(InvalidField, match="top_logprobs is 21; it must be 0 to 20"):
        requests.scoring(chat(logprobs=True, top_logprobs=21))


def test_an_echo_without_tokens_scores_the_prompt_alone() -> None:
    assert requests.echo(completion()) is Echo.NONE
    assert requests.echo(completion(echo=True)) is Echo.BEFORE
    assert requests.echo(completion(echo=True, max_tokens=0)) is Echo.ALONE
    (scored,) = commands(completion(echo=True, max_tokens=0, logprobs=2))
    assert (scored.max_tokens, scored.prompt_logprobs, scored.topk_prompt_logprobs) == (0, True, 2)
    (plain,) = commands(completion(echo=True, max_tokens=0))
    assert (plain.max_tokens, plain.prompt_logprobs) == (1, False)  # the token is not shown
    with pytest.raises(InvalidField, match="echo is true in a stream"):
        requests.echo(completion(echo=True, stream=True))


def test_only_completions_name_tokens_by_id() -> None:
    assert requests.names_by_id(completion(return_tokens_as_token_ids=True))
    assert not requests.names_by_id(completion())
    assert not requests.names_by_id(chat())
