"""What holds for every router of this replica beside its policy: filters, circuits, decisions kept.

flags ──> Rules ──equip──> each router, as its pool is first heard of
POST /busy_threshold ──set_busy──┘                     from its next request on
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.breaker import CircuitBreakers
from kvrouter.core.routing.decisions import DecisionRing
from kvrouter.core.routing.filters import FilterSettings, new_filters
from kvrouter.core.routing.modes import Modes
from kvrouter.core.tables.sessions import SessionTable
from kvrouter.core.wire.ids import PoolId
from kvrouter.frontend.flags.rules import RuleOptions
from kvrouter.policies import PolicySettings, new_policy
from kvrouter.telemetry.metrics import Sample


class Rules:
    """The rules of one replica. Thresholds set at run time stay with their pool."""

    def __init__(self, options: RuleOptions, mode: str, policy: PolicySettings) -> None:
        self.options = options
        kept = max(options.decisions, int(options.log_decisions))
        self.decisions = DecisionRing(kept) if kept else None
        self._mode = mode
        self._policy = policy
        self._filters: dict[PoolId, FilterSettings] = {}

    def new_sessions(self) -> SessionTable:
        """An empty table for one pool."""
        return SessionTable(self.options.session_ttl_s)

    def equip(self, router: Router) -> None:
        """Give a new router what the flags ask for."""
        router.modes = Modes(router.selection, self._mode, partial(new_policy, settings=self._policy))
        router.decisions = self.decisions
        if self.options.breaker is not None:
            router.circuits = CircuitBreakers(self.options.breaker)
        self._filter(router)

    def busy(self, router: Router) -> FilterSettings:
        """The settings of a router's filters, thresholds among them."""
        return self._filters.get(router.pool.id, self.options.filters)

    def set_busy(self, router: Router, blocks: float | None, tokens: int | None) -> None:
        """Thresholds from the next request on; None: that one does not apply."""
        self._filters[router.pool.id] = replace(
            self.busy(router), active_decode_blocks_threshold=blocks, active_prefill_tokens_threshold=tokens
        )
        self._filter(router)

    def _filter(self, router: Router) -> None:
        router.selection.filters = new_filters(self.busy(router), router.circuits)

    def samples(self, routers: Mapping[PoolId, Router]) -> Iterator[Sample]:
        """For /metrics."""
        kept = len(self.decisions) if self.decisions is not None else 0
        yield "kvrouter_decisions_kept", "gauge", "Decisions that /decisions knows", {}, kept
        for pool_id, router in routers.items():
            labels, sessions = {"pool": str(pool_id)}, router.selection.state.sessions
            yield "kvrouter_sessions", "gauge", "Sessions bound to a target", labels, len(sessions)
            for target in router.circuits.open_targets() if router.circuits is not None else ():
                own = {**labels, "worker": str(target.worker_id), "rank": str(target.rank)}
                yield "kvrouter_circuit_open", "gauge", "1: passed over after failures", own, 1
