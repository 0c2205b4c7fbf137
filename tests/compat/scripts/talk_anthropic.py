"""Calls a tool through the ``anthropic`` client, whole and in a stream, and prints all answers."""

import json
import sys
from typing import Any

import anthropic

QUESTION: Any = {"role": "user", "content": "Do I need a coat in Oslo?"}
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def main(url: str, key: str, model: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    # This version of the client has no temperature; the server does.
    greedy = {"temperature": 0}
    asked: Any = {"model": model, "max_tokens": 64, "tools": [TOOL], "extra_body": greedy}
    whole = client.messages.create(messages=[QUESTION], **asked)
    with client.messages.stream(messages=[QUESTION], **asked) as stream:
        streamed = stream.get_final_message()
    calls = [
        (block.name, block.input)
        for message in (whole, streamed)
        for block in message.content
        if block.type == "tool_use"
    ]
    use = next(block for block in streamed.content if block.type == "tool_use")
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "4 degrees, rain"}
    history: Any = [
        QUESTION,
        {"role": "assistant", "content": streamed.content},
        {"role": "user", "content": [result]},
    ]
    with client.messages.stream(messages=history, **asked) as stream:
        text = "".join(stream.text_stream)
        reason = stream.get_final_message().stop_reason
    counted = client.messages.count_tokens(model=model, messages=[QUESTION], tools=[TOOL])
    try:
        client.messages.create(messages=[QUESTION], **{**asked, "model": "nothing"})
    except anthropic.NotFoundError as error:
        refused: Any = error.body
    print(
        json.dumps(
            {
                "calls": calls,
                "reasons": [whole.stop_reason, streamed.stop_reason, reason],
                "text": text,
                "tokens": [counted.input_tokens, whole.usage.input_tokens],
                "cached": whole.usage.cache_read_input_tokens,
                "refused": refused["error"]["type"],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
