"""GET /prefixes: the prefixes that the kept decisions share."""

from __future__ import annotations

import random

import pytest

from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.decisions import DecisionRing
from kvrouter.core.wire.ids import RouterId
from kvrouter.observe.dashboard.prefixes import Prefixes, PrefixRow
from kvrouter.policies.kv import Kv
from tests.core.worlds import T1, T2, card, chain_from, new_pool, prompt, request

CHAIN, OTHER = chain_from(1000, 10), chain_from(5000, 10)


@pytest.mark.parametrize("keeps", [True, False])
async def test_counts_by_the_last_block_found(*, keeps: bool) -> None:
    """One request for a prefix, three for another, one without a prefix; and the holders."""
    pool, kept = new_pool(card("w1"), card("w2"), card("w3")), DecisionRing(10)
    for target, blocks in ((T1, CHAIN[:8]), (T2, CHAIN[:8]), (T1, OTHER[:2])):
        pool.index.store(target, blocks)
    rules = RouterRules(Kv(overlap_weight=100.0), random.Random(1).random, decisions=kept, mode="kv")
    router = Router(pool, rules, router_id=RouterId("me"), incarnation=1, synced=True)
    for chain in (OTHER, CHAIN, CHAIN, CHAIN, chain_from(9000, 4)):
        router.bookings.free(router.route(request(prompt(chain)), 0.0).key)
    sample = await Prefixes(kept if keeps else None).sample()

    assert ((5, 4) if keeps else (0, 0)) == (sample.read, sample.cached)
    assert [
        PrefixRow("llama", f"{CHAIN[7]:016x}", 8, 3, [str(T1), str(T2)]),
        PrefixRow("llama", f"{OTHER[1]:016x}", 2, 1, [str(T1)]),
    ] * keeps == sample.prefixes
