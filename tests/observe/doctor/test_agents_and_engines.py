"""Agents that read the events of another engine, or publish other blocks than their engine holds."""

from __future__ import annotations

import pytest

from kvrouter.bus import Subjects
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.heartbeats import Card, WorkerBeat
from kvrouter.core.wire.ids import SequenceHash, WorkerId
from kvrouter.core.wire.ops import DEVICE, VERSION, Stored
from kvrouter.observe.doctor.fleet_checks import check_agents
from kvrouter.observe.doctor.replica_checks import different
from kvrouter.observe.listening import HeardWorker, Listener
from kvrouter.observe.verify.engines import EngineHistory
from kvrouter.observe.verify.tier_sets import TierSets
from kvrouter.worker.engines.endpoints import endpoint_lacks
from kvrouter.worker.engines.facts import EngineFacts, build_card
from kvrouter.worker.engines.http import Models
from kvrouter.worker.engines.metrics import Scrape
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import EventEndpoints


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

    found = [(finding.code, finding.about) for finding in different(texts)]

    assert ([(kind, "blocks of w/0 in p")] if kind else []) == found


def _noted(worker_id: str, reported: str, given: str) -> Card:
    """The card of an agent with these endpoints, the engine with those that it reports."""
    options = AgentOptions(f"http://{worker_id}", worker_id, endpoints=[EventEndpoints(given)])
    feeds = (EventEndpoints(reported),)
    lacks = tuple(endpoint_lacks(options, feeds, 1))
    facts = EngineFacts(Models(("m",), ()), "", Scrape(block_size=16), endpoints=feeds, lacks=lacks)
    return build_card(options, facts, event_block_size=0, widest_tier=0, started_at_us=1)


def test_exchanged_events() -> None:
    """Two agents that read each other's events name each other; one at a third port names none."""
    listener = Listener(Subjects("n"))
    for card in (
        _noted("a", "tcp://h:1", "tcp://h:2"),
        _noted("b", "tcp://h:2", "tcp://h:1"),
        _noted("c", "tcp://h:3", "tcp://h:4"),
        _noted("d", "tcp://g:2", "tcp://g:1"),
        _noted("e", "tcp://h:5", "tcp://localhost:5"),
    ):
        listener.workers[WorkerId(card.worker_id)] = HeardWorker(
            WorkerBeat(VERSION, 1, "up", "p", [], 1), card=card
        )

    found = list(check_agents(listener, 0.0, is_whole=True))

    assert {
        "a": "events at tcp://h:1, read at tcp://h:2; exchanged with b",
        "b": "events at tcp://h:2, read at tcp://h:1; exchanged with a",
        "c": "events at tcp://h:3, read at tcp://h:4",
        "d": "events at tcp://g:2, read at tcp://g:1",
    } == {one.about: one.seen for one in found if one.code == "agent.other_events"}
