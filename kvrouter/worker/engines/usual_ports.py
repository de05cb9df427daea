"""The events of a vLLM that does not report where it publishes them (before 0.31): at their usual ports.

A port does not show which engine has it: of two engines on one host only one can, and its events would fill
the other's index with blocks that it does not hold. So the agent asks for a proof. It sends the engine a
request with random token ids: an event that stores them proves the events, a replay of the same batch proves
the replays.

    127.0.0.1:5557 ──greeting of ZMQ──> SUB ─────────────────────┐
    POST /v1/completions, random ids ──> engine ──BlockStored──> the same ids?
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import urlsplit

import structlog
import zmq.asyncio

from kvrouter.errors import MalformedFrameError
from kvrouter.worker.engines.endpoints import EventsConfig, endpoint_lacks
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.engines.http import EngineHttp
from kvrouter.worker.engines.vllm import ENDPOINTS_UNKNOWN, BlockStored, decode_batch
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import EventEndpoints, ask_replay, open_sub

log = structlog.get_logger()

# vLLM's default endpoint, and the replay endpoint of its examples.
USUAL = EventsConfig(publisher="zmq", endpoint="tcp://*:5557", replay_endpoint="tcp://*:5657")
NOT_ITS_OWN = (
    "event endpoints unknown: the engine does not report them, and no event at {events} was its own: give "
    "--kv-events and --kv-replay (kvrouter serve: kv=tcp://HOST:PORT,replay=tcp://HOST:PORT) if its events "
    "are on"
)
# The events of a first request may come before the subscription has arrived.
_REQUESTS = 2
_EVENT_TIMEOUT_S = 2.0
_GREETING_TIMEOUT_S = 1.0
# What every ZMTP peer sends first: ten bytes, of which the eight in the middle are padding.
_GREETING_BYTES, _FIRST, _LAST = 10, 0xFF, 0x7F
# Ids that every vocabulary has, and so many that no other prompt begins with them.
_VOCABULARY, _FEWEST_TOKENS = 128, 16


async def with_usual_events(
    engine: EngineHttp, options: AgentOptions, facts: EngineFacts, usual: EventsConfig = USUAL
) -> EngineFacts:
    """The facts, with endpoints at the usual ports if the engine proves that they are its own."""
    is_asked = ENDPOINTS_UNKNOWN in facts.lacks and facts.version
    host = urlsplit(options.engine_url).hostname
    endpoints = usual.endpoints(host) if is_asked and host and max(facts.ranks, options.ranks) == 1 else None
    if endpoints is None or not await _speaks_zmq(endpoints.events):
        return facts
    proved = await _prove(engine, facts, facts.block_size(options), endpoints)
    lacks = [lack for lack in facts.lacks if lack != ENDPOINTS_UNKNOWN]
    if proved is None:
        return replace(facts, lacks=(*lacks, NOT_ITS_OWN.format(events=endpoints.events)))
    log.info(
        "engine.usual_ports",
        worker=options.worker_id,
        events=proved.events,
        replay=proved.replay,
        reason="the engine does not report its endpoints; a block of its own was announced there",
    )
    return replace(facts, endpoints=(proved,), lacks=(*lacks, *endpoint_lacks(options, (proved,), 1)))


async def _speaks_zmq(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    try:
        async with asyncio.timeout(_GREETING_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                greeting = await reader.readexactly(_GREETING_BYTES)
            finally:
                writer.close()
    except (OSError, EOFError, TimeoutError):
        return False
    return (greeting[0], greeting[-1]) == (_FIRST, _LAST)


async def _prove(
    engine: EngineHttp, facts: EngineFacts, block_size: int, endpoints: EventEndpoints
) -> EventEndpoints | None:
    """Those of the endpoints that are the engine's own; None if its events are not."""
    with open_sub(endpoints.events, endpoints.topic) as (context, sub):
        for _ in range(_REQUESTS):
            ids = os.urandom(max(block_size, _FEWEST_TOKENS) + 1)
            prompt = [number % _VOCABULARY for number in ids]
            if await engine.complete(facts.models.served_names[0], prompt) is None:
                return None
            batch = await _batch_with(sub, prompt)
            if batch is not None:
                seq, _ = batch
                batches = await ask_replay(context, endpoints.replay or "", seq, _EVENT_TIMEOUT_S)
                return endpoints if batch in (batches or ()) else replace(endpoints, replay=None)
    return None


async def _batch_with(sub: zmq.asyncio.Socket, prompt: Sequence[int]) -> tuple[int, bytes] | None:
    """Number and payload of a batch that stores the beginning of the prompt."""
    try:
        async with asyncio.timeout(_EVENT_TIMEOUT_S):
            while True:
                frames = await sub.recv_multipart()
                if len(frames) == 3 and _stores(frames[2], prompt):
                    return int.from_bytes(frames[1], "big"), frames[2]
    except TimeoutError:
        return None


def _stores(payload: bytes, prompt: Sequence[int]) -> bool:
    try:
        events = decode_batch(payload).events
    except MalformedFrameError:
        return False
    stored = [event.token_ids for event in events if isinstance(event, BlockStored)]
    return any(len(ids) >= _FEWEST_TOKENS and ids == prompt[: len(ids)] for ids in stored)
