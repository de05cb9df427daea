"""Where a request should go, for callers that send it there themselves. One core under every dialect.

    PlacementAsk ──> pool, prompts ──> RouteRequest ──Router──> target
                                                        └─ booked: a reservation, on which the caller reports

The router, its tables, feeds and policies are the replica's own, and so are the hashes: what a caller
reserves is a booking like any other, with the same peers, repairs and digests.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import structlog
from msgspec.structs import replace

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.policy import Candidate, RouteRequest, Wanted
from kvrouter.core.tables.bookings import MOST_TOKENS
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import Target
from kvrouter.errors import BadRequestError, NoWorkersError, UnknownModelError
from kvrouter.frontend.requests.overrides import DIRECT
from kvrouter.relay.request import new_request_id
from kvrouter.router.asked import DEFAULT, Override, PlacementAsk, SessionContext, first_rank
from kvrouter.router.reservations import Reservation, Reservations

log = structlog.get_logger()

# How exactly leases end.
EXPIRE_S = 0.1
# A label of a worker that a caller registered: its address, if that is none of HTTP.
ENDPOINT = "endpoint"
# Where no first byte is ever reported, prefill is taken to be this fast.
UNMEASURED_TOKENS_PER_S = 5000
LONG_TOKENS = 1 << 16
_MOST_WORKER = (1 << 64) - 1
_TIERS = ("gpu", "dp", "cpu", "disk")

ReadBody = Callable[[PlacementAsk, str], Awaitable[tuple[Router, RouteRequest]]]
"""Finds the router and the tokens of a text, of messages or of a whole request, as a frontend does."""


async def pause_after(isl: int) -> None:
    """Let others run: reading a long prompt, booking it and writing the answer take some ms each."""
    if isl > LONG_TOKENS:
        await asyncio.sleep(0)


async def no_texts(_asked: PlacementAsk, _request_id: str) -> tuple[Router, RouteRequest]:
    raise BadRequestError("a text needs a tokenizer, which is not here: give token_ids", param="text")


class Placing:
    """Places requests of callers in the pools of one replica. `publish`: sends what has happened to peers."""

    def __init__(
        self,
        replica: Replica,
        table: Reservations,
        publish: Callable[[], None],
        now: Callable[[], float],
        *,
        lease_s: float,
        aliases: Callable[[], Mapping[str, str]] = dict,
        read_body: ReadBody = no_texts,
    ) -> None:
        self.replica = replica
        self.table = table
        self._publish = publish
        self._now = now
        self._lease_s = lease_s
        self._aliases = aliases
        self._read_body = read_body

    # Choosing

    async def select(self, asked: PlacementAsk) -> dict[str, Any]:
        """The best target; nothing is booked. With an id, it is kept for `reserve_kept`."""
        router, request = await self._wanted(asked, asked.id or new_request_id())
        asked.check_adapter(router.pool)
        await pause_after(request.isl)
        now = self._now()
        decision = router.decide(request, now, exclude=asked.excluded(router.pool))
        chosen = [one.candidate for one in decision.verdicts if one.target == decision.target]
        if decision.target is None or chosen[0] is None:
            raise NoWorkersError(f"no worker of {router.pool.model!r} may take this request now")
        if asked.id is not None:
            self.table.keep(asked.id, router, request, decision.target, now)
        return _answer(router.pool, request, chosen[0])

    async def reserve(self, asked: PlacementAsk, caller: str) -> dict[str, Any]:
        """The best target, or the one that is named, booked."""
        router, request = await self._wanted(asked, asked.id or new_request_id())
        asked.check_adapter(router.pool)
        await pause_after(request.isl)
        return self.book(router, request, caller, asked)

    def reserve_kept(self, asked: PlacementAsk, caller: str) -> dict[str, Any]:
        """Book what `select` has kept, where it was."""
        kept = self.table.kept(asked.id or "", self._now())
        request = replace(kept.request, wanted=Wanted(*kept.target), mode=DIRECT)
        booked = self.book(kept.router, request, caller, asked)
        self.table.forget(asked.id or "")
        return booked

    def book(self, router: Router, request: RouteRequest, caller: str, asked: PlacementAsk) -> dict[str, Any]:
        """Choose and book. One plain call: no other caller can take the id or the room in between."""
        now, name, bookings = self._now(), request.request_id, router.bookings
        size = self.table.check_room(name, caller, request)
        exclude = asked.excluded(router.pool)
        placed, candidates = router.route_among(request, now, streamed=asked.stream, exclude=exclude)
        lease_s = asked.lease_s or self._lease_s
        blocks = placed.key, placed.target, placed.block_size
        self.table.add(Reservation(name, caller, router, *blocks, lease_s, now + lease_s, size))
        if not asked.charges:
            bookings.mark_prefill_completed(placed.key, now)
        elif not asked.stream and router.tables.rates.seconds(placed.target, 1) is None:
            per_s = placed.choice.card.prefill_tokens_per_s or UNMEASURED_TOKENS_PER_S
            bookings.predict(now + placed.choice.prefill_tokens / per_s, placed.key.number)
        self._publish()
        return _answer(router.pool, request, placed.choice, candidates) | {"lease_s": lease_s}

    # What becomes of a reservation

    def prefill_complete(self, reservation_id: str) -> None:
        """Its first byte has come."""
        now = self._now()
        one = self.table.renew(reservation_id, now)
        one.router.bookings.first_byte(one.key, now)
        self._publish()

    def progress(self, reservation_id: str, output_tokens: int | None = None) -> None:
        """Its answer has so many tokens; None: one more block of them."""
        one = self.table.renew(reservation_id, self._now())
        tokens = one.output_tokens + one.block_size if output_tokens is None else output_tokens
        one.output_tokens = min(MOST_TOKENS, max(tokens, one.output_tokens))
        one.router.bookings.progress(one.key, one.output_tokens)
        self._publish()

    def free(self, reservation_id: str) -> None:
        """The request has ended, in any way."""
        self._end([self.table.renew(reservation_id, self._now())])

    def free_worker(self, worker_id: str) -> None:
        """The worker is gone, and so are its requests."""
        self._end(self.table.of_worker(worker_id))

    async def expire_forever(self) -> None:
        """End the reservations whose callers are gone, again and again."""
        while True:
            await asyncio.sleep(EXPIRE_S)
            self.expire()

    def expire(self) -> None:
        if over := self.table.expired(self._now()):
            log.info("reservations.expired", count=len(over), callers=[*{one.caller for one in over}][:5])
            self._end(over)

    def _end(self, over: Iterable[Reservation]) -> None:
        for one in over:
            self.table.remove(one)
            one.router.bookings.free(one.key, self._now(), one.output_tokens or None)
        self._publish()

    # Looking

    def loads(self, model: str | None) -> list[dict[str, Any]]:
        """What is booked on each rank, by all replicas: of one model, or of all."""
        waiting = {"pending_count": 0, "pending_isl_tokens": 0}
        return [_model(pool) | {"loads": _loads(pool)} | waiting for pool in self.pools(model)]

    async def candidates(self, asked: PlacementAsk) -> tuple[Pool, int, Sequence[Candidate]]:
        """Each rank with the load that it would have with this prompt, and the prompt's tokens."""
        router, request = await self._wanted(asked, "")
        return router.pool, request.isl, router.pool.candidates(router.pool.in_present_size(request))

    def pools(self, model: str | None) -> list[Pool]:
        """Those with workers: of one model, or all."""
        routers = [*self.replica.routers.values()] if model is None else [self.router_for(model)]
        return [router.pool for router in routers if router.pool.workers]

    def router_for(self, model: str, group: str = DEFAULT) -> Router:
        """The router of a model. The name `default` also means the only one that is served."""
        if group != DEFAULT:
            what = f"routing_group {group[:100]!r} is not served here: a group is a namespace"
            raise UnknownModelError(f"{what}; start a router with --namespace for each")
        try:
            router = self.replica.router_for(self._aliases().get(model, model))
        except (UnknownModelError, NoWorkersError):
            if model != DEFAULT:
                raise
        else:
            if model != DEFAULT or router.pool.workers:
                return router
        return self.replica.router_for(None)

    async def _wanted(self, asked: PlacementAsk, request_id: str) -> tuple[Router, RouteRequest]:
        if asked.has_text:
            asked.check()
            router, request = await self._read_body(asked, request_id)
        else:
            router = self.router_for(asked.model_name, asked.group)
            request = asked.of_tokens(request_id, router.pool)
        override, wanted = asked.router_config_override or Override(), asked.pinned(router.pool)
        session = asked.session_context or SessionContext(asked.session_id or "")
        weight = override.overlap_score_weight
        changes = {
            "overlap_weight": override.overlap_score_credit if weight is None else weight,
            "temperature": override.router_temperature,
            "session": session.session_id or None,
            "parent_session": session.parent_session_id or None,
            "wanted": wanted,
            "mode": DIRECT if wanted else None,
        }
        given = {name: value for name, value in changes.items() if value is not None}
        if not (given or asked.has_text):
            return router, request
        # a caller gets one target, so no two share the request
        return router, replace(request, request_id=request_id, may_split=False, **given)


# What callers see


def public_id(worker_id: str) -> int | str:
    """A worker's id as callers know it: those of Dynamo are numbers."""
    is_number = worker_id.isdecimal() and worker_id == str(int(worker_id)) and int(worker_id) <= _MOST_WORKER
    return int(worker_id) if is_number else worker_id


def endpoint_of(card: Card) -> str:
    return card.labels.get(ENDPOINT) or card.url


def place_of(target: Target, card: Card) -> dict[str, Any]:
    return {"worker_id": public_id(card.worker_id), "dp_rank": target.rank + first_rank(card)}


def tier_depths(candidate: Candidate) -> tuple[int, int, int]:
    """Blocks of the prompt in its tiers: device; and host; and disk."""
    depths = candidate.tier_blocks or (0,)
    return depths[0], depths[min(1, len(depths) - 1)], depths[-1]


def matched(one: Candidate, ranks: Iterable[Candidate], names: Sequence[str] = _TIERS) -> dict[str, Any]:
    """A worker's overlap in tokens. `names`: of the fields for device, ranks, host and disk."""
    size, (device, host, disk) = one.block_size, tier_depths(one)
    of_ranks = {str(each.target.rank + first_rank(each.card)): tier_depths(each)[0] * size for each in ranks}
    amounts = (device * size, of_ranks, host * size, disk * size)
    return {"longest_matched": disk * size, **dict(zip(names, amounts, strict=True))}


def _answer(
    pool: Pool, request: RouteRequest, choice: Candidate, candidates: Iterable[Candidate] = ()
) -> dict[str, Any]:
    card, target, prompts = choice.card, choice.target, request.prompts
    ranks = (choice,) if card.ranks == 1 else [one for one in candidates if one.card is card] or (choice,)
    hashes = prompts[0].hashes if len(prompts) == 1 and not request.is_text else ()
    return _model(pool) | place_of(target, card) | {
        "selection_id": request.request_id,
        "reservation_id": request.request_id,
        "endpoint": endpoint_of(card),
        "headers": {card.rank_header: str(target.rank)} if card.rank_header else {},
        "block_size": pool.block_size,
        "overlap": matched(choice, ranks),
        "effective_prefill_tokens": choice.own_prefill_tokens,
        "potential_decode_blocks": choice.decode_blocks,
        "isl_tokens": request.isl,
        # signed, as Dynamo has them: its clients cannot read greater numbers
        "sequence_hashes": array("q", array("Q", hashes).tobytes()).tolist(),
        "track_prefill_tokens": True,
    }  # fmt: skip


def _model(pool: Pool) -> dict[str, Any]:
    return {"model_name": pool.model, "routing_group": DEFAULT, "tenant_id": DEFAULT}


def _loads(pool: Pool) -> list[dict[str, Any]]:
    names = ("potential_prefill_tokens", "potential_decode_blocks", "active_requests")
    return [
        place_of(target, worker.card) | dict(zip(names, pool.active.load(target), strict=True))
        for target, worker in pool.targets.items()
    ]
