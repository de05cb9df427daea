"""Addresses that other hosts can use, in place of those that mean every interface (0.0.0.0 and ::)."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def host_of(sockname: object) -> str:
    """The host of a connected socket's own name; empty if others could not use it in a URL."""
    if not isinstance(sockname, tuple) or len(sockname) < 2:
        return ""  # a Unix socket
    try:
        address = ipaddress.ip_address(str(sockname[0]))
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return "" if address.scope_id else str(address)  # a scope (fe80::1%eth0) means nothing elsewhere


def reachable(url: str, host: str) -> str:
    """The URL with `host` if its own host means every interface, else as it is.

    0.0.0.0 stays if `host` is an IPv6 address, which such a listener does not accept.
    """
    parts = urlsplit(url)
    every = parts.hostname
    if not host or not every or not _is_every(every) or (":" in host and ":" not in every):
        return url
    return with_host(url, host)


def with_host(url: str, host: str) -> str:
    """The URL with another host, and its own port."""
    parts = urlsplit(url)
    name = f"[{host}]" if ":" in host else host
    return parts._replace(netloc=name if parts.port is None else f"{name}:{parts.port}").geturl()


def _is_every(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name
