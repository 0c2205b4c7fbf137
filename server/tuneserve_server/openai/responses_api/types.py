"""The bodies of OpenAI's Responses API, with the fields that are supported."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tuneserve_client.wire.body import MAX_INT32, Request
from tuneserve_server.openai.types import ToolName


class InputPart(Request):
    """A part of an item's content; ``type`` says what it is."""

    type: str
    text: str | None = None


class InputItem(Request):
    """An item of the conversation; ``type`` says which of the fields it has."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: ToolName | None = None
    arguments: str | None = Field(default=None, description="A JSON object, as text.")
    output: str | list[InputPart] | None = None
    id: str | None = Field(default=None, description="Not read.")
    status: str | None = Field(default=None, description="Not read.")
    summary: list[InputPart] | None = Field(
        default=None, description="Must be empty: the reasoning is in `content`."
    )


class ResponseTool(Request):
    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="A JSON schema of the arguments, which the template shows."
    )
    strict: bool | None = Field(default=None, description="`true` is refused.")


class ResponseToolName(Request):
    type: Literal["function"]
    name: ToolName


class ResponsesRequest(Request):
    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=MAX_INT32)] = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolName | None = None
    parallel_tool_calls: bool | None = Field(
        default=None, description="With `false`, an answer ends after its first call."
    )
    text: dict[str, Any] | None = Field(
        default=None, description='Its `format` may be `{"type": "text"}`.'
    )
    stream: bool | None = None
    store: bool | None = Field(default=None, description="`true` is refused.")
    metadata: dict[str, Any] | None = Field(default=None, description="Repeated in the answer.")
    chat_template_kwargs: dict[str, Any] | None = None
