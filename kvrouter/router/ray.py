"""Ray's `POST /internal/route`: a proxy sends a client's body, and relays the request to that host itself.

No call says that the request has ended. So its prefill ends when it is predicted to, and its reservation with
its lease, unless the proxy frees it: `reservation_id` of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from kvrouter.core.routing.policy import RouteRequest
from kvrouter.frontend.operators.dry_route import api_of
from kvrouter.frontend.operators.views import View, json_answer
from kvrouter.frontend.records.record import Record, clock
from kvrouter.frontend.requests.accept import Accept
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request, new_request_id
from kvrouter.router.asked import DEFAULT, PlacementAsk
from kvrouter.router.dynamo import caller_of
from kvrouter.router.placing import Placing

# The proxy sends this header if the body is longer than its buffer: it cannot be read, so load decides.
TRUNCATED = "x-body-truncated"
_PORTS = {"http": 80, "https": 443}


class RayCalls:
    def __init__(self, placing: Placing, accept: Accept, now: Callable[[], float]) -> None:
        self._placing = placing
        self._accept = accept
        self._now = now

    def views(self) -> Iterator[tuple[str, str, View]]:
        """Method, path and view of each."""
        yield "POST", "/internal/route", self._route

    async def _route(self, request: Request) -> Answer:
        # not the client's id: it may send the same one twice
        request_id = new_request_id()
        if TRUNCATED in request.headers:
            router, route = self._placing.router_for(DEFAULT), RouteRequest(request_id)
        else:
            record = Record(request, request_id, self._now(), clock())
            work = await self._accept.work(record, api_of(await request.read()), None)
            router, route = work.router, replace(work.route, may_split=False)
        placed = self._placing.book(router, route, caller_of(request), PlacementAsk(stream=False))
        return json_answer(_as_ray(placed))


def _as_ray(placed: dict[str, Any]) -> dict[str, Any]:
    url = urlsplit(placed["endpoint"])
    return {
        "host": url.hostname or "",
        "port": url.port or _PORTS.get(url.scheme, 0),
        "path": url.path,
        "replica_id": f"{placed['worker_id']}/{placed['dp_rank']}",
        "request_headers": placed["headers"],
        "reservation_id": placed["reservation_id"],
        "lease_s": placed["lease_s"],
    }
