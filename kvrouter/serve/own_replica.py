"""Whether a replica that `kvrouter serve` has started is ready: it, and no other program on its port.

A port that was free when `serve` began may have another listener minutes later, when the engines answer and
the replica starts. /health has the process id of the replica that answers, so another program is found out.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp
import msgspec
from msgspec import Struct

from kvrouter.bounded_answers import no_answer, read_answer
from kvrouter.core.wire.ops import UNREADABLE
from kvrouter.errors import ConfigError
from kvrouter.long_wait import LongWait
from kvrouter.processes.children import Child

# How often a replica is asked whether it is ready.
LOOK_S = 0.1
_ANSWER_S = 2.0
_MOST_BYTES = 256 * 1024
_NOT_LET_IN = (401, 403)


class _Health(Struct, frozen=True):
    pid: int


class _Readiness(Struct, frozen=True):
    status: str
    reasons: list[str] = []


_decode_health = msgspec.json.Decoder(_Health).decode
_decode_readiness = msgspec.json.Decoder(_Readiness).decode


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica listens: a URL and the flag of its port."""

    url: str
    flag: str


class OwnReplica:
    """A replica that was started as `child`. `places`: its admin listener, then its clients' port."""

    def __init__(self, http: aiohttp.ClientSession, child: Child, places: tuple[Place, Place]) -> None:
        self._http = http
        self._child = child
        self._places = places

    async def until_ready(self) -> None:
        """Wait until it is, and say what is missing. Raises ConfigError if another program has its port."""
        now, name, admin = asyncio.get_running_loop().time, self._child.name, self._places[0]
        wait = LongWait("replica.awaited", name, now(), url=admin.url)
        while reason := await self._why_not_ready():
            remedy = f"see what {name} and the agents log; kvrouter doctor --replica {admin.url} looks at all"
            wait.look(now(), reason, remedy)
            await asyncio.sleep(LOOK_S)

    async def _why_not_ready(self) -> str:
        """Why it is not ready; empty if it is. Raises ConfigError."""
        for place in self._places:
            if reason := await self._why_not_own(place):
                return reason
        try:
            status, body = await self._get(f"{self._places[0].url}/ready")
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"/ready: {no_answer(error)}"
        return "" if status == 200 else f"/ready answers {status}: {_reasons(body)}"

    async def _why_not_own(self, place: Place) -> str:
        """Why the child does not answer there yet; empty if it does. Raises ConfigError."""
        pid = self._child.pid
        if pid is None:
            return "it does not run"
        try:
            status, body = await self._get(f"{place.url}/health")
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"/health: {no_answer(error)}"
        # an admin listener that is not on loopback asks for a key; the clients' port says whose process it is
        if _pid_in(body) == pid or (place is self._places[0] and status in _NOT_LET_IN):
            return ""
        if pid != self._child.pid:
            return "it has just ended"  # and its own answer may be the one that came
        raise ConfigError(
            f"another program answers at {place.url}, where {self._child.name} should listen: "
            f"end it, or give another {place.flag}"
        )

    async def _get(self, url: str) -> tuple[int, bytes]:
        # the certificate may be for another name, and this is the own child process
        async with self._http.get(url, ssl=False, allow_redirects=False) as response:
            return response.status, await read_answer(response, _MOST_BYTES)


def session() -> aiohttp.ClientSession:
    """For the questions to own replicas."""
    # what another program sends is not unpacked: some kilobytes could become gigabytes
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S), auto_decompress=False)


def _pid_in(body: bytes) -> int | None:
    try:
        return _decode_health(body).pid
    except UNREADABLE:
        return None


def _reasons(body: bytes) -> str:
    try:
        readiness = _decode_readiness(body)
    except UNREADABLE:
        return "no reason"
    return "; ".join(readiness.reasons) or readiness.status
