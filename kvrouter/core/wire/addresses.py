"""Hosts that no worker and no replica can have, and the networks to which an operator limits workers.

A URL in a card or heartbeat makes this process connect there. So addresses are checked that no engine has but
something else may: a cloud's metadata service gives out credentials to whoever asks from the host.

    literal address ──> when the card arrives       name ──> resolved when connecting, each address is checked
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import TypeAlias
from urllib.parse import urlsplit

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

_NEVER: dict[str, tuple[str, ...]] = {
    "link-local": ("169.254.0.0/16", "fe80::/10"),
    "of a cloud's metadata service": (
        "fd00:ec2::/32",  # AWS
        "100.100.100.200/32",  # Alibaba Cloud
        "168.63.129.16/32",  # Azure
        "192.0.0.192/32",  # Oracle Cloud
    ),
    "unspecified": ("0.0.0.0/8", "::/128"),
    "multicast": ("224.0.0.0/4", "ff00::/8"),
    "reserved": ("240.0.0.0/4",),
}
_NETWORKS: list[tuple[Network, str]] = [
    (ip_network(text), kind) for kind, texts in _NEVER.items() for text in texts
]
# IPv6 addresses that end with an IPv4 address, to which gateways or the kernel may connect (RFC 6052, 4291).
_WITH_IPV4 = (ip_network("64:ff9b::/96"), ip_network("::/96"))
_LOOPBACK_V6 = IPv6Address("::1")


def address_error(host: str, networks: Sequence[Network] = ()) -> str:
    """Why nobody may connect to this address; empty if one may, or if it is a name.

    `networks`: those that are allowed; without any, all are.
    """
    try:
        address = plain(ip_address(host.partition("%")[0]))
    except ValueError:
        return ""  # a name: checked when it is resolved
    for network, kind in _NETWORKS:
        if address in network:
            return f"{host} is {kind}: no worker or replica has such an address"
    if networks and not any(address in network for network in networks):
        return f"{host} is in none of --worker-networks {' '.join(map(str, networks))}"
    return ""


def is_literal(host: str) -> bool:
    """Whether this is an address, not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def host_error(url: str, networks: Sequence[Network] = ()) -> str:
    """`address_error` of a URL's host."""
    return address_error(urlsplit(url).hostname or "", networks) if url else ""


def plain(address: Address) -> Address:
    """The IPv4 address inside an IPv6 address that leads to one; else the address."""
    if isinstance(address, IPv4Address) or address == _LOOPBACK_V6 or not int(address):
        return address
    inner = address.ipv4_mapped or address.sixtofour
    if inner is None and any(address in network for network in _WITH_IPV4):
        inner = IPv4Address(int(address) & 0xFFFF_FFFF)
    return inner if inner is not None else address
