"""`--metrics-port`: the agents of this process as Prometheus metrics, on a port of their own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Protocol

from aiohttp import web
from msgspec import Struct
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvrouter.bus import Bus
from kvrouter.core.wire.heartbeats import RankBeat, State
from kvrouter.errors import ConfigError
from kvrouter.telemetry.build import register_build
from kvrouter.telemetry.exposition import Registry, exposition
from kvrouter.telemetry.metrics import Sample, StateCollector


class RankView(Struct, frozen=True):
    """One rank: what its heartbeat says, and what is known here besides."""

    beat: RankBeat
    blocks: int
    """On the device, published."""
    held_blocks: int
    """Not published yet, as their parents are not known."""
    losses: Mapping[str, int]
    """How often its history was lost, by reason."""


class AgentView(Struct, frozen=True):
    worker: str
    state: State
    """As announced."""
    is_down: bool
    """Whether the engine misses its health probes."""
    heartbeats: int
    ranks: Sequence[RankView]


class Viewed(Protocol):
    """An agent."""

    def view(self) -> AgentView:
        """What it knows now."""
        ...


class MetricsOf:
    """What the metrics are read from: the agents that run now, and their bus."""

    def __init__(self) -> None:
        self.bus: Bus | None = None
        self._agents: list[Viewed] = []

    @contextlib.contextmanager
    def including(self, agent: Viewed) -> Iterator[None]:
        """Show an agent while inside."""
        self._agents.append(agent)
        try:
            yield
        finally:
            self._agents.remove(agent)

    def samples(self) -> Iterator[Sample]:
        if self.bus is not None:
            yield from _bus_samples(self.bus)
        for agent in list(self._agents):
            view = agent.view()
            labels = {"worker": view.worker}
            text = "1 while the engine answers its health probes"
            yield "kvrouter_agent_engine_up", "gauge", text, labels, not view.is_down
            text = "1 for the state that the agent announces: up, draining or down"
            yield "kvrouter_agent_state", "gauge", text, {**labels, "state": view.state}, 1
            text = "Heartbeats sent"
            yield "kvrouter_agent_heartbeats", "counter", text, labels, view.heartbeats
            for rank in view.ranks:
                yield from _rank_samples(rank, {**labels, "rank": str(rank.beat.rank)})


def _bus_samples(bus: Bus) -> Iterator[Sample]:
    text = "1 while connected to NATS"
    yield "kvrouter_agent_nats_connected", "gauge", text, {}, bus.connected
    yield "kvrouter_agent_published", "counter", "Messages sent", {}, bus.counters.published
    text = "Payload bytes sent"
    yield "kvrouter_agent_published_bytes", "counter", text, {}, bus.counters.published_bytes
    text = "Messages not sent: NATS away, or its buffer full"
    yield "kvrouter_agent_unsent", "counter", text, {}, bus.counters.unsent


def _rank_samples(rank: RankView, labels: dict[str, str]) -> Iterator[Sample]:
    beat = rank.beat
    yield "kvrouter_agent_blocks", "gauge", "Blocks on the device that are published", labels, rank.blocks
    text = "Blocks not published yet, as their parents are not known"
    yield "kvrouter_agent_held_blocks", "gauge", text, labels, rank.held_blocks
    yield "kvrouter_agent_feed_seq", "gauge", "Number of the last frame of the KV feed", labels, beat.seq
    text = "Start of this life of the feed, in seconds since the epoch"
    yield "kvrouter_agent_feed_started_seconds", "gauge", text, labels, beat.incarnation / 1e6
    text = "1 while the engine may hold blocks that are not published"
    yield "kvrouter_agent_rank_partial", "gauge", text, labels, beat.partial
    for reason, count in rank.losses.items():
        text = "Times that the history of a rank was lost, by reason"
        yield "kvrouter_agent_history_losses", "counter", text, {**labels, "reason": reason}, count
    if beat.running is not None:
        text = "Requests that the engine computes"
        yield "kvrouter_agent_engine_running", "gauge", text, labels, beat.running
    if beat.waiting is not None:
        text = "Requests that wait in the engine"
        yield "kvrouter_agent_engine_waiting", "gauge", text, labels, beat.waiting
    if beat.kv_usage is not None:
        text = "Share of the engine's KV blocks in use, 0 to 1"
        yield "kvrouter_agent_engine_kv_usage", "gauge", text, labels, beat.kv_usage


@contextlib.asynccontextmanager
async def metrics_port(host: str, port: int) -> AsyncIterator[MetricsOf]:
    """Serve GET /metrics while inside; port 0: nothing is served. Raises ConfigError."""
    shown = MetricsOf()
    if not port:
        yield shown
        return
    registry = Registry()
    register_build(registry)
    registry.register(StateCollector(shown.samples))

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=await exposition(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(f"--metrics-port: cannot listen on {host}:{port}: {error.strerror}") from None
        yield shown
    finally:
        await runner.cleanup()
