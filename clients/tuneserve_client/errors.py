"""The errors of this client, one class for each way to react.

    TuneserveError
    ├── Unreachable         no answer came within the deadline
    ├── Refused             the server answered with a status: nothing was accepted
    │   ├── InvalidRequest  400, 405, 413, 415, 422, 431: the request is wrong
    │   ├── Unauthorized    401: the key is missing or invalid
    │   ├── Forbidden       403: not allowed with this key or link
    │   ├── NotFound        404: it does not exist, or is not yours
    │   ├── SessionEnded    410: continue from a checkpoint in a new session
    │   ├── ResultExpired   410: the server no longer stores the result
    │   ├── Overloaded      429 until the deadline: a limit of the queue is reached
    │   ├── BudgetSpent     402: the day's device time is used up; the client waits, and a
    │   │                   request that is sent only once raises it
    │   └── ServerFault     5xx until the deadline: the server's own fault, or its disk is full
    ├── ModelInterrupted    an earlier request of the model was not accepted
    └── RequestFailed       the request was accepted and ended in an error, which is final
        └── LossFailed      the caller's loss function raised; nothing was trained

Every error has a ``code`` (the server's, stable), a ``category`` (``user`` or ``server``, the side
at fault), a ``status`` (the HTTP status, or None), and ``retry_after_s`` if the server sent it.
"""

from typing import Literal

Category = Literal["user", "server"]


class TuneserveError(Exception):
    """The base class of all errors that this client raises about a request."""

    code: str = "unknown"
    category: Category = "server"
    status: int | None = None
    retry_after_s: float | None = None


class Unreachable(TuneserveError):
    """The error of a request without an answer until the deadline.

    The server may or may not have accepted the request.
    """

    code = "unreachable"


class Refused(TuneserveError):
    """The error of an answer that is not 2xx."""

    category: Category = "user"

    def __init__(
        self, message: str, *, status: int, code: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidRequest(Refused): ...


class Unauthorized(Refused): ...


class Forbidden(Refused): ...


class NotFound(Refused): ...


class SessionEnded(Refused): ...


class ResultExpired(Refused): ...


class Overloaded(Refused): ...


class BudgetSpent(Refused): ...


class ServerFault(Refused):
    category: Category = "server"


class ModelInterrupted(TuneserveError):
    """The error of a model's requests after a request that could not be sent."""

    code = "model_interrupted"


class RequestFailed(TuneserveError):
    """The error of a request that was accepted and failed. A retry is a new request."""

    code = "request_failed"

    def __init__(
        self,
        message: str,
        *,
        category: Category,
        request_id: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.category = category
        self.code = code or self.code
        self.request_id = request_id


class LossFailed(RequestFailed):
    """The error of a custom loss that raised or returned invalid gradients.

    ``__cause__`` is the exception that the loss raised, if it did.
    """

    code = "loss_failed"

    def __init__(self, message: str) -> None:
        super().__init__(message, category="user")


_BY_CODE = {"session_ended": SessionEnded, "result_expired": ResultExpired}
_BY_STATUS = {
    401: Unauthorized,
    402: BudgetSpent,
    403: Forbidden,
    404: NotFound,
    429: Overloaded,
}


def refusal(status: int, code: str, message: str, retry_after_s: float | None = None) -> Refused:
    """Return the error of an answer that is not 2xx."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if kind is None:
        kind = InvalidRequest if status < 500 else ServerFault
    return kind(message, status=status, code=code, retry_after_s=retry_after_s)
