"""The OpenAI-compatible routes, over the fake backend and a tokenizer of one letter per token.

Tokens 0 to 25 are a to z, then A to Z, 0 to 9 and the space; 63 ends a sequence. The fake backend's
sample s under a seed has token ``seed + s + p`` at place p, and the logprob of token y after x is
``-(1 + (x + y) % 8) / 8``.
"""

import asyncio
import json
import random
import string
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tuneserve_engine.backend.fake import FAKE_INFO
from tuneserve_engine.errors import UserError
from tuneserve_engine.queue.base import Overloaded
from tuneserve_server.deps import tenant_of
from tuneserve_server.errors import OPENAI_PREFIX

pytestmark = pytest.mark.anyio

LETTERS = string.ascii_letters + string.digits + " "
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}{{ m.role }} {{ m.content }} "
    "{% endfor %}{% if add_generation_prompt %}{{ voice or 'assistant' }}{% endif %}"
)
ASK = {"model": "tuneserve/fake", "prompt": "ab", "max_tokens": 3, "seed": 7}
CHAT = {
    "model": "tuneserve/fake",
    "messages": [{"role": "user", "content": "hi"}],  # "user hi assistant": 17 tokens
    "max_tokens": 3,
    "seed": 7,
}


def logprob(x: int, y: int) -> float:
    return -(1 + (x + y) % 8) / 8


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)} | {"<eos>": 63}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<eos>"])
    made.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": {"content": "<eos>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
async def speaking(api: Any, tokenizer: Path) -> Any:
    """The API with a worker whose base model has a tokenizer."""
    await api.start_worker(info=replace(FAKE_INFO, tokenizer_id=str(tokenizer)))
    return api


async def ask(api: Any, path: str, body: Any = None, *, key: str = "tml-a", **options: Any) -> Any:
    method = "GET" if body is None and not options else "POST"
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    if body is not None:
        options["json"] = body
    return await api.http.request(method, f"/v1{path}", headers=headers, **options)


async def complete(api: Any, **fields: Any) -> Any:
    response = await ask(api, "/completions", {**ASK, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def chat(api: Any, **fields: Any) -> Any:
    response = await ask(api, "/chat/completions", {**CHAT, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def assert_error(response: Any, status: int, code: str, param: str | None) -> str:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert int(response.headers["content-length"]) == len(response.content)
    message: str = error["message"]
    return message


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


async def test_choices_of_several_prompts_come_prompt_by_prompt(speaking: Any) -> None:
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


async def test_the_end_of_sequence_is_counted_but_not_shown(speaking: Any) -> None:
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


async def test_logprobs_are_of_each_token_and_of_the_likeliest(speaking: Any) -> None:
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


async def test_a_seed_repeats_and_without_one_answers_differ(speaking: Any) -> None:
    assert texts(await complete(speaking)) == texts(await complete(speaking))
    found = {texts(await complete(speaking, seed=None))[0] for _ in range(8)}
    assert len(found) > 1


async def test_fields_that_ask_for_nothing_are_accepted(speaking: Any) -> None:
    answer = await complete(
        speaking,
        **{"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        **{"presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "best_of": 1},
        **{"echo": False, "suffix": None, "anything": None, "top_k": -1, "top_p": 1},
    )
    assert texts(answer) == ["jkl"]


# --- chat ----------------------------------------------------------------------------------------


async def test_a_chat_completion_answers_what_the_template_makes_of_it(speaking: Any) -> None:
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


async def test_messages_may_come_in_parts_and_from_developers(speaking: Any) -> None:
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": "yo", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "a"},
    ]
    answer = await chat(speaking, messages=messages)
    made = len("system be user h\ni assistant yo user a assistant")
    assert answer["usage"]["prompt_tokens"] == made


async def test_the_template_has_the_options_of_the_request(speaking: Any) -> None:
    answer = await chat(speaking, chat_template_kwargs={"voice": "me"})
    assert answer["usage"]["prompt_tokens"] == len("user hi me")


async def test_chat_goes_on_to_the_context_and_max_completion_tokens_wins(speaking: Any) -> None:
    fields = {"max_tokens": None, "temperature": 0}
    answer = await chat(speaking, **fields)
    # From place 17 to the end of sequence, token 63, at the last place of 64.
    assert answer["usage"]["completion_tokens"] == 64 - 17
    assert answer["choices"][0]["message"]["content"] == LETTERS[17:]
    answer = await chat(speaking, max_completion_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


async def test_logprobs_of_a_chat_name_their_bytes(speaking: Any) -> None:
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


def events(response: Any) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    found = [each for each in response.text.split("\n\n")[:-1] if not each.startswith(":")]
    assert all(each.startswith("data: ") for each in found)
    return [each.removeprefix("data: ") for each in found]


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


async def test_a_stream_of_chat_comes_as_deltas(speaking: Any) -> None:
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


async def test_a_stream_says_that_it_waits(speaking: Any, tokenizer: Path) -> None:
    await speaking.stop_worker()
    asking = asyncio.create_task(ask(speaking, "/completions", {**ASK, "stream": True}))
    await asyncio.sleep(0.5)  # polls take 0.2 s here
    await speaking.start_worker(info=replace(FAKE_INFO, tokenizer_id=str(tokenizer)))
    response = await asking
    assert response.text.startswith(": waiting\n\n")
    assert json.loads(events(response)[0])["choices"][0]["text"] == "jkl"


async def test_a_request_that_fails_says_why_in_the_stream_too(
    speaking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> Any:
        raise UserError("this cannot be sampled")

    monkeypatch.setattr(speaking.backend, "sample", refuse)
    said = assert_error(await ask(speaking, "/completions", ASK), 400, "invalid_request", None)
    assert said == "this cannot be sampled"
    (event,) = events(await ask(speaking, "/completions", {**ASK, "stream": True}))
    assert json.loads(event)["error"]["message"] == said


# --- refusals ------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
    ({"frequency_penalty": -1}, "frequency_penalty", "not supported"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    ({"best_of": 3}, "best_of", "not a field"),
    ({"echo": True}, "echo", "not supported"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"min_p": 0.1}, "min_p", "not a field"),
    ({"temperature": -1}, "temperature", "at least 0"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "at most 1"),
    ({"top_k": 0}, "top_k", "at least 1"),
    ({"n": 0}, "n", "1 to 128"),
    ({"n": 129}, "n", "1 to 128"),
    ({"max_tokens": 0}, "max_tokens", "1 to"),
    ({"seed": -1}, "seed", "0 to"),
    ({"stop": ["", "x"]}, "stop", "empty"),
    ({"stop": ["x"] * 300}, "stop", "256"),
    ({"logprobs": 6}, "logprobs", "0 to 5"),
    ({"prompt": []}, "prompt", "1 to 128"),
    ({"prompt": [[1]] * 129}, "prompt", "1 to 128"),
    ({"prompt": ""}, None, "no tokens"),
    ({"prompt": [64]}, None, "0 to 63"),
    ({"prompt": "a" * 64}, None, "context of 64"),
    ({"prompt": None}, "prompt", "prompt"),
    ({"model": ""}, "model", "at least 1"),
]
REFUSED_CHAT: list[tuple[dict[str, Any], str | None, str]] = [
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "not a field"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "1 to"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "role"),
    ({"messages": [{"role": "user", "tool_calls": [{}]}]}, "tool_calls", "messages[0]."),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "content",
    ),
    (
        {"messages": [CHAT["messages"][0], {"role": "system", "content": "x"}]},  # type: ignore[index]
        "messages",
        "system comes first",
    ),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED)
async def test_what_cannot_be_done_is_refused_by_name(
    speaking: Any, fields: dict[str, Any], param: str | None, said: str
) -> None:
    for stream in (False, True):
        response = await ask(speaking, "/completions", {**ASK, **fields, "stream": stream})
        assert said in assert_error(response, 400, "invalid_request", param)


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED_CHAT)
async def test_what_cannot_be_done_in_a_chat_is_refused_by_name(
    speaking: Any, fields: dict[str, Any], param: str | None, said: str
) -> None:
    response = await ask(speaking, "/chat/completions", {**CHAT, **fields})
    assert said in assert_error(response, 400, "invalid_request", param)


async def test_a_base_model_without_template_is_sent_to_completions(
    speaking: Any, tokenizer: Path
) -> None:
    (tokenizer / "tokenizer_config.json").unlink()
    response = await ask(speaking, "/chat/completions", CHAT)
    assert "/v1/completions" in assert_error(response, 400, "invalid_request", "model")
    assert texts(await complete(speaking)) == ["jkl"]


async def test_a_tokenizer_that_is_not_there_is_503_until_it_is(
    speaking: Any, tokenizer: Path
) -> None:
    path = tokenizer / "tokenizer.json"
    path.rename(path.with_suffix(".away"))
    response = await ask(speaking, "/completions", ASK)
    assert str(tokenizer) in assert_error(response, 503, "model_unavailable", None)
    assert int(response.headers["retry-after"]) > 0
    path.with_suffix(".away").rename(path)
    assert texts(await complete(speaking)) == ["jkl"]


async def test_a_base_model_that_no_worker_has_served_is_503(api: Any) -> None:
    assert_error(await ask(api, "/completions", ASK), 503, "model_unavailable", None)


async def test_requests_without_a_usable_key_are_401(speaking: Any) -> None:
    response = await ask(speaking, "/completions", ASK, key="sk-other")
    assert_error(response, 401, "unauthorized", None)
    response = await speaking.http.post("/v1/completions", json=ASK, headers={"X-API-Key": "tml-a"})
    assert response.status_code == 200  # the SDK's header will do


async def test_failures_of_all_kinds_have_openais_shape(speaking: Any) -> None:
    assert_error(await ask(speaking, "/nothing"), 404, "not_found", None)
    assert_error(await ask(speaking, "/completions"), 405, "method_not_allowed", None)
    for content in (b"", b"null", b"[]", b"{", b"\xff", b'{"a": NaN}', b"[" * 500):
        response = await ask(speaking, "/completions", content=content)
        param = response.json()["error"]["param"]
        assert_error(response, 400, "invalid_request", param)
        assert param in (None, "model")  # the first that is missing


async def test_too_many_requests_are_429(speaking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    polls, tenant = speaking.services.polls, tenant_of("tml-a")
    with ExitStack() as crowd:
        for _ in range(speaking.services.settings.max_polls_per_tenant):
            crowd.enter_context(polls.counted(tenant))
        response = await ask(speaking, "/completions", ASK)
    assert_error(response, 429, "overloaded", None)
    assert response.headers["retry-after"] == "1"

    async def full(*_: Any) -> Any:
        raise Overloaded("your key has 9 unfinished requests", 5)

    monkeypatch.setattr(speaking.services.store, "submit", full)
    response = await ask(speaking, "/completions", ASK)
    assert_error(response, 429, "overloaded", None)
    assert response.json()["error"]["type"] == "rate_limit_error"


async def test_no_mutated_body_makes_a_5xx(speaking: Any) -> None:
    rng = random.Random(5)
    odd = [None, True, -1, 0, 2**70, 1e300, "", "x", [], {}, [[]], ["a", 1], {"type": "text"}]
    for path, body in (("/completions", ASK), ("/chat/completions", CHAT)):
        names = [*body, "stop", "logprobs", "n", "temperature", "stream_options", "top_p", "tools"]
        for _ in range(150):
            changed = {**body, rng.choice(names): rng.choice(odd), rng.choice(names): "x"}
            response = await ask(speaking, path, changed)
            assert response.status_code < 500, (changed, response.text)


# --- who waits -----------------------------------------------------------------------------------


async def test_a_client_that_leaves_is_not_waited_for(speaking: Any) -> None:
    await speaking.stop_worker()
    for stream in (False, True):
        body = json.dumps({**ASK, "stream": stream}).encode()
        messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
        headers = [(b"authorization", b"Bearer tml-a")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": headers,
            "state": {},
        }

        async def receive(messages: list[Any] = messages) -> Any:
            return messages.pop(0) if len(messages) > 1 else messages[0]

        async def send(_: Any) -> None: ...

        async with asyncio.timeout(5):
            await speaking.app(scope, receive, send)
        with speaking.services.polls.counted(tenant_of("tml-a")) as held:
            assert held == 1  # this one


async def test_who_waits_is_told_that_the_service_stops(speaking: Any) -> None:
    await speaking.stop_worker()
    asking = asyncio.create_task(ask(speaking, "/completions", ASK))
    await asyncio.sleep(0.3)
    speaking.services.polls.release()
    assert_error(await asking, 503, "store_unavailable", None)


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
    assert listed["data"][1]["parent"] == "tuneserve/fake"
    assert (await ask(speaking, f"/models/{path}")).json() == listed["data"][1]
    assert (await ask(speaking, "/models/tuneserve/fake")).json() == listed["data"][0]
    assert texts(await complete(speaking, model=path)) == ["jkl"]
    # To others it does not exist.
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
