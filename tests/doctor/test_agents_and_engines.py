"""Agents that publish other blocks than their engine holds."""

from __future__ import annotations

import pytest

from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import SequenceHash
from kvrouter.core.wire.ops import DEVICE, Stored
from kvrouter.doctor.replica_checks import different
from kvrouter.verify.engines import EngineHistory
from kvrouter.verify.tier_sets import TierSets


@pytest.mark.parametrize(
    ("published", "kind"),
    [
        pytest.param([1, 2], "engine.different", id="beyond"),
        pytest.param([], "engine.different", id="missing"),
        pytest.param([1], None, id="equal"),
    ],
)
def test_agent_against_engine(published: list[int], kind: str | None) -> None:
    """An agent that publishes other blocks than its engine holds: neither is a replica that differs."""
    card, agent = Card(worker_id="w", url="http://e", model="m", block_size=16), TierSets()
    history = EngineHistory("tcp://e", card, 0)
    history.is_complete = True
    for sets, hashes in ((history.ever, [1]), (history.always, [1]), (agent, published)):
        sets.apply(Stored(DEVICE, None, pack_hashes([SequenceHash(hash_) for hash_ in hashes])))
    texts = [f"blocks of w/0 in p: {text}" for text in history.differences(agent, is_partial=False)]

    found = [(finding.kind.code, finding.about) for finding in different(texts)]

    assert ([(kind, "blocks of w/0 in p")] if kind else []) == found
