"""Where the replicas of the fleet listen: requests to a worker with such an address would come back.

    own listeners, reached addresses of peers ──> places ──> Pool.avoid: no target there

An address that only a heartbeat names is none: a forged one would take a healthy worker away. A place is host
and port in one spelling. Names are not resolved: a name or a balancer in front of a replica
is found by the hop header of the requests that come back (relay/hops.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from kvrouter.core.fleet.reached import ReachedPeers, urls_of
from kvrouter.core.wire.heartbeats import RouterBeat
from kvrouter.core.wire.ids import RouterId

# 127.0.0.1, ::1, localhost, and 0.0.0.0, where a connection also reaches the own host
_LOOPBACK = "localhost"
_PORTS = {"http": 80, "https": 443}
OWN = "this replica"


@lru_cache(maxsize=4096)
def place_of(url: str) -> str:
    """`host:port` of a URL; empty for an empty URL, as simulated workers have it."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    return f"{_one_spelling(host)}:{parts.port or _PORTS.get(parts.scheme, 0)}" if host else ""


def _one_spelling(host: str) -> str:
    try:
        address = ip_address(host)
    except ValueError:  # a name
        return _LOOPBACK if host.endswith(".localhost") else host
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return _LOOPBACK if address.is_loopback or address.is_unspecified else str(address)


class ReplicaPlaces:
    """The places of this replica and of its peers, and whose they are."""

    def __init__(self, router_id: RouterId, reached: ReachedPeers) -> None:
        self._router_id = router_id
        self._reached = reached
        self.names: Mapping[str, str] = {}
        """The replica at each place, as a sentence names it."""
        self._own: frozenset[str] = frozenset()
        self._is_stale = False

    def listen_at(self, urls: Iterable[str]) -> None:
        """These are this replica's own."""
        own = frozenset(map(place_of, urls)) - {""}
        self._is_stale = self._is_stale or own != self._own
        self._own = own

    def heard(self, before: RouterBeat | None, beat: RouterBeat | None) -> None:
        """A peer's heartbeat came after the one `before`; None: there is none (yet, or any more)."""
        self._is_stale = self._is_stale or _urls(before) != _urls(beat)

    def reached(self) -> None:
        """Another replica answers at an address of a peer, or none any more."""
        self._is_stale = True

    def changed(self, peers: Mapping[RouterId, RouterBeat]) -> bool:
        """Look at all peers again if one has moved; returns whether `names` is another one."""
        if not self._is_stale:
            return False
        self._is_stale = False
        before = self.names
        urls = [url for beat in peers.values() for url in urls_of(beat)]
        found = {place_of(url): self._name(one) for url in urls if (one := self._reached.at(url))}
        self.names = found | dict.fromkeys(self._own, OWN)
        return self.names != before

    def _name(self, router_id: str) -> str:
        return OWN if router_id == self._router_id else f"replica {router_id}"


def _urls(beat: RouterBeat | None) -> tuple[str, ...]:
    return tuple(urls_of(beat)) if beat is not None else ()
