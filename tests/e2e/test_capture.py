"""A real vLLM capture through agent, feed, replica and router, compared with the engine's cached_tokens."""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvrouter.core.fleet.replica import Replica, ReplicaSettings
from kvrouter.core.fleet.router import RouterRules
from kvrouter.core.routing.policy import Prompt, RouteRequest
from kvrouter.core.wire import heartbeats as beats
from kvrouter.core.wire.hashes import block_hashes, pool_token, sequence_hashes
from kvrouter.core.wire.heartbeats import Card, RankBeat, WorkerBeat
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.core.wire.senders import KvSource
from kvrouter.policies.kv import Kv
from kvrouter.worker.engines.vllm import VllmAdapter, decode_batch
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.rank import EngineRank
from kvrouter.worker.zmq.ordering import Apply, EngineStream
from tests.worker.fakes import FakeBus

DATA = Path(__file__).parents[1] / "data"
BLOCK_SIZE = 32
WORKER = WorkerId("pod1")
POOL = PoolId(pool_token("tiny"))
CARD = Card(worker_id=WORKER, url="http://pod1", model="tiny", block_size=BLOCK_SIZE, tiers={"device": 100})


@dataclass(frozen=True, slots=True)
class Predicted:
    """The router's prediction when the request arrived, and the engine's report when it was done."""

    label: str
    tokens: int
    cached_tokens: int


class Routed:
    """An agent and a replica that exchange their bytes directly."""

    def __init__(self) -> None:
        self.bus = FakeBus()
        self.publisher = KvPublisher(self.bus, WORKER, BLOCK_SIZE, model="tiny", incarnation=1)
        self.rank = EngineRank(
            self.publisher, EngineStream(can_replay=True), capacity_blocks=100, adapter=VllmAdapter()
        )
        self.replica = Replica(
            ReplicaSettings(),
            RouterId("r1"),
            1,
            lambda _pool: RouterRules(Kv(), random.Random(1).random),
            chance=random.Random(2).random,
        )
        beat = WorkerBeat(VERSION, 1, "up", POOL, [RankBeat(0, 1, 0)], 1, CARD)
        self.replica.worker_heartbeat(WORKER, beats.encode(beat), 0.0)

    def batch(self, payload: bytes, at: float) -> None:
        """Take a batch that the engine published."""
        self.rank.on_action(Apply(0, payload))
        self.publisher.flush(at)
        for _, frame in self.bus.take():
            self.replica.feeds.kv_frame(KvSource(POOL, WORKER, 0), frame, at)


def read_batches(name: str) -> Iterator[tuple[float, bytes]]:
    """The captured payloads with their own timestamps."""
    for _, _, payload in msgpack.unpackb((DATA / name).read_bytes()):
        yield decode_batch(payload).ts, payload


def read_requests() -> list[dict[str, Any]]:
    """The requests with recorded token ids and cached tokens."""
    recorded = json.loads((DATA / "vllm_requests.json").read_text())["requests"]
    return [one for one in recorded if one.get("prompt_token_ids") and one.get("cached_tokens") is not None]


def replay(name: str) -> list[Predicted]:
    """Batches, arrivals and ends in order of time; a booking lasts from t0 to t1."""
    routed = Routed()
    router = routed.replica.routers[POOL]
    moments: list[tuple[float, int, Any]] = []
    for at, payload in read_batches(name):
        heapq.heappush(moments, (at, len(moments), payload))
    for request in read_requests():
        heapq.heappush(moments, (request["t0"], len(moments), request))
    predictions = []
    while moments:
        at, _, moment = heapq.heappop(moments)
        if isinstance(moment, bytes):
            routed.batch(moment, at)
        elif isinstance(moment, dict):
            ids = moment["prompt_token_ids"]
            hashes = sequence_hashes(block_hashes(ids, BLOCK_SIZE, salt=moment["request"].get("cache_salt")))
            placement = router.route(RouteRequest(moment["label"], (Prompt(hashes, len(ids)),)), at)
            tokens = placement.choice.overlap_blocks * BLOCK_SIZE
            predictions.append(Predicted(moment["label"], tokens, moment["cached_tokens"]))
            heapq.heappush(moments, (moment["t1"], 1_000_000 + len(predictions), placement.key))
        else:
            router.bookings.free(moment)
        router.pool.active.check()
        router.pool.index.check()
    assert not router.pool.active.owners()
    (reader,) = routed.replica.readers.values()
    assert 0 == reader.counters.contradictions + reader.counters.digest_mismatches + reader.counters.gaps
    return predictions


@pytest.mark.parametrize("name", ["vllm_capture.msgpack", "vllm_capture_array_0.23.msgpack"])
def test_overlap_predicted_when_a_request_comes_is_what_the_engine_reports(name: str) -> None:
    """57 of 58 are exact, siblings in flight included; vLLM publishes the last one's clear afterwards."""
    predictions = replay(name)

    wrong = [made for made in predictions if made.tokens != made.cached_tokens]
    assert 58 == len(predictions)
    assert [Predicted("after-reset", 128, 0)] == wrong


def test_siblings_in_flight_count_as_cached() -> None:
    """Of four equal requests at once, the engine served the last three with the first one's blocks."""
    predictions = replay("vllm_capture.msgpack")

    siblings = [made.tokens for made in predictions if made.label == "dup-concurrent"]
    assert [0, 192, 192, 192] == siblings
