"""Reports which way serves the texts and chats of each pool, and why not a better one.

PromptWays.serving ──> the log when it changes, /ready, /workers, one metric

The task `run` also has engines probed that rest, and tokenizers loaded that cards name, so a better way is
used as soon as it is possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import structlog

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.ids import PoolId
from kvrouter.prompts.card_way import CardTokenizers
from kvrouter.prompts.engines_way import EnginesWay
from kvrouter.prompts.ways import KINDS, LOAD, Kind, LocalWay, PromptWays, Serving, TextWay
from kvrouter.telemetry.metrics import Sample

log = structlog.get_logger()

LOOK_EVERY_S = 0.5
_WITHOUT_TOKENS = {TextWay.name, LOAD}
_EFFECTS = {
    TextWay.name: "routed by what was sent where, not by what engines hold",
    LOAD: "routed by load",
}


class WayReports:
    def __init__(
        self,
        replica: Replica,
        ways: PromptWays,
        engines: EnginesWay | None,
        cards: CardTokenizers,
        *,
        is_auto: bool,
    ) -> None:
        """`is_auto`: whether ways without tokens are a fallback, and not what the operator asked for."""
        self._replica = replica
        self._ways = ways
        self._engines = engines
        self._cards = cards
        self._is_auto = is_auto
        self._logged: dict[tuple[PoolId, Kind], str] = {}

    async def run(self) -> None:
        """Never returns."""
        while True:
            pools = self._pools()
            if self._engines is not None:
                self._engines.keep([pool.id for pool in pools])
                for pool in pools:
                    await self._engines.look(pool)
            self._cards.keep([pool.id for pool in pools])
            for pool in pools:
                # one that was given serves before the card's: nothing to load
                if self._ways.serving(pool, "text").way != LocalWay.name:
                    await self._cards.look(pool)
            self._log_changes()
            await asyncio.sleep(LOOK_EVERY_S)

    def degraded(self) -> Iterator[str]:
        """Sentences about pools whose texts or chats are routed without their tokens."""
        for pool in self._pools():
            for kind in KINDS:
                serving = self._ways.serving(pool, kind)
                if self._is_lacking(pool, kind, serving):
                    reasons = "; ".join(f"{way}: {reason}" for way, reason in serving.why_not.items())
                    yield f"{pool.id}: {kind}s are {_EFFECTS[serving.way]} ({reasons})"

    def unknown(self, pool_id: PoolId) -> str:
        """Which chats of a pool have no tokens, though others have, and why; empty: none."""
        router = self._replica.routers.get(pool_id)
        return self._ways.unknown(router.pool) if router is not None else ""

    def view(self) -> dict[str, Any]:
        """By pool and kind of prompt."""
        return {
            pool.id: {
                kind: {"way": serving.way, "why_not": dict(serving.why_not)}
                for kind in KINDS
                if (serving := self._ways.serving(pool, kind))
            }
            for pool in self._pools()
        }

    def samples(self) -> Iterator[Sample]:
        for pool in self._pools():
            for kind in KINDS:
                labels = {"pool": str(pool.id), "prompt": kind, "way": self._ways.serving(pool, kind).way}
                yield "kvrouter_tokenizer", labels, 1

    def _pools(self) -> list[Pool]:
        """The pools with workers whose requests are tokenized."""
        routers = self._replica.routers.values()
        return [router.pool for router in routers if router.pool.targets and router.needs_tokens]

    def _is_lacking(self, pool: Pool, kind: Kind, serving: Serving) -> bool:
        if not self._is_auto or serving.way not in _WITHOUT_TOKENS:
            return False
        # An engine that refuses to tokenize all chats has no chat template, and will refuse chats as well. If
        # chats come all the same, it may be an engine whose /tokenize takes texts only.
        is_refused = self._engines is not None and self._engines.refuses(pool, kind)
        return not is_refused or bool(self._ways.without_tokens[pool.id, kind])

    def _log_changes(self) -> None:
        for pool in self._pools():
            if self._engines is not None and not self._engines.has_looked_at(pool):
                continue  # the first probe decides
            for kind in KINDS:
                serving = self._ways.serving(pool, kind)
                if self._logged.get((pool.id, kind)) == serving.way:
                    continue
                self._logged[pool.id, kind] = serving.way
                said = log.warning if self._is_lacking(pool, kind, serving) else log.info
                reasons = {f"not_{way.replace(' ', '_')}": why for way, why in serving.why_not.items()}
                said("tokenizer.way", pool=pool.id, prompt=kind, way=serving.way, **reasons)
