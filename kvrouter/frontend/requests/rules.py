"""What applies to every router of a replica besides its policy: filters, circuit breakers, kept decisions.

flags ──> Rules ──of_pool──> each new router
POST /busy_threshold ──set_thresholds──> a router, from its next request on
each attempt's outcome ──record_outcome──> the circuit of its target
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import structlog

from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.breaker import CircuitBreakers
from kvrouter.core.routing.builtin_policy import RoutingTables
from kvrouter.core.routing.decisions import DecisionRing
from kvrouter.core.routing.filters import FilterSettings, new_filters
from kvrouter.core.tables.sessions import SessionTable
from kvrouter.core.tables.text_index import TextIndex, TextIndexSettings
from kvrouter.core.wire.ids import PoolId, Target
from kvrouter.frontend.settings import RuleOptions
from kvrouter.policies import CUSTOM, PolicySettings, new_policy
from kvrouter.relay.engine_answers import rest_s
from kvrouter.relay.outcomes import Done, Lost, Outcome, Rejected, Retried, TimedOut
from kvrouter.replica.loop import first_turn
from kvrouter.telemetry.metrics import Sample

log = structlog.get_logger()


class Rules:
    """The rules of one replica. Thresholds set at run time apply again if a pool is dropped and returns."""

    def __init__(
        self,
        options: RuleOptions,
        mode: str,
        policy: PolicySettings,
        texts: TextIndexSettings,
    ) -> None:
        self.options = options
        self._texts = texts
        # --log-decisions logs the last kept decision, so it keeps one even with --decisions 0.
        kept = max(options.decisions, int(options.log_decisions))
        self.decisions = DecisionRing(kept) if kept else None
        self._mode = mode
        self._policy = policy
        self._filters: dict[PoolId, FilterSettings] = {}

    def of_pool(self, pool_id: PoolId) -> RouterRules:
        circuits = CircuitBreakers(self.options.breaker) if self.options.breaker is not None else None
        make_policy = partial(new_policy, settings=self._policy, turn=first_turn())
        return RouterRules(
            make_policy(self._mode),
            random.random,
            RoutingTables(texts=TextIndex(self._texts), sessions=SessionTable(self.options.session_ttl_s)),
            new_filters(self.filters(pool_id), circuits),
            circuits,
            self.decisions,
            self._mode,
            make_policy,
        )

    def filters(self, pool_id: PoolId) -> FilterSettings:
        """The settings of a pool's filters, with the thresholds set at run time."""
        return self._filters.get(pool_id, self.options.filters)

    def set_thresholds(self, router: Router, blocks: float | None, tokens: int | None) -> None:
        """Apply thresholds of filter `busy` from the next request on; None switches one off."""
        pool_id = router.pool.id
        self._filters[pool_id] = replace(
            self.filters(pool_id),
            active_decode_blocks_threshold=blocks,
            active_prefill_tokens_threshold=tokens,
        )
        router.modes.use_filters(new_filters(self.filters(pool_id), router.circuits))

    def change(
        self, options: RuleOptions, mode: str, policy: PolicySettings, routers: Mapping[PoolId, Router]
    ) -> None:
        """Use these thresholds, this mode and these weights from the next request on.

        Thresholds that differ from those of before replace what was set at run time.
        """
        if options.filters != self.options.filters:
            self._filters.clear()
        is_other_policy = (mode, policy) != (self._mode, self._policy)
        self.options, self._mode, self._policy = options, mode, policy
        for pool_id, router in routers.items():
            if router.circuits is not None and options.breaker is not None:
                router.circuits.settings = options.breaker
            router.modes.use_filters(new_filters(self.filters(pool_id), router.circuits))
            if is_other_policy:
                self._change_policies(router)

    def _change_policies(self, router: Router) -> None:
        make_policy = partial(new_policy, settings=self._policy, turn=first_turn())
        # a custom policy has none of these settings
        policy = router.selection.policy if self._mode == CUSTOM else make_policy(self._mode)
        router.modes.use_policies(policy, self._mode, make_policy)

    def samples(self, routers: Mapping[PoolId, Router]) -> Iterator[Sample]:
        for pool_id, router in routers.items():
            labels, sessions = {"pool": str(pool_id)}, router.tables.sessions
            yield "kvrouter_sessions", labels, len(sessions)
            # Open circuits only: a closed one needs no series, and a fleet has thousands of targets.
            for target in router.circuits.open_targets() if router.circuits is not None else ():
                own = {**labels, "worker": str(target.worker_id), "rank": str(target.rank)}
                yield "kvrouter_circuit_open", own, 1


def record_busy(router: Router, target: Target, refusal: Rejected, now: float) -> None:
    """Leave a busy worker alone for as long as it asks for."""
    seconds = rest_s(dict(refusal.advice), time.time())
    if seconds:
        router.tables.rests.ask(target, now + seconds)
        log.info("worker.rests", worker=str(target), status=refusal.status, seconds=round(seconds, 3))


def record_refusal(router: Router, target: Target, now: float, chance: float) -> None:
    """The target's worker has accepted no connection: all its ranks share its server, and rest."""
    router.pool.unreachable(target.worker_id)
    for rank in router.pool.targets_of(target.worker_id):
        router.tables.rests.refused(rank, now, chance)


def record_outcome(circuits: CircuitBreakers, target: Target, outcome: Outcome | None) -> None:
    """Pass how an attempt ended to the target's circuit. None: the client left, or the replica failed."""
    match outcome:
        case None | Done(spares_worker=True):
            circuits.abandoned(target)
        case Lost() | Retried() | TimedOut():
            _failed(circuits, target)
        case Rejected(status=status) if status >= 500:  # 408, 429 and 404 show a worker that runs
            _failed(circuits, target)
        case Done(failure=failure) if failure:
            _failed(circuits, target)
        case Rejected() | Done():
            circuits.succeeded(target)


def _failed(circuits: CircuitBreakers, target: Target) -> None:
    if circuits.failed(target, asyncio.get_running_loop().time()):
        log.warning("worker.circuit_opened", worker=str(target), open_s=circuits.settings.open_s)
