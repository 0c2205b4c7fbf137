"""Responses that fail, and the fields of a request that a response repeats."""

import json

from tuneserve_server.errors import ApiError, BadRequest
from tuneserve_server.openai.generation import AnswerHead
from tuneserve_server.openai.message_parser import MessageFormat
from tuneserve_server.openai.responses import Choice
from tuneserve_server.openai.responses_api.answers import ResponseAnswers, asked_fields
from tuneserve_server.openai.responses_api.types import ResponsesRequest


def test_a_stream_that_fails_ends_with_the_failed_response() -> None:
    for error, code in ((ApiError("no"), "server_error"), (BadRequest("no"), "invalid_prompt")):
        answers = ResponseAnswers({}, MessageFormat(), len)
        answers.begin(AnswerHead("resp_1", "m", 1, 7))
        answers.say(0, Choice("some", None, None), is_first=True)
        (sent,) = answers.fail(error)
        name, data = sent.strip().split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == "event: response.failed"
        assert event["response"]["status"] == "failed"
        assert event["response"]["error"] == {"code": code, "message": "no"}
        assert event["response"]["output"][0]["content"][0]["text"] == "some"


def test_a_response_repeats_what_the_request_left_open_with_its_defaults() -> None:
    fields = asked_fields(ResponsesRequest(model="m", input="hi"))
    assert (fields["temperature"], fields["top_p"], fields["tool_choice"]) == (1.0, 1.0, "auto")
    assert (fields["tools"], fields["store"], fields["parallel_tool_calls"]) == ([], False, True)
