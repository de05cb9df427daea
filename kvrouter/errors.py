"""The error tree. Each error names a situation and has the HTTP status that a client receives."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 worker`, `1,000 workers`: for messages."""
    return f"{number:,} {noun}{'s'[: number != 1]}"


class KvRouterError(Exception):
    """An error reported to a person: its message states the wrong value and the remedy."""

    status = 500
    type = "InternalServerError"
    # What programs tell errors apart by, where the status does not; empty: they have the status only.
    code = ""
    # The Retry-After header of a 503.
    retry_after_s = 1
    # Whether part of the request's body was not read. Its connection must then be closed, as the rest of the
    # body would be taken for the next request.
    is_body_left = False
    # Whether the message names nothing of the fleet but the models that it serves: no worker, URL, pool or
    # peer. Not inherited, see `for_clients`.
    names_nothing = False
    # What clients get in place of the message if it may name something that they may not see.
    unnamed = "the request failed; the log of the replica has the details"

    def for_clients(self) -> KvRouterError:
        """The error for clients that may see neither workers nor peers (--expose without `headers`).

        A class without `names_nothing` of its own keeps its message from them, so a new one does.
        """
        if vars(type(self)).get("names_nothing"):
            return self
        error = type(self).__new__(type(self))
        error.__dict__.update(self.__dict__)
        error.args = (self.unnamed,)
        return error


class ConfigError(KvRouterError):
    """A flag, a file or an environment variable is wrong; the process does not start."""


class BadRequestError(KvRouterError):
    """The client's request is wrong."""

    names_nothing = True
    status = 400
    type = "BadRequestError"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLargeError(BadRequestError):
    """The body is larger than the limit."""

    names_nothing = True
    status = 413
    is_body_left = True


class RequestStalledError(BadRequestError):
    """The client stopped sending in the middle of its body."""

    names_nothing = True
    status = 408
    is_body_left = True


class InvalidBodyError(BadRequestError):
    """The framing of the body is invalid: where it ends is not known."""

    names_nothing = True
    is_body_left = True


class TargetTooLongError(BadRequestError):
    """The first line of the request is longer than the limit."""

    names_nothing = True
    status = 414


class HeadTooLargeError(BadRequestError):
    """The headers of the request are larger than the limit."""

    names_nothing = True
    status = 431


class NotMendedError(BadRequestError):
    """The body is no JSON that is read fast. It is large: mend it in slices and read it again."""

    names_nothing = True


class UnsupportedCodingError(BadRequestError):
    """The body is packed in a way that is not supported (`content-encoding`)."""

    names_nothing = True
    status = 415


class BodyTypeError(BadRequestError):
    """The admin listener takes JSON: a page of another site may send forms and plain text unasked."""

    names_nothing = True
    status = 415


class ExpectationError(BadRequestError):
    """The request expects (`Expect`) something else than 100-continue."""

    names_nothing = True
    status = 417


class UnknownModelError(BadRequestError):
    """No worker has announced the model."""

    names_nothing = True
    status = 404
    type = "NotFoundError"


class UnknownTargetError(BadRequestError):
    """The worker or rank named by the client does not exist."""

    unnamed = "the worker or rank that the request names does not exist"
    status = 404
    type = "NotFoundError"


class UnknownResponseError(BadRequestError):
    """`previous_response_id` names no response of this client. The form is vLLM's."""

    names_nothing = True
    status = 404
    type = "invalid_request_error"

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id '{response_id}' not found.", param="previous_response_id")


class UnknownDecisionError(BadRequestError):
    """No decision is stored for this request."""

    status = 404
    type = "NotFoundError"


class UnknownPromptError(BadRequestError):
    """The prompt is not refused."""

    status = 404
    type = "NotFoundError"


class UnknownReservationError(BadRequestError):
    """No such reservation or kept selection at this router."""

    names_nothing = True
    status = 404
    type = "NotFoundError"


class TakenIdError(BadRequestError):
    """The id is that of a reservation."""

    names_nothing = True
    status = 409
    type = "ConflictError"


class ReservationsFullError(KvRouterError):
    """The caller, or all of them, hold as many reservations as they may."""

    names_nothing = True
    status = 429
    type = "rate_limit_error"


class NoRouteError(KvRouterError):
    """The path does not exist."""

    names_nothing = True
    status = 404
    type = "NotFoundError"


class TrailingSlashError(NoRouteError):
    """The path without its last slash exists: the answer leads the client there."""

    names_nothing = True
    status = 307
    type = "RedirectError"

    def __init__(self, message: str, *, location: str) -> None:
        """`location`: the right path, relative to the wrong one, as proxies may have removed a prefix."""
        super().__init__(message)
        self.location = location


class OperatorsOnlyError(NoRouteError):
    """The path exists on the admin listener, not on the clients' port."""

    names_nothing = True


class WrongAdminKeyError(KvRouterError):
    """The path requires the operators' key, which the request lacks."""

    names_nothing = True
    status = 401
    type = "AuthenticationError"
    # Browsers ask for a password; Chromium would not if Bearer, which is also taken, were named too.
    challenge = 'Basic realm="kvrouter"'


class NoAdminKeyError(WrongAdminKeyError):
    """The admin listener requires the operators' key of peers that are not on loopback."""

    names_nothing = True

    # the page asks for the key itself
    challenge = 'Bearer realm="kvrouter"'


class UnknownKeyError(KvRouterError):
    """The request has no key that is known and has not expired. The form is OpenAI's."""

    names_nothing = True
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"
    challenge = 'Bearer realm="kvrouter"'


class KeyForbidsError(KvRouterError):
    """The client's key does not allow what the request asks for."""

    names_nothing = True
    status = 403
    type = "PermissionDeniedError"
    code = "permission_denied"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RateLimitError(KvRouterError):
    """The client's tenant has reached a limit of its key."""

    names_nothing = True
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    limits: tuple[tuple[str, str], ...] = ()
    """Further headers: how much of each limit is left."""


class PeerNotAllowedError(KvRouterError):
    """The admin listener has no key, so it serves peers on loopback only."""

    names_nothing = True
    status = 403
    type = "PermissionDeniedError"


class ForeignRequestError(KvRouterError):
    """The request to the admin listener comes from a page of another site, or names a foreign host."""

    names_nothing = True
    status = 403
    type = "PermissionDeniedError"


class WrongMethodError(KvRouterError):
    """The path does not support the request's method."""

    names_nothing = True
    status = 405
    type = "MethodNotAllowedError"

    def __init__(self, message: str, *, allowed: str) -> None:
        """`allowed`: the methods that the path supports."""
        super().__init__(message)
        self.allowed = allowed


class HttpVersionError(KvRouterError):
    """The request uses an unsupported major version of HTTP."""

    names_nothing = True
    status = 505
    type = "HTTPVersionNotSupportedError"


class LoopError(KvRouterError):
    """The request has passed this fleet before: a worker's URL leads back to a replica."""

    unnamed = "loop detected: the request has passed this fleet before"
    status = 508
    type = "LoopDetectedError"


class NoWorkersError(KvRouterError):
    """No live worker serves the model."""

    unnamed = "no worker can take this request now; send it again later"
    status = 503
    type = "ServiceUnavailableError"


class ShuttingDownError(KvRouterError):
    """The replica is shutting down."""

    names_nothing = True
    status = 503
    type = "ServiceUnavailableError"


class NatsAwayError(KvRouterError):
    """The replica has no connection to NATS, and the call changes what other replicas know."""

    names_nothing = True
    status = 503
    type = "ServiceUnavailableError"


class QueueFullError(NoWorkersError):
    """The queue of requests waiting for a worker is full."""

    names_nothing = True


class QueueTimeoutError(NoWorkersError):
    """The request waited for a worker for as long as the queue allows."""

    names_nothing = True


class OutOfResourcesError(KvRouterError):
    """The replica cannot open another connection."""

    unnamed = "this replica is at its limits; send the request again"
    status = 503
    type = "ServiceUnavailableError"


class TokenizerBusyError(OutOfResourcesError):
    """More text waits for the tokenizer of this replica than it takes (--tokenizer-queue-mib)."""

    names_nothing = True


class TooManyViewersError(OutOfResourcesError):
    """As many dashboards are open at this replica as it serves at a time."""

    names_nothing = True


class BodiesFullError(OutOfResourcesError):
    """Incomplete request bodies already take all the memory allowed for them."""

    names_nothing = True
    is_body_left = True


class WorkerDiedError(KvRouterError):
    """The worker's connection broke off in the middle of its answer."""

    unnamed = "the worker failed; the log of the replica has the details"
    status = 502
    type = "BadGatewayError"


class RequestEndsWorkersError(KvRouterError):
    """Workers were lost with the request in hand, so it is sent to none any more."""

    names_nothing = True
    status = 502
    type = "BadGatewayError"
    code = "request_ends_workers"


class WorkerRejectedError(KvRouterError):
    """The worker rejected a request whose stream had begun: its answer becomes an error event."""

    names_nothing = True

    def __init__(self, status: int, message: str, kind: str = "") -> None:
        """`kind`: the type that the worker's own error names."""
        super().__init__(message or f"the worker answered {status}")
        self.status = status
        self.type = kind or ("BadRequestError" if status < 500 else "InternalServerError")


class WorkerSilentError(KvRouterError):
    """The worker sent nothing for too long."""

    names_nothing = True
    status = 504
    type = "GatewayTimeoutError"


class WorkerRefusedError(KvRouterError):
    """The worker answered with an error, whose `status` and `body` are kept."""

    def __init__(self, worker_id: str, status: int, body: str) -> None:
        super().__init__(f"worker {worker_id} answered {status}: {body[:500]}")
        self.worker_id = worker_id
        self.status = status
        self.body = body


class MalformedFrameError(KvRouterError):
    """Bytes from the bus or an engine that cannot be decoded."""


class RefusedCardError(MalformedFrameError):
    """A card that can be read, and contains what no worker may have. Its text names it."""


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside the groups that task groups wrap around them."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves(inner)]
