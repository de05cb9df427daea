"""One error tree. Each error names a situation and carries the HTTP status a client sees."""

from __future__ import annotations


class KvRouterError(Exception):
    """Anything kvrouter reports to a person: the message gives the value and the way out."""

    status = 500
    type = "InternalServerError"
    # Told to the client with a 503.
    retry_after_s = 1
    # Whether a part of the request's body was not read: nothing else can come on its connection then.
    is_body_left = False


class ConfigError(KvRouterError):
    """A flag, a file or an environment variable is wrong; the process does not start."""


class BadRequestError(KvRouterError):
    """The client's request cannot be served as it is."""

    status = 400
    type = "BadRequestError"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLargeError(BadRequestError):
    """The body is above the limit."""

    status = 413
    is_body_left = True


class RequestStalledError(BadRequestError):
    """The client has stopped in the midst of its body."""

    status = 408
    is_body_left = True


class UnknownModelError(BadRequestError):
    """No worker has announced the model."""

    status = 404
    type = "NotFoundError"


class UnknownTargetError(BadRequestError):
    """The worker or rank that the client names does not exist."""

    status = 404
    type = "NotFoundError"


class UnknownDecisionError(BadRequestError):
    """No decision about this request is kept."""

    status = 404
    type = "NotFoundError"


class NoRouteError(KvRouterError):
    """There is nothing at this path."""

    status = 404
    type = "NotFoundError"


class OperatorsOnlyError(NoRouteError):
    """What is asked for is on the admin listener, not on the clients' port."""


class WrongAdminKeyError(KvRouterError):
    """What is asked for takes the operators' key, and the request does not have it."""

    status = 401
    type = "AuthenticationError"


class WrongMethodError(KvRouterError):
    """What is at this path is asked for with another method."""

    status = 405
    type = "MethodNotAllowedError"


class HttpVersionError(KvRouterError):
    """The request is in a major version of HTTP that is not spoken here."""

    status = 505
    type = "HTTPVersionNotSupportedError"


class NoWorkersError(KvRouterError):
    """No live worker serves the model now; the client may try again."""

    status = 503
    type = "ServiceUnavailableError"


class ShuttingDownError(KvRouterError):
    """The replica ends and can wait no longer; the client may try again, at another one."""

    status = 503
    type = "ServiceUnavailableError"


class QueueFullError(NoWorkersError):
    """So many requests wait for a worker already that this one may not; the client may try again."""


class QueueTimeoutError(NoWorkersError):
    """The request has waited for a worker as long as it may; the client may try again."""


class OutOfResourcesError(KvRouterError):
    """The replica cannot open another connection; the client may try again, best at another one."""

    status = 503
    type = "ServiceUnavailableError"


class BodiesFullError(OutOfResourcesError):
    """Too many bytes of bodies that are not whole wait here already; the client may try again."""

    is_body_left = True


class WorkerDiedError(KvRouterError):
    """The worker broke off in the middle of its answer."""

    status = 502
    type = "BadGatewayError"


class WorkerSilentError(KvRouterError):
    """The worker said nothing for too long."""

    status = 504
    type = "GatewayTimeoutError"


class WorkerRefusedError(KvRouterError):
    """The worker has answered with an error. `status` and `body` are the worker's own."""

    def __init__(self, worker_id: str, status: int, body: str) -> None:
        super().__init__(f"worker {worker_id} answered {status}: {body[:500]}")
        self.worker_id = worker_id
        self.status = status
        self.body = body


class MalformedFrameError(KvRouterError):
    """Bytes from the bus or an engine that do not decode as what they claim to be."""


def leaves(error: BaseException) -> list[BaseException]:
    """The errors themselves, without the groups that task groups put around them."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves(inner)]
