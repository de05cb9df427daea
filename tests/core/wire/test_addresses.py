"""Hosts that no worker can have, in every spelling, and the networks to which workers are limited."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from kvrouter.core.wire.addresses import address_error, host_error


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "169.254.0.1",
        "fe80::1",
        "fe80::1%eth0",
        "febf::1",
        "::ffff:169.254.169.254",
        "::ffff:a9fe:a9fe",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
        "::169.254.169.254",
        "fd00:ec2::254",
        "100.100.100.200",
        "168.63.129.16",
        "0.0.0.0",
        "0.1.2.3",
        "::",
        "::ffff:0.0.0.0",
        "224.0.0.1",
        "ff02::1",
        "255.255.255.255",
    ],
)
def test_never(host: str) -> None:
    """Link-local, unspecified, multicast and metadata addresses, and IPv6 addresses that lead there."""
    assert host in address_error(host)
    assert address_error(host, [ip_network("0.0.0.0/0"), ip_network("::/0")])


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "::1",
        "10.0.0.1",
        "192.168.1.1",
        "fd00::1",
        "2001:db8::1",
        "::ffff:10.0.0.1",
        "engine",
        "",
    ],
)
def test_allowed(host: str) -> None:
    """Everything else, loopback included; names are checked when they are resolved."""
    assert "" == address_error(host)


def test_networks() -> None:
    """Only addresses within them, loopback, too; IPv4 inside IPv6 counts as IPv4."""
    networks = [ip_network("10.0.0.0/8"), ip_network("fd00::/16")]

    for allowed in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::7", "engine"):
        assert "" == address_error(allowed, networks)
    for refused in ("127.0.0.1", "::1", "192.168.0.1", "fd01::1"):
        assert f"{refused} is in none of --worker-networks 10.0.0.0/8 fd00::/16" == address_error(
            refused, networks
        )
    assert "10.0.0.0/8" in host_error("http://[fd01::1]:8000/v1", networks)
    assert "" == host_error("", networks)
