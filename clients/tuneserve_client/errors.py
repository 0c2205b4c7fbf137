"""What can go wrong, one class for each way to react to it.

    TuneserveError
    ├── Unreachable         nobody answered within the deadline
    ├── Refused             the server answered with a status: nothing was accepted
    │   ├── InvalidRequest  400, 405, 413, 415, 422, 431: the request is wrong
    │   ├── Unauthorized    401: no key, or not a usable one
    │   ├── Forbidden       403: not with this key or link
    │   ├── NotFound        404: it does not exist, or is not yours
    │   ├── SessionEnded    410: go on from a checkpoint in a new session
    │   ├── ResultExpired   410: the result was kept for its time and dropped
    │   ├── Overloaded      429: a limit of the queue, until the deadline
    │   ├── BudgetSpent     402: the day's device time is used; not raised, but waited for
    │   └── ServerFault     5xx until the deadline: the server's own fault, or its disk is full
    ├── ModelInterrupted    an earlier request of the model was not accepted
    └── RequestFailed       it was accepted and ended in an error: the future's, final
        └── LossFailed      a loss function of the caller's raised; nothing was trained

Every one has ``code`` (the server's, stable), ``category`` (whose fault: ``user`` or ``server``),
``status`` (of HTTP, or None) and ``retry_after_s`` where the server said it.
"""

from typing import Literal

Category = Literal["user", "server"]


class TuneserveError(Exception):
    """Anything that this client raises about a request."""

    code: str = "unknown"
    category: Category = "server"
    status: int | None = None
    retry_after_s: float | None = None


class Unreachable(TuneserveError):
    """No answer until the deadline; what was sent may have been accepted or not."""

    code = "unreachable"


class Refused(TuneserveError):
    """An answer that is not 2xx."""

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
    """Requests of a model run in order, and one is missing that could not be sent."""

    code = "model_interrupted"


class RequestFailed(TuneserveError):
    """The request was accepted and ended in an error. Sending it again is a new request."""

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
    """A custom loss raised, or returned what is no gradient; its cause is the ``__cause__``."""

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
    """The error of an answer that is not 2xx."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if kind is None:
        kind = InvalidRequest if status < 500 else ServerFault
    return kind(message, status=status, code=code, retry_after_s=retry_after_s)
