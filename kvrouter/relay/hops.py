"""The hop header: the replicas that a request has passed, so that one that comes back is seen.

client ──> replica a ──"a"──> worker
                └───"a"──> something that leads to replica b ──"a, b"──> ... ──> a, or a peer of a: 508

It ends any loop, also behind names and balancers, where the address of a worker's card shows nothing
(core/fleet/places.py). A client may send the header as well: all it can get by that is a 508.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from kvrouter.core.wire.ids import IDENTIFIER_PATTERN
from kvrouter.errors import LoopError

HOPS = "x-kvrouter-hops"
# The header of each answer that came through a router.
ROUTER = b"x-kvrouter-router"
# Routers of other fleets may be chained. More than this is no design but a loop of routers that do not know
# each other.
MOST_HOPS = 8
_ROUTER_ID = re.compile(IDENTIFIER_PATTERN)


def check_hops(passed: str, is_replica: Callable[[str], bool]) -> None:
    """Raise LoopError if the request has passed this fleet, or if no router has written the header."""
    routers = [one.strip() for one in passed.split(",")]
    if len(routers) > MOST_HOPS or not all(map(_ROUTER_ID.fullmatch, routers)):
        raise LoopError(f"{HOPS}: not a list of 1 to {MOST_HOPS} router ids; clients should not send it")
    if known := next(filter(is_replica, routers), None):
        raise LoopError(
            f"loop detected: this request has passed replica {known} of this fleet. A worker's URL leads "
            "back to a replica: correct --engine-url or --advertise-url of its agent"
        )


def hop_line(passed: str, router_id: str) -> str:
    """The header for the next hop."""
    return f"{HOPS}: {passed}{passed and ', '}{router_id}\r\n"
