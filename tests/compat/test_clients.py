"""Anthropic's client, LangChain and litellm against the real service, with tools and streaming.

The adapter is trained on one conversation, in which a tool is called: the clients must read the
call, send the result back and read the answer. The packages are in an environment of their own.
"""

import json
from typing import Any

import numpy as np
import pytest

from tuneserve_client import Client as TrainingClient
from tuneserve_client import Datum

from .client import API_KEY, Client
from .environments import HERE, environment

pytestmark = pytest.mark.timeout(2400)  # the first run makes the environment

QUESTION = {"role": "user", "content": "Do I need a coat in Oslo?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TEXT = "Yes, take a coat."
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
LANGCHAINS = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "type": "object",
        },
    },
}
CALLED: list[dict[str, Any]] = [
    QUESTION,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
    },
]
RESULTS = ("4 degrees, rain", "Oslo: 4 degrees, rain")
MOST_STEPS = 80
EXPECTED_CALLS = [["weather", {"city": "Oslo"}]] * 2


def conversations() -> list[tuple[list[dict[str, Any]], str]]:
    answered = [([*CALLED, {"role": "tool", "content": result}], TEXT) for result in RESULTS]
    return [([QUESTION], CALL), *answered]


@pytest.fixture(scope="module")
def calling(client: Client) -> str:
    """The path of a checkpoint that calls the tool, and answers when it has the result."""
    with TrainingClient(client.server.url, API_KEY, name="calls") as service:
        tokenizer = service.tokenizer()
        data = []
        for messages, said in conversations():
            for options in ({}, {"enable_thinking": False}):
                for tool in (TOOL, LANGCHAINS):
                    prompt = tokenizer.apply_chat_template(messages, tools=[tool], **options)
                    answer = tokenizer.encode(f"{said}<|im_end|>", special=False)
                    tokens = [*prompt, *answer]
                    weights = np.array([0.0] * (len(prompt) - 1) + [1.0] * len(answer), np.float32)
                    data.append(Datum(tokens[:-1], tokens[1:], weights))
        model = service.create_model(rank=8, seed=0)
        for _ in range(MOST_STEPS):
            passed = model.forward_backward(data)
            model.optim_step(5e-3)
            if passed.result().loss < 0.1:  # nats, of all answers together
                break
        else:
            pytest.fail(f"the loss is still {passed.result().loss:.2f}")
        path: str = model.save("calls").result()
        return path


def answers(client: Client, script: str, model: str) -> Any:
    python = environment("clients")
    file = str(HERE / "scripts" / script)
    printed = client.run(python, file, client.server.url, API_KEY, model)
    return json.loads(printed.splitlines()[-1])


def test_anthropics_client_calls_a_tool(client: Client, calling: str) -> None:
    found = answers(client, "talk_anthropic.py", calling)
    assert found["calls"] == EXPECTED_CALLS
    assert found["reasons"] == ["tool_use", "tool_use", "end_turn"]
    assert (found["text"], found["refused"]) == (TEXT, "not_found_error")
    counted, used = found["tokens"]
    assert counted == used + found["cached"]


def test_langchains_models_call_a_tool(client: Client, calling: str) -> None:
    found = answers(client, "talk_langchain.py", calling)
    assert set(found) == {"chat", "responses", "messages"}
    for each in found.values():  # structured output is a required call
        assert each == {"calls": EXPECTED_CALLS, "text": TEXT, "structured": "Oslo"}


def test_litellm_calls_a_tool(client: Client, calling: str) -> None:
    found = answers(client, "talk_litellm.py", calling)
    assert set(found) == {"openai", "anthropic"}
    for each in found.values():
        assert each == {"calls": EXPECTED_CALLS, "text": TEXT}


def test_a_checkpoint_is_named_behind_its_base_model(client: Client, calling: str) -> None:
    name = f"{client.server.base_model};{calling}"
    assert answers(client, "talk_anthropic.py", name)["calls"] == EXPECTED_CALLS
