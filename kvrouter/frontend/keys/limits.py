"""Whether a request may begin, by the limits of its key: the shell around core/tables/tenants.py.

key with limits ──check──> passes: counted, here and at all peers · unsure: again in a moment · 429
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Protocol

from kvrouter.bodies import openai, responses
from kvrouter.bodies.apis import Api
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.policy import Prompt
from kvrouter.core.tables.tenants import Charge, Kind, Left
from kvrouter.errors import KeyForbidsError, RateLimitError
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
_ENDLESS = (
    "`background`: nothing shows when such a response ends, and the API key has a limit of requests at a time"
)
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
        self.counted = frozenset[str]()
        """The tenants whose requests have a charge."""
        self.change()

    def change(self) -> None:
        """The keys have changed."""
        keys = self._keys.now
        self.counted = frozenset[str]() if keys is None else keys.limited
        if keys is not None and self._has_queue:
            self.counted = frozenset(keys.weights)
        self._table.limit(self.counted, has_turns=self._has_queue)

    def charge(self, key: Key, api: Api, read: ReadBody, prompts: Sequence[Prompt]) -> Charge:
        """What the request of a tenant in `counted` would count. Raises KeyForbidsError."""
        asked, output, count = read.asked, 0, 1
        tokens = prompts[0].isl if len(prompts) == 1 else sum([prompt.isl for prompt in prompts])
        if len(prompts) != 1 and asked.prompt is not None:
            count = texts.count_of(asked.prompt)
            tokens = tokens or count * texts.estimated_isl(asked.prompt)
        if not tokens and read.is_json:  # else a form: a file has no tokens
            tokens = len(read.body) // _BYTES_PER_TOKEN
        if api.parse is not None:
            each = asked.asked_output or round(self._means.get(read.router.pool.model, FIRST_MEAN))
            output = each * max(asked.n, asked.best_of) * count
        tokens = min(MOST_TOKENS, tokens or 1)
        charge = Charge(key.tenant, tokens, tokens + min(MOST_TOKENS, output))
        if (
            api.converted == "responses"
            and isinstance(asked, responses.ResponseRequest)
            and asked.is_background
        ):
            if key.limits.at_once:
                raise KeyForbidsError(_ENDLESS, param="background")
            charge.goes_on = True
        return charge

    async def begin(self, key: Key, api: Api, charge: Charge) -> str:
        """Count the request; returns lines for its answer. Raises RateLimitError."""
        left = self._left(key, charge, now := self._now())
        until = now + PATIENCE_S
        while left.is_unsure and now < until:
            await asyncio.sleep(LOOK_AGAIN_S)
            left = self._left(key, charge, now := self._now())
        if left.refused or left.is_unsure:
            error = RateLimitError(_why(key, left, charge))
            error.retry_after_s = max(1, math.ceil(left.retry_s))
            error.limits = _fields(_lines(api, key, left, 0))
            raise error
        self._table.begin(charge, now)
        return _lines(api, key, left, charge.tokens)

    def _left(self, key: Key, charge: Charge, now: float) -> Left:
        peers, limits = len(self._replica.peers), key.limits
        if peers and not self._replica.settings.synced:  # nothing is known of what they let pass
            limits, peers = limits.part(1 / (peers + 1)), 0
        hears = not peers or self._is_connected()
        return self._table.check(key.tenant, limits, charge.tokens, now, peers=peers, hears=hears)

    def count(self, charge: Charge) -> None:
        """No booking counts what the request has used."""
        charge.is_booked = False
        self._table.count(charge, self._now())

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
    limits = key.limits
    if api.error_schema == "AnthropicError":
        at = (now_utc() + timedelta(seconds=left.reset_s)).isoformat(timespec="seconds")
        form, reset = _anthropics(limits.requests, limits.tokens), at.replace("+00:00", "Z")
    else:
        form, reset = _openais(limits.requests, limits.tokens), f"{int(left.reset_s)}s"
    requests, more = max(0, left.requests - (tokens > 0)), max(0, left.tokens - tokens)
    if limits.requests and limits.tokens:
        return form % (requests, reset, more, reset)
    return form % (requests if limits.requests else more, reset) if form else ""


@lru_cache(maxsize=1024)
def _openais(*limits: int) -> str:
    kinds = [(kind, limit) for kind, limit in zip(("requests", "tokens"), limits, strict=True) if limit]
    return "".join(
        f"x-ratelimit-limit-{kind}: {limit}\r\nx-ratelimit-remaining-{kind}: %d\r\n"
        f"x-ratelimit-reset-{kind}: %s\r\n"
        for kind, limit in kinds
    )


@lru_cache(maxsize=1024)
def _anthropics(*limits: int) -> str:
    kinds = [(kind, limit) for kind, limit in zip(("requests", "tokens"), limits, strict=True) if limit]
    starts = [(f"anthropic-ratelimit-{kind}", limit) for kind, limit in kinds]
    return "".join(
        f"{start}-limit: {limit}\r\n{start}-remaining: %d\r\n{start}-reset: %s\r\n" for start, limit in starts
    )
