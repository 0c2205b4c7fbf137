"""The OpenAI-compatible routes, over the fake backend and a tokenizer of one letter per token.

Tokens 0 to 25 are a to z, then A to Z, 0 to 9 and the space. Token 63 ends a sequence. Sample s of
the fake backend under a seed has token ``seed + s + p`` at position p, and the logprob of token y
after x is ``-(1 + (x + y) % 8) / 8``.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.server.openai.openai_case import (
    ASK,
    CHAT,
    LETTERS,
    Streaming,
    ask,
    assert_error,
    chat,
    complete,
    events,
    logprob,
    texts,
)
from tests.support.fake_backend import FAKE_INFO
from tuneserve_server.errors import OPENAI_PREFIX

pytestmark = pytest.mark.anyio

# --- completions ---------------------------------------------------------------------------------


async def test_a_completion_has_openais_shape(speaking: Any) -> None:
    answer = await complete(speaking)
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": "tuneserve/fake",
        "choices": [{"index": 0, "text": "jkl", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_without_max_tokens_a_completion_has_sixteen(speaking: Any) -> None:
    assert texts(await complete(speaking, max_tokens=None)) == ["jklmnopqrstuvwxy"]


async def test_choices_of_several_prompts_are_ordered_by_prompt(speaking: Any) -> None:
    answer = await complete(speaking, prompt=["ab", "abcd"], n=2)
    assert texts(answer) == ["jkl", "klm", "lmn", "mno"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("prompt", "said"),
    [([0, 1], ["jkl"]), ([[0, 1], [0, 1, 2, 3]], ["jkl", "lmn"]), (["ab"], ["jkl"])],
)
async def test_prompts_may_be_tokens(speaking: Any, prompt: Any, said: list[str]) -> None:
    assert texts(await complete(speaking, prompt=prompt)) == said


async def test_temperature_zero_is_greedy(speaking: Any) -> None:
    assert texts(await complete(speaking, temperature=0)) == ["cde"]


async def test_the_end_of_sequence_token_is_counted_but_not_shown(speaking: Any) -> None:
    answer = await complete(speaking, seed=59, max_tokens=9, logprobs=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("9 ", "stop")
    assert choice["logprobs"]["tokens"] == ["9", " "]
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("stop", "said", "why"),
    [
        ("lm", "jk", "stop"),
        (["zz", "l"], "jk", "stop"),
        ("j", "", "stop"),
        ("zz", "jklm", "length"),
        ([], "jklm", "length"),
    ],
)
async def test_a_stop_string_is_cut_from_the_text(
    speaking: Any, stop: Any, said: str, why: str
) -> None:
    answer = await complete(speaking, max_tokens=4, stop=stop, logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (said, why)
    assert choice["logprobs"]["tokens"] == list(said)


async def test_logprobs_cover_each_token_and_the_likeliest_ones(speaking: Any) -> None:
    (choice,) = (await complete(speaking, logprobs=2))["choices"]
    before, sampled = [1, 9, 10], [9, 10, 11]
    likeliest = [sorted(range(64), key=lambda y, x=x: (-logprob(x, y), y))[:2] for x in before]
    names = dict(enumerate(LETTERS)) | {63: "<eos>"}
    assert choice["logprobs"] == {
        "tokens": ["j", "k", "l"],
        "token_logprobs": [logprob(x, y) for x, y in zip(before, sampled, strict=True)],
        "top_logprobs": [
            {names[y]: logprob(x, y) for y in found}
            for x, found in zip(before, likeliest, strict=True)
        ],
        "text_offset": [0, 1, 2],
    }


# --- echo ----------------------------------------------------------------------------------------


SCORED: dict[str, Any] = {"echo": True, "max_tokens": 0, "logprobs": 0}


def scores(tokens: list[int]) -> list[float | None]:
    """The logprob of each token after the one before it."""
    later = [logprob(x, y) for x, y in itertools.pairwise(tokens)]
    return [None, *later]


async def test_an_echo_starts_with_the_prompt_and_its_logprobs(speaking: Any) -> None:
    """This is the request of lm-evaluation-harness for a log-likelihood."""
    answer = await complete(speaking, prompt=[[0, 1, 2], [5, 4]], echo=True, logprobs=1)
    first, second = answer["choices"]
    assert (first["text"], second["text"]) == ("abcklm", "fejkl")
    said = first["logprobs"]
    assert said["tokens"] == list("abcklm")
    assert said["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert said["token_logprobs"] == scores([0, 1, 2, 10, 11, 12])
    best = [min(y for y in range(64) if (x + y) % 8 == 0) for x in (0, 1, 2, 10, 11)]
    assert said["top_logprobs"] == [None, *({LETTERS[y]: -0.125} for y in best)]
    assert second["logprobs"]["token_logprobs"] == scores([5, 4, 9, 10, 11])
    assert answer["usage"]["completion_tokens"] == 6


async def test_an_echo_has_the_logprob_of_the_end_of_sequence(speaking: Any) -> None:
    """lm-evaluation-harness takes the last logprob as that of its one token, whatever it is."""
    ask = {"echo": True, "logprobs": 1, "seed": 61}
    (choice,) = (await complete(speaking, **ask, max_tokens=1))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert choice["logprobs"]["tokens"] == ["a", "b", "<eos>"]
    assert choice["logprobs"]["token_logprobs"] == scores([0, 1, 63])
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    (cut,) = (await complete(speaking, **ask | {"seed": 59}, max_tokens=9, stop=" "))["choices"]
    assert (cut["text"], cut["logprobs"]["tokens"]) == ("ab9", ["a", "b", "9"])


@pytest.mark.parametrize(("n", "said"), [(1, ["ab"]), (2, ["ab", "ab"])])
async def test_an_echo_of_no_tokens_is_the_prompt_alone(
    speaking: Any, n: int, said: list[str]
) -> None:
    answer = await complete(speaking, echo=True, max_tokens=0, logprobs=0, n=n)
    assert texts(answer) == said
    for choice in answer["choices"]:
        assert choice["logprobs"]["token_logprobs"] == scores([0, 1])
        assert choice["logprobs"]["top_logprobs"] is None
        assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("tokens", [1, 63, 64, 65])
async def test_an_echo_of_no_tokens_takes_as_many_tokens_as_the_trainer(
    speaking: Any, tokens: int
) -> None:
    """No token is sampled, and the last token is a target only: the context is 64."""
    answer = await complete(speaking, prompt=[1, 2] * (tokens // 2) + [1] * (tokens % 2), **SCORED)
    (choice,) = answer["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == tokens


async def test_a_longer_echo_is_refused(speaking: Any) -> None:
    response = await ask(speaking, "/completions", {**ASK, "prompt": [1] * 66, **SCORED})
    assert "send up to 65" in assert_error(response, 400, "invalid_request", None)


async def test_a_stop_string_in_the_prompt_does_not_end_an_echo(speaking: Any) -> None:
    answer = await complete(speaking, prompt="lmab", echo=True, stop="m", logprobs=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("lmabl", "stop")
    assert choice["logprobs"]["tokens"] == list("lmabl")


async def test_without_logprobs_an_echo_is_text_only(speaking: Any) -> None:
    (choice,) = (await complete(speaking, echo=True))["choices"]
    assert (choice["text"], choice["logprobs"]) == ("abjkl", None)


# --- names of tokens -----------------------------------------------------------------------------


async def test_tokens_may_be_named_by_their_ids(speaking: Any) -> None:
    (choice,) = (await complete(speaking, logprobs=1, return_tokens_as_token_ids=True))["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:9", "token_id:10", "token_id:11"]
    assert all(
        name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top
    )


@pytest.mark.parametrize("echo", [False, True])
async def test_best_of_returns_the_samples_with_the_highest_mean_logprob(
    speaking: Any, echo: bool
) -> None:
    def mean(sample: int) -> float:
        drawn = [9 + sample + place for place in range(3)]
        return sum(map(logprob, [1, *drawn], drawn)) / 3

    best = sorted(range(5), key=lambda sample: -mean(sample))
    assert best[:2] != [0, 1]  # the order in which they are drawn
    answer = await complete(speaking, n=2, best_of=5, echo=echo)
    said = [LETTERS[9 + sample : 12 + sample] for sample in best[:2]]
    assert texts(answer) == [echo * "ab" + each for each in said]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 15
    assert texts(await complete(speaking, n=5, best_of=5))[0] == "jkl"  # all, as they were drawn


async def test_without_a_seed_each_prompt_gets_its_own(speaking: Any) -> None:
    answer = await complete(speaking, prompt=["ab"] * 8, seed=None)
    assert len(set(texts(answer))) > 1


async def test_a_seed_repeats_an_answer_and_without_one_answers_differ(speaking: Any) -> None:
    assert texts(await complete(speaking)) == texts(await complete(speaking))
    found = {texts(await complete(speaking, seed=None))[0] for _ in range(8)}
    assert len(found) > 1


async def test_fields_with_neutral_values_are_accepted(speaking: Any) -> None:
    answer = await complete(
        speaking,
        **{"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        **{"presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "best_of": 1},
        **{"echo": False, "suffix": None, "anything": None, "top_k": 0, "top_p": 1},
        # Clients of vLLM send these with their defaults.
        **{"min_p": 0, "min_tokens": 0, "repetition_penalty": 1.0, "length_penalty": 1.0},
        **{"ignore_eos": False, "skip_special_tokens": True, "use_beam_search": False},
        **{"spaces_between_special_tokens": True, "include_stop_str_in_output": False},
        **{"stop_token_ids": [], "return_tokens_as_token_ids": False, "logprobs": False},
    )
    assert answer["choices"][0]["logprobs"] is None
    assert texts(answer) == ["jkl"]


# --- chat ----------------------------------------------------------------------------------------


async def test_a_chat_completion_answers_the_rendered_template(speaking: Any) -> None:
    answer = await chat(speaking)
    assert answer.pop("id").startswith("chatcmpl-")
    del answer["created"]
    assert answer == {
        "object": "chat.completion",
        "model": "tuneserve/fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "yzA", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 17,
            "completion_tokens": 3,
            "total_tokens": 20,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_messages_may_have_parts_and_the_developer_role(speaking: Any) -> None:
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": "yo", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "a"},
    ]
    answer = await chat(speaking, messages=messages)
    made = len("system be user h\ni assistant yo user a assistant")
    assert answer["usage"]["prompt_tokens"] == made


async def test_the_template_receives_the_options_of_the_request(speaking: Any) -> None:
    answer = await chat(speaking, chat_template_kwargs={"voice": "me"})
    assert answer["usage"]["prompt_tokens"] == len("user hi me")


async def test_a_chat_runs_to_the_context_and_max_completion_tokens_takes_precedence(
    speaking: Any,
) -> None:
    fields = {"max_tokens": None, "temperature": 0}
    answer = await chat(speaking, **fields)
    # From position 17 to the end of sequence, token 63, at the last position of 64.
    assert answer["usage"]["completion_tokens"] == 64 - 17
    assert answer["choices"][0]["message"]["content"] == LETTERS[17:]
    answer = await chat(speaking, max_completion_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


async def test_logprobs_of_a_chat_include_bytes(speaking: Any) -> None:
    answer = await chat(speaking, max_tokens=1, logprobs=True, top_logprobs=1)
    before, sampled = LETTERS.index("t"), LETTERS.index("y")
    best = min(y for y in range(64) if (before + y) % 8 == 0)
    assert answer["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "y",
                "logprob": logprob(before, sampled),
                "bytes": [ord("y")],
                "top_logprobs": [
                    {"token": LETTERS[best], "logprob": -0.125, "bytes": [ord(LETTERS[best])]}
                ],
            }
        ],
        "refusal": None,
    }


# --- streams -------------------------------------------------------------------------------------


async def test_a_stream_of_completions_ends_with_usage_and_done(speaking: Any) -> None:
    body = {**ASK, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = events(await ask(speaking, "/completions", body))
    assert done == "[DONE]"
    first, second, last = map(json.loads, chunks)
    assert first["id"] == second["id"] == last["id"]
    assert [first["choices"][0]["text"], second["choices"][0]["text"]] == ["jkl", "klm"]
    assert second["choices"][0]["index"] == 1
    assert (first["usage"], last["choices"]) == (None, [])
    assert last["usage"]["completion_tokens"] == 6


async def test_a_stream_of_a_chat_consists_of_deltas(speaking: Any) -> None:
    body = {**CHAT, "stream": True}
    *chunks, _ = events(await ask(speaking, "/chat/completions", body))
    found = [json.loads(chunk) for chunk in chunks]
    assert {each["object"] for each in found} == {"chat.completion.chunk"}
    assert [each["choices"][0]["delta"] for each in found] == [
        {"role": "assistant", "content": ""},
        {"content": "yzA"},
        {},
    ]
    assert [each["choices"][0]["finish_reason"] for each in found] == [None, None, "length"]
    assert all("usage" not in each for each in found)


async def test_a_waiting_stream_says_so(speaking: Any, tokenizer: Path) -> None:
    await speaking.stop_worker()
    async with Streaming(speaking, "/completions", {**ASK, "stream": True}) as stream:
        await stream.until(lambda stream: stream.text.startswith(": waiting\n\n"))
        await speaking.start_worker(info=replace(FAKE_INFO, tokenizer_id=str(tokenizer)))
        await stream.done()
        assert stream.said == {0: "jkl"}


# --- models --------------------------------------------------------------------------------------


async def test_models_are_the_base_models_and_the_callers_sampler_checkpoints(
    speaking: Any,
) -> None:
    model = await speaking.model(await speaking.session())
    request = {"model_id": model, "seq_id": 1, "path": "mine", "kind": "snapshot"}
    saved = await speaking.result(await speaking.post("/save_weights_for_sampler", request))
    path = saved["path"]
    listed = (await ask(speaking, "/models")).json()
    assert listed["object"] == "list"
    assert [each["id"] for each in listed["data"]] == ["tuneserve/fake", path]
    request = {"model_id": model, "seq_id": 2, "path": "state"}
    resumable = (await speaking.result(await speaking.post("/save_weights", request)))["path"]
    request = {"model_id": model, "seq_id": 3, "path": "out"}
    await speaking.result(await speaking.post("/save_weights_external", request))
    listed = (await ask(speaking, "/models")).json()  # an export is for download only
    assert [each["id"] for each in listed["data"]] == ["tuneserve/fake", resumable, path]
    listed["data"].pop(1)
    assert texts(await complete(speaking, model=resumable)) == ["jkl"]
    assert listed["data"][1]["parent"] == "tuneserve/fake"
    assert (await ask(speaking, f"/models/{path}")).json() == listed["data"][1]
    assert (await ask(speaking, "/models/tuneserve/fake")).json() == listed["data"][0]
    assert texts(await complete(speaking, model=path)) == ["jkl"]
    # The hosted service's form of the name, and its prefix of these routes.
    named = f"tuneserve/fake;{path}"
    assert texts(await complete(speaking, model=named)) == ["jkl"]
    assert (await ask(speaking, f"/models/{named}")).json() == listed["data"][1]
    response = await ask(speaking, "/completions", {**ASK, "model": f"other;{path}"})
    assert "'tuneserve/fake'" in assert_error(response, 404, "model_not_found", "model")
    headers = {"Authorization": "Bearer tml-a", "Content-Type": "application/json"}
    response = await speaking.http.get("/oai/api/v1/models", headers=headers)
    assert [each["id"] for each in response.json()["data"]] == ["tuneserve/fake", resumable, path]
    response = await speaking.http.post("/oai/api/v1/completions", headers=headers, json=ASK)
    assert texts(response.json()) == ["jkl"]
    response = await speaking.http.post(
        "/oai/api/v1/completions", headers=headers, json={**ASK, "model": "gpt-4"}
    )
    assert_error(response, 404, "model_not_found", "model")
    # For other tenants it does not exist.
    others = (await ask(speaking, "/models", key="tml-b")).json()
    assert [each["id"] for each in others["data"]] == ["tuneserve/fake"]
    for response in (
        await ask(speaking, f"/models/{path}", key="tml-b"),
        await ask(speaking, "/completions", {**ASK, "model": path}, key="tml-b"),
        await ask(speaking, "/completions", {**ASK, "model": "gpt-4"}),
        await ask(speaking, "/models/gpt-4"),
    ):
        said = assert_error(response, 404, "model_not_found", "model")
        assert f"{OPENAI_PREFIX}models" in said
