"""Asks peers' addresses who answers there: what a heartbeat says of other members counts only then.

ReachedPeers.next ──> GET /ready, one at a time ──> the router id of the answer ──> Replica.answered
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvrouter.bounded_answers import UNPACKED, engine_connector, read_answer
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.addresses import host_error
from kvrouter.core.wire.ops import UNREADABLE

TIMEOUT_S = 1.0
LOOK_EVERY_S = 0.1
# Of an answer, which lists up to a hundred reasons and a hundred feeds.
MOST_BYTES = 256 * 1024


class _Ready(msgspec.Struct):
    router_id: str = ""


async def ask_peers(replica: Replica) -> None:
    """Ask one address after the other until cancelled."""
    loop = asyncio.get_running_loop()
    # Not verified: it is only asked who answers, and a certificate names the service, not the replica.
    connector = engine_connector(False, force_close=True, networks=())
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        auto_decompress=False,
        headers=UNPACKED,
    ) as session:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            while url := replica.peers.next_question(loop.time()):
                replica.answered(url, await router_at(session, url), loop.time())


async def router_at(session: aiohttp.ClientSession, url: str) -> str:
    """The id of the replica that answers there; empty if none does."""
    parts = urlsplit(url)
    # without a path: a forged one would call any route of any server in reach
    where = f"{parts.scheme}://{parts.netloc}/ready"
    if host_error(url):
        return ""
    try:
        async with session.get(where, allow_redirects=False) as response:
            return msgspec.json.decode(await read_answer(response, MOST_BYTES), type=_Ready).router_id
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, *UNREADABLE):
        return ""
