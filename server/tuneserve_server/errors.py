"""The errors that end an HTTP request, and the handlers that answer them.

ApiError
├── KeyRefused          401  no usable key
│   └── TokenRefused    401  a token that has expired, or whose key has: exchange the key again
├── ScopeMissing        403  the key may not do this
├── HostNotAllowed      403  the server does not answer to the name it was called by
├── TooManyLogins       429  too many failed logins from one address
├── BadRequest          400  readable, but cannot be carried out
│   └── ExportNeeded    400  only a worker can make the download: export the model instead
├── Malformed           422  the body cannot be read
├── UnknownResource     404  unknown here, or another tenant's: the answer is the same
├── SessionClosed       410  the session takes no more requests
├── ResultGone          410  the result was dropped at the end of its retention
├── BodyTooLarge        413
├── UnknownEncoding     415
├── BodyTooSlow         408  the client may send it again
├── HeadersTooSlow      408  answered below the application
├── HeadersTooLarge     431  answered below the application
├── LinkInvalid         403  a download link that this server did not sign, or that has expired
├── TooManyRequests     429  a limit is reached; send it again after the time given
├── BudgetUsedUp        402  the tenant's device time of the day is used up
├── DiskFull            503  the server's disk is nearly full; send it again after the time given
├── CheckpointDamaged   500  the file is not what was written
├── ModelUnavailable    503  the base model's tokenizer or shapes are not available now
├── StoreCorrupt        503  a backup has to be restored
└── StoreUnavailable    503  nothing was accepted; the client may send it again

Every body is ``{"detail", "code"}`` with a Content-Length: the SDK takes a 400 without one for a
proxy's answer. Under ``/v1`` the body has OpenAI's shape, ``{"error": {"message", "type", "param",
"code"}}``, and under ``/v1/messages`` Anthropic's. Bodies never repeat the input.
"""

import logging
from typing import ClassVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tuneserve_client.wire.types import Failure
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.store import errors as store_errors
from tuneserve_engine.store.errors import (
    KeyReused,
    LimitReached,
    ResultDropped,
    StoreFailed,
    StoreReplaced,
)
from tuneserve_engine.telemetry.log_throttle import ThrottledLog
from tuneserve_server.error_shapes import ANTHROPIC_ALIAS, anthropic_failure, is_anthropic

logger = logging.getLogger(__name__)
_put_off = ThrottledLog(logger)  # thousands of clients may retry each second


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str


class OpenAIFailure(BaseModel):
    """The body of every answer under ``/v1`` that is not 2xx."""

    error: ErrorBody


class ApiError(Exception):
    """An error that answers the request with its status and code."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    retry_after_s: int | None = None
    param: str | None = None  # the field at fault, for OpenAI's bodies

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


class KeyRefused(ApiError):
    status = 401
    code = "unauthorized"


class TokenRefused(KeyRefused):
    @property
    def headers(self) -> dict[str, str]:
        """Tell an SDK to exchange its key for another token (RFC 6750, section 3.1)."""
        return {"WWW-Authenticate": 'Bearer error="invalid_token"'}


class ScopeMissing(ApiError):
    status = 403
    code = "scope_missing"


class HostNotAllowed(ApiError):
    status = 403
    code = "host_not_allowed"


class TooManyLogins(ApiError):
    status = 429
    code = "too_many_failed_logins"
    retry_after_s = 1

    def __init__(self) -> None:
        super().__init__(
            "too many requests with a wrong API key came from your address; correct the key and "
            "try again after a second"
        )


class BadRequest(ApiError):
    status = 400
    code = "invalid_request"


class InvalidField(BadRequest):
    """A bad request that names the field at fault in ``param``."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class ExportNeeded(BadRequest):
    code = "export_needed"


class Malformed(ApiError):
    status = 422
    code = "malformed"


class UnknownResource(ApiError):
    status = 404
    code = "not_found"


class ModelNotFound(UnknownResource):
    code = "model_not_found"
    param = "model"


class SessionClosed(ApiError):
    status = 410
    code = "session_ended"


class ResultGone(ApiError):
    status = 410
    code = "result_expired"


class BodyTooLarge(ApiError):
    status = 413
    code = "body_too_large"


class UnknownEncoding(ApiError):
    status = 415
    code = "unknown_encoding"


class BodyTooSlow(ApiError):
    status = 408
    code = "body_too_slow"


class HeadersTooSlow(ApiError):
    status = 408
    code = "headers_too_slow"


class HeadersTooLarge(ApiError):
    status = 431
    code = "headers_too_large"


class LinkInvalid(ApiError):
    status = 403
    code = "link_invalid"


class TooManyRequests(ApiError):
    status = 429
    code = "overloaded"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BudgetUsedUp(ApiError):
    status = 402  # at a 402 the SDK pauses; at a 429 it gives up after five minutes
    code = "budget_spent"
    retry_after_s = 30  # clients wait no longer than this at once, then try again


class DiskFull(ApiError):
    status = 503
    code = "disk_full"
    retry_after_s = 15


class CheckpointDamaged(ApiError):
    status = 500
    code = "checkpoint_damaged"


class ModelUnavailable(ApiError):
    status = 503
    code = "model_unavailable"
    retry_after_s = 5


class StoreCorrupt(ApiError):
    status = 503
    code = "store_damaged"
    retry_after_s = 30  # an operator has to repair the store

    def __init__(self) -> None:
        super().__init__(
            "the server's store is damaged, so nothing new is accepted; nothing was changed; ask "
            "the operator to restore a backup: healthz and the server's log describe the damage"
        )


class StoreUnavailable(ApiError):
    status = 503
    code = "store_unavailable"
    retry_after_s = 1  # the store may be back at once, and clients wait exactly this long


_HANDLED = (
    ApiError,
    UserError,
    KeyReused,
    ResultDropped,
    LimitReached,
    StoreFailed,
    ConnectionError,  # the store is unreachable, or closed because the server stops
    Exception,
)
HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
OPENAI_PREFIX = "/v1/"
OPENAI_ALIAS = "/oai/api"
"""The hosted service's prefix of the OpenAI routes; they are served under both."""
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


def failure(
    status: int, code: str, detail: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return the answer to a request that failed."""
    body = Failure(detail=detail, code=code).model_dump()
    return JSONResponse(body, status_code=status, headers=headers)


def is_openai(request: Request) -> bool:
    """Return whether the request is to one of the routes for OpenAI's and Anthropic's clients."""
    path = str(request.scope["path"])
    return path.startswith((OPENAI_PREFIX, OPENAI_ALIAS, ANTHROPIC_ALIAS))


def openai_failure(error: ApiError) -> OpenAIFailure:
    """Return the error in OpenAI's shape."""
    return _openai_failure(error.status, error.code, str(error), error.param)


def _openai_failure(status: int, code: str, detail: str, param: str | None) -> OpenAIFailure:
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return OpenAIFailure(error=ErrorBody(message=detail, type=kind, param=param, code=code))


def _failed(
    request: Request, status: int, code: str, detail: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return the answer in the shape that the route's clients expect."""
    if not is_openai(request):
        return failure(status, code, detail, headers)
    body: BaseModel = _openai_failure(status, code, detail, None)
    if is_anthropic(request.scope["path"]):
        body = anthropic_failure(status, code, detail)
    return JSONResponse(body.model_dump(), status_code=status, headers=headers)


def as_api_error(error: Exception) -> ApiError:
    """Return the ``ApiError`` that answers an error of a lower layer."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return BadRequest(str(error))
    if isinstance(error, KeyReused):
        return Malformed(str(error))
    if isinstance(error, ResultDropped):
        return ResultGone("this result is no longer stored; submit the request again")
    if isinstance(error, LimitReached):
        return TooManyRequests(str(error), error.retry_after_s)
    if isinstance(error, store_errors.StoreDamaged):
        return StoreCorrupt()
    if isinstance(error, StoreReplaced):  # its message says what the operator has to restore
        return StoreUnavailable(str(error))
    if isinstance(error, StoreFailed | ConnectionError):
        return StoreUnavailable(
            "the store is not available; nothing was changed; send the request again"
        )
    return ApiError("internal error; the server's log has the details")


def _note(request: Request, status: int, code: str, detail: str) -> None:
    """Note the failure for the dashboard, if it has a tenant or is a 5xx.

    A GET of something that does not exist is an ordinary answer and is not noted.
    """
    services = getattr(request.app.state, "services", None)  # the operator's socket has none
    tenant = getattr(request.state, "tenant", "")
    is_absent = status == UnknownResource.status and request.method == "GET"
    if services is not None and not is_absent and (tenant or status >= 500):
        route = request.scope.get("route")
        services.recent.record_error(tenant, code, detail, getattr(route, "path", ""))


def answer(request: Request, error: ApiError) -> JSONResponse:
    """Return the answer in the shape that the route's clients expect."""
    if is_openai(request) and not is_anthropic(request.scope["path"]):
        body = openai_failure(error).model_dump()  # which names the field at fault
        return JSONResponse(body, status_code=error.status, headers=error.headers)
    return _failed(request, error.status, error.code, str(error), error.headers)


def _handle(request: Request, error: Exception) -> JSONResponse:
    read = as_api_error(error)
    _note(request, read.status, read.code, str(read))
    if read.status == 503:
        _put_off.warn(type(error).__name__, f"requests are answered 503: {error}")
    elif isinstance(error, LimitReached):  # SDKs retry without telling their users
        tenant = getattr(request.state, "tenant", "")
        _put_off.warn("LimitReached", f"requests of tenant {tenant} are answered 429: {error}")
    elif read.status >= 500:
        logger.error("a request failed", exc_info=error)
    return answer(request, read)


def _handle_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = HTTP_CODES.get(error.status_code, "http_error")
    _note(request, error.status_code, code, error.detail)
    headers = dict(error.headers or {})
    return _failed(request, error.status_code, code, error.detail, headers)


def _handle_parameters(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    parts = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    detail = "; ".join(parts)[:1000]
    _note(request, Malformed.status, Malformed.code, detail)
    return _failed(request, Malformed.status, Malformed.code, detail)


def _handle_gone(request: Request, error: Exception) -> JSONResponse:
    """Answer a client that disconnected while sending; the answer is never read."""
    return _failed(request, 400, BadRequest.code, "the connection ended before the request did")


def install(app: FastAPI) -> None:
    """Install the handlers that give every failure of ``app`` one shape."""
    for handled in _HANDLED:
        app.add_exception_handler(handled, _handle)
    app.add_exception_handler(ClientDisconnect, _handle_gone)
    app.add_exception_handler(HTTPException, _handle_http)
    app.add_exception_handler(RequestValidationError, _handle_parameters)
