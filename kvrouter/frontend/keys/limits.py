"""Whether a request may begin, by the limits of its key: the shell around core/tables/tenants.py.

key with limits ──check──> passes: counted, here and at all peers · unsure: again in a moment · 429
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from msgspec.structs import replace

from kvrouter.bodies import openai
from kvrouter.bodies.apis import Api
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.tables.tenants import Charge, Kind, Left
from kvrouter.errors import RateLimitError
from kvrouter.frontend.keys.clients import ClientKeys
from kvrouter.frontend.keys.keys_file import Key, now_utc
from kvrouter.tokens import prompt as texts

# A request that is unsure this long is refused: only a burst of far more than the limit lasts longer.
PATIENCE_S = 5.0
LOOK_AGAIN_S = 0.02
# Output tokens of a request that names none, before any answer was seen, and the weight of each answer.
FIRST_MEAN, MEAN_WEIGHT = 256.0, 1 / 32
_BYTES_PER_TOKEN = 4
# Of a prompt, or of an output: a client may ask for any number.
MOST_TOKENS = 2**31 - 1
_NAMES: dict[Kind, str] = {
    "requests": "requests a minute",
    "tokens": "tokens a minute",
    "at_once": "requests at a time",
}


class ReadBody(Protocol):
    """A body, and what was read from it."""

    @property
    def body(self) -> bytes: ...

    @property
    def is_json(self) -> bool: ...

    @property
    def asked(self) -> openai.CompletionRequest: ...

    @property
    def router(self) -> Router: ...


class TenantLimits:
    """`is_connected()`: whether NATS is: else each replica enforces its share of a limit."""

    def __init__(
        self, replica: Replica, keys: ClientKeys, is_connected: Callable[[], bool], *, has_queue: bool
    ) -> None:
        """`has_queue`: tenants without a limit are counted, too, for their turns."""
        self._replica = replica
        self._table = replica.tenants
        self._keys = keys
        self._is_connected = is_connected
        self._has_queue = has_queue
        self._now = asyncio.get_running_loop().time
        self._means: dict[str, float] = {}
        self.change()

    def change(self) -> None:
        """The keys have changed."""
        keys = self._keys.now
        counted = frozenset[str]() if keys is None else keys.limited
        self._table.limit(keys.weights.keys() if keys is not None and self._has_queue else counted)

    async def begin(
        self, key: Key, api: Api, read: ReadBody, route: RouteRequest
    ) -> tuple[RouteRequest, str]:
        """Count the request; returns it with its charge, and lines for its answer. Raises RateLimitError."""
        if key.tenant not in self._table.limited:
            return route, ""
        asked, output = read.asked, 0
        count = texts.count_of(asked.prompt)
        prompt_tokens = route.isl or count * texts.estimated_isl(asked.prompt)
        if not prompt_tokens and read.is_json:  # else a form: a file has no tokens
            prompt_tokens = len(read.body) // _BYTES_PER_TOKEN
        if api.parse is not None:
            each = asked.asked_output or round(self._means.get(read.router.pool.model, FIRST_MEAN))
            output = each * max(asked.n, asked.best_of) * count
        charge = Charge(key.tenant, min(MOST_TOKENS, max(1, prompt_tokens)), min(MOST_TOKENS, output))
        left = await self._passed(key, api, charge)
        self._table.begin(charge, self._now())
        return replace(route, charge=charge), _lines(api, key, left, charge.tokens)

    async def _passed(self, key: Key, api: Api, charge: Charge) -> Left:
        until = self._now() + PATIENCE_S
        while True:
            now, replica = self._now(), self._replica
            hears = replica.settings.synced and self._is_connected()
            left = self._table.check(
                key.tenant, key.limits, charge.tokens, now, peers=len(replica.peers), hears=hears
            )
            if not left.is_unsure and not left.refused:
                return left
            if left.refused or now >= until:
                error = RateLimitError(_why(key, left, charge))
                error.retry_after_s = max(1, math.ceil(left.retry_s))
                error.limits = _fields(_lines(api, key, left, 0))
                raise error
            await asyncio.sleep(LOOK_AGAIN_S)

    def ended(self, charge: Charge) -> None:
        """The request is over."""
        self._table.end(charge, self._now())

    def answered(self, model: str, output_tokens: int) -> None:
        """An answer of this length: requests that name none count as many on average."""
        mean = self._means.get(model, FIRST_MEAN)
        self._means[model] = mean + (output_tokens - mean) * MEAN_WEIGHT


def _why(key: Key, left: Left, charge: Charge) -> str:
    kind = left.refused or "requests"
    limit = getattr(key.limits, kind)
    asked = f"; this request counts {charge.tokens:,}" if kind == "tokens" else ""
    return f"tenant {key.tenant!r} has used its {limit:,} {_NAMES[kind]}{asked}"


def _fields(lines: str) -> tuple[tuple[str, str], ...]:
    pairs = [line.partition(": ") for line in lines.splitlines()]
    return tuple([(name, value) for name, _, value in pairs])


def _lines(api: Api, key: Key, left: Left, tokens: int) -> str:
    """How much is left, in the form of the API. `tokens`: of the request that has been counted; 0: none."""
    lines, limits = "", key.limits
    if api.error_schema == "AnthropicError":
        at = (now_utc() + timedelta(seconds=left.reset_s)).isoformat(timespec="seconds")
        form, reset = _anthropics, at.replace("+00:00", "Z")
    else:
        form, reset = _openais, f"{left.reset_s:.0f}s"
    if limits.requests:
        lines = form("requests", limits.requests, max(0, left.requests - (tokens > 0)), reset)
    if limits.tokens:
        lines += form("tokens", limits.tokens, max(0, left.tokens - tokens), reset)
    return lines


def _openais(kind: str, limit: int, left: int, reset: str) -> str:
    return (
        f"x-ratelimit-limit-{kind}: {limit}\r\nx-ratelimit-remaining-{kind}: {left}\r\n"
        f"x-ratelimit-reset-{kind}: {reset}\r\n"
    )


def _anthropics(kind: str, limit: int, left: int, reset: str) -> str:
    start = f"anthropic-ratelimit-{kind}-"
    return f"{start}limit: {limit}\r\n{start}remaining: {left}\r\n{start}reset: {reset}\r\n"
