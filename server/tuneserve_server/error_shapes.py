"""The errors of Anthropic's API: the routes that answer with them, and their bodies."""

from typing import Literal

from pydantic import BaseModel

ANTHROPIC_PREFIX = "/v1/messages"
ANTHROPIC_ALIAS = "/anthropic/api"
"""The hosted service's prefix of the Anthropic routes; they are served under both."""
_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicErrorBody(BaseModel):
    type: str
    message: str
    code: str


class AnthropicFailure(BaseModel):
    """The body of every answer under ``/v1/messages`` that is not 2xx."""

    type: Literal["error"] = "error"
    error: AnthropicErrorBody


def is_anthropic(path: str) -> bool:
    """Return whether the path is that of a route for Anthropic's clients."""
    return path.startswith((ANTHROPIC_PREFIX, ANTHROPIC_ALIAS))


def anthropic_failure(status: int, code: str, detail: str) -> AnthropicFailure:
    """Return an error in Anthropic's shape; ``code`` is this server's, beside Anthropic's type."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return AnthropicFailure(error=AnthropicErrorBody(type=kind, message=detail, code=code))
