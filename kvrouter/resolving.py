"""Resolves names of workers and replicas to addresses that one may connect to (core/wire/addresses.py)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from kvrouter.core.wire.addresses import Network, address_error, is_literal


async def addresses_of(host: str, port: int, networks: Sequence[Network] = ()) -> list[str]:
    """The addresses of a name that are allowed. Raises OSError if there is none, with the reason."""
    if is_literal(host):
        return _allowed(host, [host], networks)
    return _allowed(host, await _resolved(host, port), networks)


async def _resolved(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(sockname[0]) for *_, sockname in found]


def _allowed(host: str, addresses: Sequence[str], networks: Sequence[Network]) -> list[str]:
    allowed = [address for address in addresses if not address_error(address, networks)]
    if addresses and not allowed:
        first = addresses[0]
        trouble = address_error(first, networks)
        raise OSError(
            trouble if first == host else trouble.replace(first, f"{host} leads to {first}, which", 1)
        )
    return list(dict.fromkeys(allowed))


class CheckedResolver(AbstractResolver):
    """aiohttp's resolver, without addresses that are refused. Literal addresses do not come here."""

    def __init__(self, networks: Sequence[Network] = ()) -> None:
        self._networks = networks
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        allowed = set(_allowed(host, [one["host"] for one in found], self._networks))
        return [one for one in found if one["host"] in allowed]

    async def close(self) -> None:
        await self._resolver.close()
