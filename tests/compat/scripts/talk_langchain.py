"""Calls a tool through LangChain's chat models, whole and in a stream, and prints all answers."""

import json
import sys
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: 4 degrees, rain"


class Place(BaseModel):
    """The weather of a city."""

    city: str = Field()


Place.__name__ = "weather"  # the name under which the model was trained to call


def main(url: str, key: str, model: str) -> None:
    options: Any = {"model": model, "max_tokens": 64, "temperature": 0, "max_retries": 0}
    chats: Any = {
        "chat": ChatOpenAI(base_url=f"{url}/v1", api_key=key, **options),
        "responses": ChatOpenAI(
            base_url=f"{url}/v1", api_key=key, use_responses_api=True, store=False, **options
        ),
        "messages": ChatAnthropic(base_url=url, api_key=key, **options),
    }
    found = {}
    for name, chat in chats.items():
        bound = chat.bind_tools([weather])
        question = HumanMessage("Do I need a coat in Oslo?")
        whole = bound.invoke([question])
        streamed = None
        for piece in bound.stream([question]):
            streamed = piece if streamed is None else streamed + piece
        assert streamed is not None
        (call,) = streamed.tool_calls
        result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
        answer = bound.invoke([question, streamed, result])
        calls = [(each["name"], each["args"]) for each in (*whole.tool_calls, call)]
        structured = chat.with_structured_output(Place, method="function_calling")
        found[name] = {
            "calls": calls,
            "text": answer.text,
            "structured": structured.invoke([question]).city,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
