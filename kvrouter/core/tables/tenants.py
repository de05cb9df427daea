"""What tenants have used in the last minute, at all replicas, so that limits hold for the fleet.

    own request ──begin──> own window ──AddRequest(tenant, tokens)──> this replica's window at each peer
        ends    ──settle─> own window ──Free(settled)───────────────> the same
    window: [ second | second | … | second ]  requests and tokens, one for each tenant and replica

A request counts its prompt and the output that it asks for, and from its end on what it has used.

Bookings of peers arrive within milliseconds, in a burst later. How long it takes shows the echo: NATS sends
this replica its own frames, too, on the same way as those of peers. What was counted longer ago than twice
that, all replicas know. Of what that leaves of a limit each replica lets pass its share, and then waits until
all know of it: such a request is unsure. So a burst at one replica gets all of the limit, in steps, and one
at all of them gets little more (tests/frontend/test_limits.py, docs/operations.md).

What a tenant was served, for its turns, is halved every HALF_S: what a peer that is gone, or never was, has
said of it fades.

Invariant: the sums of a window are those of its seconds. Only tenants of `limited` are counted.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Set
from typing import Literal, TypeAlias

from msgspec import Struct

from kvrouter.core.wire.ids import RouterId
from kvrouter.core.wire.ops import TenantUse

MINUTE_S = 60
# Within these bounds what was counted is taken as not known to all. A longer echo was lost: NATS was away.
LEAST_S, MOST_S = 0.1, 1.0
STEP_S = 0.01
# Replicas whose use of the last minute is known, of one tenant.
MOST_OWNERS = 256
# By this share of the limit what may be unknown can take it above: the last steps would be many.
SLACK = 0.05
# What a token of output costs, in computed tokens of a prompt (VTC's weights).
OUTPUT_WEIGHT = 2
HALF_S = 30.0
# What one request adds to what its tenant was served, and all of them at once.
_MOST_COST, _MOST_SERVED = 1 << 21, 1 << 30
# Without NATS this part of a limit is shared out equally, the rest as the tenant used replicas last: one that
# it did not use lets something pass, too.
EVEN = 0.1
ACTIVE_S = 10.0
_ROUNDING = 1e-6
# The delay of an echo counts for the next ones, less and less.
_FADING = 0.8

Kind: TypeAlias = Literal["", "requests", "tokens", "at_once"]


class KeyLimits(Struct, frozen=True, gc=False):
    """Of one key; 0: none."""

    requests: int = 0
    tokens: int = 0
    at_once: int = 0

    def part(self, share: float) -> KeyLimits:
        """What a replica with this share enforces alone."""
        limits = self.requests, self.tokens, self.at_once
        return KeyLimits(*[math.ceil(one * share - _ROUNDING) for one in limits])


NO_LIMITS = KeyLimits()


class Charge(Struct, gc=False):
    """What one request of this replica counts."""

    tenant: str
    prompt_tokens: int
    tokens: int
    """With those of output that it asks for, or of a mean answer."""
    used: int = 0
    """Known when an attempt has ended; 0: no worker has done anything for it."""
    counted_at: float | None = None
    """None: it is not counted now."""
    is_booked: bool = False
    goes_on: bool = False
    """Whether its engine works on once it has answered: then it counts all that it asked for."""


class Left(Struct, frozen=True):
    """What a tenant may still use, before the request that was checked."""

    requests: int
    tokens: int
    reset_s: float
    """Until some of it counts no longer."""
    refused: Kind = ""
    """The limit that does not let the request pass; empty: it passes, or is unsure."""
    retry_s: float = 0.0
    is_unsure: bool = False


class Window:
    """Requests and tokens of the last 60 whole seconds and the present one. `of`: has the sums of several."""

    __slots__ = ("counts", "of", "requests", "tokens")

    def __init__(self, of: _Use | None = None) -> None:
        self.requests = self.tokens = 0
        self.of = of
        self.counts: deque[list[int]] = deque()
        """Second, requests and tokens, oldest first."""

    def add(self, now: float, requests: int, tokens: int) -> None:
        counts, second = self.counts, int(now)
        if not counts or counts[-1][0] < second:
            counts.append([second, 0, 0])
            if len(counts) > 2 * MINUTE_S:  # nobody has asked for long
                self.slide(now)
        self._change(counts[-1], requests, tokens)

    def take(self, at: float, requests: int, tokens: int) -> None:
        """Take back what was counted then; nothing, if that counts no longer."""
        for count in reversed(self.counts):
            if count[0] <= int(at):
                if count[0] == int(at):
                    self._change(count, -min(requests, count[1]), -min(tokens, count[2]))
                return

    def slide(self, now: float) -> None:
        while self.counts and self.counts[0][0] < int(now) - MINUTE_S:
            self._change(self.counts[0], -self.counts[0][1], -self.counts[0][2])
            self.counts.popleft()

    def _change(self, count: list[int], requests: int, tokens: int) -> None:
        count[1] += requests
        count[2] += tokens
        self.requests += requests
        self.tokens += tokens
        if self.of is not None:
            self.of.requests += requests
            self.of.tokens += tokens


class _Use:
    """What one tenant has used. `requests` and `tokens`: of all windows, which have slid in `second`."""

    def __init__(self) -> None:
        self.requests = self.tokens = 0
        self.second = self.oldest = -1
        self.own = Window(self)
        self.peers: dict[str, Window] = {}
        self.recent: deque[list[int]] = deque()
        """Of the last MOST_S, in steps: number of the step, own requests and their tokens."""
        self.served = 0.0
        """Tokens computed, and output by its weight, of requests at all replicas; fades."""
        self.share: float | None = None
        """While NATS is away: this replica's part of what the tenant used before."""
        self.at_once = 0
        """Requests of this replica that have begun and not ended."""

    def slide(self, now: float) -> None:
        """Forget what is older than a minute, and replicas that have long left; once a second is enough."""
        self.second = self.oldest = int(now)
        for name, window in [("", self.own), *self.peers.items()]:
            window.slide(now)
            if window.counts:
                self.oldest = min(self.oldest, window.counts[0][0])
            elif name:
                del self.peers[name]

    def windows(self, *, hears: bool) -> list[Window]:
        """That count."""
        return [self.own, *self.peers.values()] if hears else [self.own]

    def of_peer(self, name: str, window: Window | None = None) -> Window | None:
        """The window of a peer, or this one in its place; None: there are too many."""
        old = self.peers.get(name)
        if (old is not None and window is None) or (old is None and len(self.peers) >= MOST_OWNERS):
            return old
        new = self.peers[name] = window or Window()
        new.of = self
        self.requests += new.requests - (old.requests if old is not None else 0)
        self.tokens += new.tokens - (old.tokens if old is not None else 0)
        return new

    def last_share(self, replicas: int) -> float:
        """Of the last minute that was looked at, and later: nothing has slid since."""
        own, peers = self.own.requests, sum([window.requests for window in self.peers.values()])
        used = own / (own + peers) if own + peers else 1 / replicas
        return (1 - EVEN) * used + EVEN / replicas

    def count_recent(self, now: float, tokens: int) -> None:
        step, recent = int(now / STEP_S), self.recent
        if not recent or recent[-1][0] < step:
            recent.append([step, 0, 0])
            while recent[0][0] < step - MOST_S / STEP_S:
                recent.popleft()
        recent[-1][1] += 1
        recent[-1][2] += tokens

    def since(self, at: float) -> tuple[int, int]:
        """Own requests and tokens since then."""
        requests, tokens, first = 0, 0, at / STEP_S - 1
        for step in reversed(self.recent):
            if step[0] < first:
                break
            requests += step[1]
            tokens += step[2]
        return requests, tokens


class TenantTable:
    """Of one replica, for all of its pools."""

    def __init__(self, router_id: str = "") -> None:
        self.router_id = router_id
        self.limited: Set[str] = frozenset()
        """The tenants that are counted: anyone who may publish as a replica can name any number of others."""
        self.booked_elsewhere: Counter[str] = Counter()
        """Bookings of peers in flight, by tenant. BookedBudget counts them."""
        self._uses: defaultdict[str, _Use] = defaultdict(_Use)
        self._counted_at: float | None = None
        """When the first was counted that no frame has told yet; None: all were told."""
        self._awaited: dict[tuple[str, int], float] = {}
        """Own frames without an echo, and when what they tell was counted."""
        self._delay_s = 0.0
        self.halvings = 0
        """Of what tenants were served, so far."""
        self._has_turns = self._has_peers = True
        self._halved_at: float | None = None

    def limit(self, tenants: Set[str], *, has_turns: bool = True) -> None:
        """Count these tenants from now on, and no others. `has_turns`: also what they are served."""
        self.limited, self._has_turns = tenants, has_turns
        # those in flight end later, perhaps after the tenant has a limit again
        kept = {name: use for name, use in self._uses.items() if name in tenants or use.at_once}
        self._uses = defaultdict(_Use, kept)

    def check(
        self, tenant: str, limits: KeyLimits, tokens: int, now: float, *, peers: int, hears: bool
    ) -> Left:
        """Whether a request may begin. `hears`: whether bookings of peers arrive; else each has its share."""
        use, own, own_tokens = self._uses[tenant], 0, 0
        self._has_peers = peers > 0
        if not hears and use.share is None:
            use.share = use.last_share(peers + 1)
        if use.second != int(now):
            use.slide(now)
        if hears:
            use.share = None
            requests, used = use.requests, use.tokens
            at_once = use.at_once + self.booked_elsewhere.get(tenant, 0)
            if peers and use.recent:
                own, own_tokens = use.since(now - self.unknown_s(now))
        else:
            limits, peers = limits.part(use.share or 0.0), 0
            requests, used, at_once = use.own.requests, use.own.tokens, use.at_once
        reset_s = use.oldest + MINUTE_S + 1 - now if requests else 0.0
        left = (max(0, limits.requests - requests), max(0, limits.tokens - used), reset_s)
        if not own and _is_below(limits, requests, used + tokens, at_once):  # nearly always
            return Left(*left)
        refused, retry_s, is_unsure = "", 0.0, False
        for kind, limit, count, more, mine in (
            ("requests", limits.requests, requests, 1, own),
            ("tokens", limits.tokens, used, tokens, own_tokens),
            ("at_once", limits.at_once, at_once, 1, own),
        ):
            if limit and count + more > limit:
                retry_s = max(retry_s, _until(kind, use.windows(hears=hears), count + more - limit, now))
                refused = refused or kind
            elif limit and mine:
                share = (limit * (1 + SLACK) - max(0, count - mine)) / (peers + 1)
                is_unsure = is_unsure or mine + more > share
        return Left(*left, refused, retry_s, is_unsure and not refused)  # type: ignore[arg-type]  # a kind

    def begin(self, charge: Charge, now: float) -> None:
        """A request of this replica begins."""
        self._uses[charge.tenant].at_once += 1
        self.count(charge, now)

    def served(self, tenant: str) -> float:
        """What its requests have cost of late, for the order in which tenants wait."""
        return self._uses[tenant].served if tenant in self._uses else 0.0

    def _serve(self, tenant: str, cost: int, now: float) -> None:
        if not self._has_turns:
            return
        if self._halved_at is None:
            self._halved_at = now
        passed = int((now - self._halved_at) / HALF_S)
        if passed > 0:
            self._halved_at += passed * HALF_S
            self.halvings += passed
            for one in self._uses.values():
                one.served *= 0.5**passed
        use = self._uses[tenant]
        use.served = min(_MOST_SERVED, use.served + min(cost, _MOST_COST))

    def active(self, now: float) -> Iterator[str]:
        """The tenants that any replica has heard of in the last ACTIVE_S."""
        for tenant, use in self._uses.items():
            last = max(
                [window.counts[-1][0] for window in (use.own, *use.peers.values()) if window.counts],
                default=-1,
            )
            if last >= now - ACTIVE_S:
                yield tenant

    def booked(self, charge: Charge, prefill_tokens: int, now: float) -> None:
        """A worker gets the request, and computes this much of its prompt."""
        self.count(charge, now)
        charge.is_booked = True
        self._serve(charge.tenant, prefill_tokens, now)

    def count(self, charge: Charge, now: float) -> None:
        """Count it, if it is not counted: a retry is again what the failed attempt was."""
        if charge.counted_at is None:
            use, charge.counted_at = self._uses[charge.tenant], now
            use.own.add(now, 1, charge.tokens)
            if self._has_peers:
                use.count_recent(now, charge.tokens)
            if self._counted_at is None:
                self._counted_at = now

    def settle(self, charge: Charge, now: float) -> int:
        """From now on it counts what it has used, if anything; returns the difference in tokens."""
        if charge.counted_at is None:
            return 0
        settled = charge.used - charge.tokens
        self._serve(charge.tenant, OUTPUT_WEIGHT * max(0, charge.used - charge.prompt_tokens), now)
        self._settle(self._uses[charge.tenant].own, settled, charge.tokens, charge.counted_at, now)
        if not charge.used:
            charge.counted_at = None
        return settled

    def end(self, charge: Charge, now: float) -> None:
        """The request has ended. One that no worker got does not count."""
        use = self._uses[charge.tenant]
        use.at_once = max(0, use.at_once - 1)
        if not charge.is_booked:
            self.settle(charge, now)

    def published(self, pool: str, seq: int) -> None:
        """The pool's frames up to this one are on their way, with all that has been counted."""
        if self._counted_at is not None:
            self._awaited[pool, seq] = self._counted_at
            self._counted_at = None

    @property
    def awaits_echo(self) -> bool:
        return bool(self._awaited)

    def echoed(self, pool: str, seq: int, now: float) -> None:
        """A frame of this replica has come back."""
        counted_at = self._awaited.pop((pool, seq), None)
        if counted_at is not None:
            self._delay_s = max(now - counted_at, self._delay_s * _FADING)

    def unknown_s(self, now: float) -> float:
        """For how long what was counted may not be known to all."""
        while self._awaited and (oldest := next(iter(self._awaited.items())))[1] < now - MOST_S:
            del self._awaited[oldest[0]]
        waits_s = now - next(iter(self._awaited.values()), now)
        return min(max(2 * self._delay_s, 2 * waits_s, LEAST_S), MOST_S)

    # What peers say

    def begun_elsewhere(
        self, router_id: RouterId, tenant: str, tokens: int, now: float, prefill_tokens: int = 0
    ) -> None:
        if tenant in self.limited:
            self._serve(tenant, prefill_tokens, now)
            window = self._uses[tenant].of_peer(router_id)
            if window is not None:
                window.add(now, 1, tokens)

    def ended_elsewhere(
        self,
        router_id: RouterId,
        tenant: str,
        now: float,
        *,
        settled: int,
        tokens: int,
        begun_at: float,
        isl: int = 0,
    ) -> None:
        if tenant not in self.limited:
            return
        self._serve(tenant, OUTPUT_WEIGHT * max(0, tokens + settled - isl), now)
        window = self._uses[tenant].peers.get(router_id)
        if window is not None:
            self._settle(window, settled, tokens, begun_at, now)

    def _settle(self, window: Window, settled: int, tokens: int, begun_at: float, now: float) -> None:
        if settled > 0:
            window.add(now, 0, settled)
        elif settled:
            window.take(begun_at, int(settled == -tokens), -settled)

    # Snapshots

    def ops(self, now: float, live: Set[str], *, is_elder: bool) -> Iterator[TenantUse]:
        """What this replica has counted; of an elder also what replicas had that have left since."""
        for tenant, use in self._uses.items():
            use.slide(now)
            yield from _ops(tenant, use.own, now, "")
            for owner, window in use.peers.items() if is_elder else ():
                if owner not in live:
                    yield from _ops(tenant, window, now, owner)

    def load(self, source: RouterId, ops: Iterable[TenantUse], now: float) -> None:
        """Replace what is known of a peer by its snapshot."""
        fresh: dict[tuple[str, str], Window] = {}
        for op in sorted(ops, key=lambda op: -op.age_ms):
            owner = op.owner or source
            if op.tenant in self.limited and op.age_ms <= 1000 * MINUTE_S and owner != self.router_id:
                window = fresh.setdefault((op.tenant, owner), Window())
                window.add(now - op.age_ms / 1000, op.requests, op.tokens)
        for (tenant, owner), window in fresh.items():
            use = self._uses[tenant]
            if owner == source or owner not in use.peers:
                use.of_peer(owner, window)


def _is_below(limits: KeyLimits, requests: int, tokens: int, at_once: int) -> bool:
    """Whether one more request is within all limits."""
    return (
        (not limits.requests or requests < limits.requests)
        and (not limits.tokens or tokens <= limits.tokens)
        and (not limits.at_once or at_once < limits.at_once)
    )


def _ops(tenant: str, window: Window, now: float, owner: str) -> Iterator[TenantUse]:
    for second, requests, tokens in window.counts:
        age_ms = max(0, round((now - second) * 1000))
        if requests or tokens:
            yield TenantUse(tenant, age_ms, max(0, requests), max(0, tokens), owner)


def _until(kind: str, windows: list[Window], excess: int, now: float) -> float:
    """Seconds until this much counts no longer."""
    if kind == "at_once":
        return 1.0  # nobody knows when a request ends
    place = 1 if kind == "requests" else 2
    for count in sorted([count for window in windows for count in window.counts]):
        excess -= count[place]
        if excess <= 0:
            return max(0.0, math.ceil(count[0] + MINUTE_S + 1 - now))
    return float(MINUTE_S)  # more than all of it: it never passes
