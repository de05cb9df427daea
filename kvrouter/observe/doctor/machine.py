"""The machine where the doctor runs: file descriptors, ports, and the clocks of others against its own."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import Iterator, Mapping

import aiohttp

from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import WorkerId
from kvrouter.observe.doctor.findings import Finding
from kvrouter.observe.document import ReplicaHealth
from kvrouter.observe.replica import decoded, fetch

# A frontend of these has some 2,000 streams.
LEAST_DESCRIPTORS = 4096
MOST_SKEW_S = 3.0
ADMIN_OFFSET = 100
# TEST-NET-2 and the documentation's IPv6 network: the kernel only chooses a route, nothing is sent.
_ELSEWHERE = ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1"))


def own_addresses() -> list[str]:
    """The addresses from which this machine reaches others, without loopback."""
    found = []
    for family, address in _ELSEWHERE:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            found.append(str(probe.getsockname()[0]))
    return [address for address in found if not address.startswith(("127.", "fe80", "::1"))]


def check_descriptors() -> Iterator[Finding]:
    """The hard limit: a frontend raises its soft limit to that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_DESCRIPTORS:
        seen = f"at most {hard}: about {max(0, (hard - 200) // 2)} streams for each frontend started here"
        yield Finding("machine.descriptors", "this machine", seen)


async def look_at_port(http: aiohttp.ClientSession, port: int) -> tuple[bool, ReplicaHealth | None]:
    """Whether a program listens on a port of this machine, and the replica that it is."""
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
    except (OSError, TimeoutError):
        return False, None
    writer.transport.abort()
    fetched = await fetch(http, f"http://127.0.0.1:{port}/health", timeout_s=1.0)
    return True, decoded(fetched.body, ReplicaHealth)


async def check_ports(http: aiohttp.ClientSession, port: int) -> list[Finding]:
    """What has the two ports that a frontend would use, where no replica is heard."""
    found = []
    for number in (port, port + ADMIN_OFFSET):
        is_taken, health = await look_at_port(http, number)
        if is_taken and health is None:
            found.append(Finding("machine.port_taken", f"port {number}", "another program answers there"))
        elif health is not None:
            seen = f"replica {health.router_id}, version {health.version}"
            found.append(Finding("machine.other_fleet", f"port {number}", seen))
    return found


def check_clocks(skews: Mapping[str, float], cards: Mapping[WorkerId, Card]) -> Iterator[Finding]:
    """`skews`: by URL, its clock minus this one's. A start in the future shows a clock that is ahead."""
    for about, skew_s in skews.items():
        if abs(skew_s) > MOST_SKEW_S:
            seen = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine"
            yield Finding("clock.skew", about, seen)
    for worker_id, card in cards.items():
        ahead_s = card.started_at_us / 1e6 - time.time()
        if ahead_s > MOST_SKEW_S:
            yield Finding("clock.skew", worker_id, f"its agent started {ahead_s:.0f} s in the future")
