"""The requests of evaluation harnesses, and what the harnesses read in the answers.

The bodies were recorded from lm_eval 0.4.13 (``local-completions``, class ``LocalCompletionsAPI``
of ``lm_eval/models/openai_completions.py``) and from inspect_ai 0.3.285 (``openai-api``,
``inspect_ai/model/_providers/openai_compatible.py``). ``tests/compat/test_eval.py`` runs the
packages themselves.
"""

import itertools
from typing import Any

import pytest

from tests.server.openai.openai_case import ask, logprob

pytestmark = pytest.mark.anyio

MODEL = {"model": "tuneserve/fake"}
TASK = {"temperature": 0, "seed": 1234}
LOGLIKELIHOOD = {**MODEL, **TASK, "max_tokens": 1, "logprobs": 1, "echo": True}


def likelihood(choice: Any, context: int) -> tuple[float, bool]:
    """The sum and the greediness of a continuation, by the arithmetic of lm_eval's
    ``parse_logprobs``: the last logprob is that of the one sampled token.
    """
    said = choice["logprobs"]
    own, top = (said[name][context:-1] for name in ("token_logprobs", "top_logprobs"))
    return sum(own), all(x == max(y.values()) for x, y in zip(own, top, strict=True))


@pytest.mark.parametrize(
    ("prompt", "context"),
    [
        ([3, 1, 4], 1),
        ([3, 1, 4, 1, 5], 4),
        ([7, 1, 7, 1], 2),  # each is the likeliest after the one before
    ],
)
async def test_the_loglikelihood_of_lm_eval_is_that_of_the_continuation(
    speaking: Any, prompt: list[int], context: int
) -> None:
    answer = (await ask(speaking, "/completions", {**LOGLIKELIHOOD, "prompt": [prompt]})).json()
    (choice,) = answer["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
    each = [logprob(x, y) for x, y in itertools.pairwise(prompt)][context - 1 :]
    best = [-0.125] * len(each)
    assert likelihood(choice, context) == (pytest.approx(sum(each)), each == best)


async def test_a_batch_of_lm_eval_is_answered_in_order(speaking: Any) -> None:
    prompts = [[3, 1, 4], [2, 7, 1, 8]]
    answer = (await ask(speaking, "/completions", {**LOGLIKELIHOOD, "prompt": prompts})).json()
    first, second = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert likelihood(first, 2)[0] == pytest.approx(logprob(1, 4))
    assert likelihood(second, 3)[0] == pytest.approx(logprob(1, 8))


async def test_generate_until_of_lm_eval_stops_at_its_strings(speaking: Any) -> None:
    body = {"prompt": [[0, 1]], **MODEL, **TASK, "max_tokens": 8, "stop": ["e", "<eos>"]}
    (choice,) = (await ask(speaking, "/completions", body)).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("cd", "stop")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_tokens": 4, "temperature": 0.0, "seed": 1, "stop": ["x"], "top_p": 0.9, "n": 2},
        {"frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {"5": -100}},
        {"logprobs": True, "top_logprobs": 3},
    ],
)
async def test_each_option_of_inspect_is_accepted(speaking: Any, config: dict[str, Any]) -> None:
    """The fields of ``openai_completion_params`` of ``inspect_ai/model/_openai.py``, without those
    of tools, reasoning and schemas.
    """
    body = {**MODEL, "messages": [{"role": "user", "content": "The sky is"}], **config}
    answer = (await ask(speaking, "/chat/completions", body)).json()
    assert len(answer["choices"]) == config.get("n", 1)
    for choice in answer["choices"]:
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] in ("stop", "length")
        assert (choice["logprobs"] is not None) == ("logprobs" in config)
    assert answer["usage"]["total_tokens"] > 0
