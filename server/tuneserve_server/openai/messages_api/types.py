"""The bodies of Anthropic's Messages API, with the fields that are supported."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tuneserve_client.wire.body import MAX_INT32, Request
from tuneserve_server.openai.types import ToolName


class MessageBlock(Request):
    """A block of content; ``type`` says which of the fields it has."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = Field(default=None, description="Not read.")
    id: str | None = None
    name: ToolName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list["MessageBlock"] | None = None
    is_error: bool | None = None


class MessageTurn(Request):
    role: Literal["user", "assistant", "system"]
    content: str | list[MessageBlock]


class ClientTool(Request):
    type: str | None = Field(default=None, description="`custom`, or left out.")
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = Field(
        default=None, description="A JSON schema of the input, which the template shows."
    )
    strict: bool | None = Field(default=None, description="`true` is refused.")


class ClientToolChoice(Request):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOption(Request):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(default=None, description="A target; it is not enforced.")


class CountTokensRequest(Request):
    model: Annotated[str, Field(min_length=1, max_length=512)]
    messages: Annotated[list[MessageTurn], Field(min_length=1)]
    system: str | list[MessageBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ClientToolChoice | None = None
    thinking: ThinkingOption | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
