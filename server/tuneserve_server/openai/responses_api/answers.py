"""Answers of the Responses API: a response with its items, whole or as events."""

import uuid
from collections.abc import Callable, Sequence
from itertools import count

from tuneserve_server.errors import ApiError
from tuneserve_server.openai.call_formats import ToolCall
from tuneserve_server.openai.generation import AnswerHead, data_event
from tuneserve_server.openai.message_parser import (
    MessageFormat,
    MessageParser,
    MessagePart,
    joined,
)
from tuneserve_server.openai.responses import Choice, Json, SampledAnswer
from tuneserve_server.openai.responses_api.types import ResponsesRequest


class ResponseAnswers:
    """The answers to one request for a response.

    ``form`` says how the model writes, and ``count_tokens`` counts the tokens of its reasoning.
    """

    id_prefix = "resp_"

    def __init__(
        self, asked: Json, form: MessageFormat, count_tokens: Callable[[str], int]
    ) -> None:
        self._asked = asked
        self._form = form
        self._count_tokens = count_tokens
        self._parser = MessageParser(form)
        self._numbers = count()
        self._head: AnswerHead | None = None
        self._items: list[Json] = []  # the items of the stream; the last one may be open
        self._is_open = False

    def whole(self, head: AnswerHead, answers: Sequence[SampledAnswer]) -> Json:
        """Return the whole response."""
        (answer,) = answers
        (choice,) = answer.choices
        parser = MessageParser(self._form)
        parts = joined([*parser.push(choice.text), *parser.end()])
        items = [_filled(_item(part), part) for part in parts]
        return self._ended(head, answer, items, is_over=parser.is_over)

    def begin(self, head: AnswerHead) -> list[str]:
        """Return the events that begin the response."""
        self._head = head
        response = self._response(head, "in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def say(self, index: int, choice: Choice, *, is_first: bool) -> list[str]:
        """Return the events for more of the response."""
        parts = self._parser.push(choice.text)
        if choice.finish_reason is not None:
            parts = joined([*parts, *self._parser.end()])
        return [event for part in parts for event in self._events(part)]

    def finish(self, answers: Sequence[SampledAnswer]) -> list[str]:
        """Return the events that end the response."""
        (answer,) = answers
        assert self._head is not None
        is_cut = answer.choices[0].finish_reason == "length" and not self._parser.is_over
        closed = self._closed("incomplete" if is_cut else "completed")
        response = self._ended(self._head, answer, self._items, is_over=self._parser.is_over)
        return [*closed, self._event(f"response.{response['status']}", response=response)]

    def fail(self, error: ApiError) -> list[str]:
        """Return the event of a response that failed."""
        assert self._head is not None
        response = self._response(self._head, "failed", self._items)
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        response["error"] = {"code": code, "message": str(error)}
        return [self._event("response.failed", response=response)]

    # --- responses -------------------------------------------------------------------------------

    def _response(self, head: AnswerHead, status: str, items: Sequence[Json]) -> Json:
        return {
            "id": head.key,
            "object": "response",
            "created_at": head.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": head.model,
            "output": list(items),
            "usage": None,
            **self._asked,
        }

    def _ended(
        self, head: AnswerHead, answer: SampledAnswer, items: list[Json], *, is_over: bool
    ) -> Json:
        (choice,) = answer.choices
        is_whole = choice.finish_reason == "stop" or is_over
        if items and not is_whole and items[-1]["type"] == "message":
            items[-1]["status"] = "incomplete"
        response = self._response(head, "completed" if is_whole else "incomplete", items)
        if not is_whole:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        thought = "".join(
            part["text"]
            for item in items
            if item["type"] == "reasoning"
            for part in item["content"]
        )
        response["usage"] = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": answer.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": self._count_tokens(thought) if thought else 0
            },
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }
        return response

    # --- events ----------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: object) -> str:
        return data_event({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)

    def _of_item(self, kind: str, **fields: object) -> str:
        """Return an event about the last item."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(f"response.{kind}", **place, **fields)

    def _events(self, part: MessagePart) -> list[str]:
        item = _item(part)
        found = []
        if not (self._is_open and self._items[-1]["type"] == item["type"]):
            found = [*self._closed(), *self._opened(item)]
        last = self._items[-1] = _filled(self._items[-1], part)
        if isinstance(part, ToolCall):
            sent = {"delta": part.arguments_json}
            found.append(self._of_item("function_call_arguments.delta", **sent))
            return [*found, *self._closed()]
        fields: Json = {"content_index": 0, "delta": part.text}
        if last["type"] == "message":
            fields["logprobs"] = []
        return [*found, self._of_item(f"{_kind(last)}.delta", **fields)]

    def _opened(self, item: Json) -> list[str]:
        self._items.append(item)
        self._is_open = True
        shown = {**item, "content": []} if "content" in item else item
        place = len(self._items) - 1
        found = [self._event("response.output_item.added", output_index=place, item=shown)]
        if "content" in item:
            part = item["content"][0]
            found.append(self._of_item("content_part.added", content_index=0, part=part))
        return found

    def _closed(self, status: str = "completed") -> list[str]:
        """Return the events that end the open item, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        if "status" in item:
            item["status"] = status
        if item["type"] == "function_call":
            named = {"name": item["name"], "arguments": item["arguments"]}
            found = [self._of_item("function_call_arguments.done", **named)]
        else:
            (part,) = item["content"]
            fields: Json = {"content_index": 0, "text": part["text"]}
            if item["type"] == "message":
                fields["logprobs"] = []
            found = [
                self._of_item(f"{_kind(item)}.done", **fields),
                self._of_item("content_part.done", content_index=0, part=part),
            ]
        place = len(self._items) - 1
        return [*found, self._event("response.output_item.done", output_index=place, item=item)]


def _kind(item: Json) -> str:
    return "output_text" if item["type"] == "message" else "reasoning_text"


def _item(part: MessagePart) -> Json:
    """Return an item of the part's kind without its text or arguments."""
    id_ = uuid.uuid4().hex
    if isinstance(part, ToolCall):
        call = {"name": part.name, "arguments": "", "call_id": f"call_{id_[:24]}"}
        return {"type": "function_call", "id": f"fc_{id_}", "status": "in_progress", **call}
    if part.is_reasoning:
        content: Json = {"type": "reasoning_text", "text": ""}
        return {"type": "reasoning", "id": f"rs_{id_}", "summary": [], "content": [content]}
    content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    message = {"type": "message", "id": f"msg_{id_}", "role": "assistant"}
    return {**message, "status": "in_progress", "content": [content]}


def _filled(item: Json, part: MessagePart) -> Json:
    """Return the item with more of its text, or with its arguments."""
    status = {"status": "completed"} if "status" in item else {}
    if isinstance(part, ToolCall):
        return {**item, **status, "arguments": part.arguments_json}
    (content,) = item["content"]
    return {**item, **status, "content": [{**content, "text": content["text"] + part.text}]}


def asked_fields(request: ResponsesRequest) -> Json:
    """Return the fields of the request that its response repeats."""
    tools = [
        {"strict": False, **each.model_dump(exclude_none=True)} for each in request.tools or []
    ]
    choice = request.tool_choice or "auto"
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": tools,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
    }
