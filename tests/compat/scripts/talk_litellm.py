"""Calls a tool through litellm, whole and in a stream, and prints all answers."""

import json
import sys
from typing import Any

import litellm

QUESTION: Any = {"role": "user", "content": "Do I need a coat in Oslo?"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def main(url: str, key: str, model: str) -> None:
    found = {}
    for prefix, base in (("openai", f"{url}/v1"), ("anthropic", url)):
        asked: Any = {
            "model": f"{prefix}/{model}",
            "api_base": base,
            "api_key": key,
            "tools": [TOOL],
            "max_tokens": 64,
            "temperature": 0,
        }
        whole = litellm.completion(messages=[QUESTION], **asked)
        pieces = list(litellm.completion(messages=[QUESTION], stream=True, **asked))
        streamed: Any = litellm.stream_chunk_builder(pieces)
        messages = [answer.choices[0].message for answer in (whole, streamed)]
        calls = [call for message in messages for call in message.tool_calls]
        result = {"role": "tool", "tool_call_id": calls[-1].id, "content": "4 degrees, rain"}
        history = [QUESTION, messages[-1].model_dump(exclude_none=True), result]
        answer = litellm.completion(messages=history, **asked)
        found[prefix] = {
            "calls": [(each.function.name, json.loads(each.function.arguments)) for each in calls],
            "text": answer.choices[0].message.content,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
