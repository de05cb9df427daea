"""Addresses that other hosts can use."""

from __future__ import annotations

import pytest

from kvrouter.bus import Bus, NatsOptions
from kvrouter.bus.addresses import host_of, reachable, with_host
from tests.e2e.fleet import until


@pytest.mark.parametrize(
    ("url", "host", "shown"),
    [
        ("http://0.0.0.0:8000", "10.0.0.5", "http://10.0.0.5:8000"),
        ("https://0.0.0.0:8000/base", "10.0.0.5", "https://10.0.0.5:8000/base"),
        ("http://0.0.0.0", "10.0.0.5", "http://10.0.0.5"),
        ("http://[::]:8000", "fd00::5", "http://[fd00::5]:8000"),
        ("http://[::]:8000", "10.0.0.5", "http://10.0.0.5:8000"),
        ("http://[0:0::0]:8000", "10.0.0.5", "http://10.0.0.5:8000"),
        ("http://0.0.0.0:8000", "fd00::5", "http://0.0.0.0:8000"),  # it does not listen there
        ("http://0.0.0.0:8000", "", "http://0.0.0.0:8000"),  # NATS was not reached yet
        ("http://127.0.0.1:8000", "10.0.0.5", "http://127.0.0.1:8000"),
        ("http://engine-0:8000", "10.0.0.5", "http://engine-0:8000"),
        ("", "10.0.0.5", ""),
    ],
)
def test_url_of_every_interface(url: str, host: str, shown: str) -> None:
    """Only a host that means every interface is replaced."""
    assert shown == reachable(url, host)


@pytest.mark.parametrize(
    ("sockname", "host"),
    [
        (("10.0.0.5", 4000), "10.0.0.5"),
        (("fd00::5", 4000, 0, 0), "fd00::5"),
        (("::ffff:10.0.0.5", 4000, 0, 0), "10.0.0.5"),
        (("fe80::1%eth0", 4000, 0, 2), ""),
        ("/run/nats.sock", ""),
        (None, ""),
        (("odd", 1), ""),
    ],
)
def test_host_of_a_socket(sockname: object, host: str) -> None:
    """A scope means nothing on another host; an IPv4 address in IPv6 form is an IPv4 address."""
    assert host == host_of(sockname)


def test_other_host() -> None:
    """The port stays."""
    assert "http://[fd00::5]:8100" == with_host("http://0.0.0.0:8100", "fd00::5")


async def test_local_host_of_a_bus(nats_url: str) -> None:
    """The address from which NATS is reached; empty before."""
    async with Bus.open(NatsOptions((nats_url,)), name="test") as bus:
        before = bus.local_host
        await until(lambda: bus.connected)
        async with bus.part() as part:
            assert ("", "127.0.0.1", "127.0.0.1") == (before, bus.local_host, part.local_host)
