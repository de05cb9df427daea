"""The calls over NATS: a request and a reply, with the method, the path and the JSON of HTTP.

    caller ──{"call": "POST /select", "body": {…}}──> place              one router of the namespace answers
                                                      place.ROUTER_ID    the one that made the reservation
           <──{"status": 200, "body": {…}, "router": ROUTER_ID}── placed.CALLER.…

NATS's users guard these subjects (kvrouter/bus/rights.py), so no key is asked for. A router answers on
subjects of callers only: else whoever may ask could make it publish as a replica.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, ClassVar, cast

import msgspec
import structlog
from msgspec import Meta, Raw, Struct

from kvrouter.bus import Subjects
from kvrouter.core.wire.ids import RouterId
from kvrouter.errors import KvRouterError, QueueFullError, RequestTooLargeError
from kvrouter.frontend.operators.admin import Admin
from kvrouter.frontend.operators.rights import Rights
from kvrouter.relay.answer import Answer, Served
from kvrouter.relay.exchange import ClientSide
from kvrouter.relay.request import Request, RequestHead, request_id_of
from kvrouter.relay.routes import Routes
from kvrouter.router.asked import is_given
from kvrouter.router.bodies import MOST_BODY_BYTES, decoded

log = structlog.get_logger()

MOST_IN_FLIGHT = 1024
MOST_IN_FLIGHT_BYTES = 8 * MOST_BODY_BYTES
_GROUP = "routers"


class Call(Struct, frozen=True):
    """`call`: method and path, with its query."""

    call: Annotated[str, Meta(max_length=2048, pattern=r"\A[A-Z]+ /[!-~]*\Z")]
    body: Raw = Raw()


class CallReply(Struct, frozen=True, omit_defaults=True):
    """`router`: for the subject of calls about what was reserved. `headers`: those that tell something."""

    status: int
    router: RouterId
    body: Raw
    headers: dict[str, str] = {}


class _Asker(Struct, frozen=True):
    """What a request needs of its client, where no answer is written to it."""

    address: str
    is_http_10: ClassVar[bool] = False


class CallRequest(Request):
    """A request whose answer is kept for its sender."""

    __slots__ = ("answer",)

    def reply(self, answer: Answer, *, closes: bool = False) -> Served:
        self.answer = answer
        return Served(answer.status, keeps_alive=not closes)


class OverNats:
    """Answers calls with what the routes of the port answer."""

    def __init__(
        self,
        admin: Admin,
        subjects: Subjects,
        router_id: RouterId,
        routes: Routes,
        rights: Rights,
    ) -> None:
        self._admin = admin
        self._bus = admin.bus
        self._subjects = subjects
        self._router_id = router_id
        self._routes = routes
        self._rights = rights
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes = 0
        self._has_warned = False

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Answer while inside."""
        async with self._bus.part() as part:
            await part.subscribe(f"{self._subjects.place} {_GROUP}", self._take)
            await part.subscribe(self._subjects.place_at(self._router_id), self._take)
            try:
                yield
            finally:
                for task in self._tasks:
                    task.cancel()

    def _take(self, subject: str, payload: bytes, reply: str) -> None:
        """Begin to answer. Between two reads of the socket: what costs time is left to a task."""
        caller = self._subjects.caller(reply)
        if not caller:
            if not self._has_warned:  # once: it is for whoever writes a caller
                self._has_warned = True
                log.warning(
                    "placement.no_answer", reply=reply[:200], remedy=self._subjects.placed("NAME", "…")
                )
            return
        size = len(payload)
        if self._admin.is_draining and subject == self._subjects.place:
            self._refuse(
                reply, QueueFullError("this router is about to stop: ask again, another one answers")
            )
        elif len(self._tasks) >= MOST_IN_FLIGHT or self._bytes + size > MOST_IN_FLIGHT_BYTES:
            self._refuse(reply, QueueFullError(f"{len(self._tasks)} calls are in flight here: ask again"))
        else:
            self._bytes += size
            task = asyncio.create_task(self._answer(caller, payload, reply), name="call over NATS")
            self._tasks.add(task)
            task.add_done_callback(lambda task: self._ended(task, size))

    def _ended(self, task: asyncio.Task[None], size: int) -> None:
        self._tasks.discard(task)
        self._bytes -= size

    async def _answer(self, caller: str, payload: bytes, reply: str) -> None:
        request = _request("POST /", caller)
        try:
            call = decoded(payload, Call)
            request = _request(call.call, caller, bytes(call.body) if is_given(call.body) else b"")
            method, _, path = call.call.partition(" ")
            await self._routes.find(method, path)(request)
        except KvRouterError as error:
            self._refuse(reply, error, request)
        else:
            self._send(reply, request.answer)

    def _refuse(self, reply: str, error: KvRouterError, request: Request | None = None) -> None:
        found = request or _request("POST /", "")
        self._send(reply, self._rights.error_answer(found, error, request_id_of(found.headers)))

    def _send(self, reply: str, answer: Answer) -> None:
        body = Raw(answer.body or b"null")
        found = CallReply(answer.status, self._router_id, body, dict(answer.headers))
        data = msgspec.json.encode(found)
        if len(data) > self._bus.max_payload:
            what = f"the answer has {len(data)} bytes, and NATS carries {self._bus.max_payload}: use HTTP"
            self._refuse(reply, RequestTooLargeError(what))
        else:
            self._bus.publish(reply, data)


def _request(call: str, caller: str, body: bytes = b"") -> CallRequest:
    method, _, path = call.partition(" ")
    fields = [("x-kvrouter-caller", caller), ("content-type", "application/json")]
    head = RequestHead(method, path, fields, wants_keep_alive=True)
    return CallRequest(head, cast("ClientSide", _Asker(f"NATS {caller}")), body)
