"""The agents of this process as Prometheus metrics, for `--metrics-port`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from msgspec import Struct

from kvrouter.bus import Bus
from kvrouter.core.wire.heartbeats import RankBeat, State
from kvrouter.telemetry.build import register_build
from kvrouter.telemetry.exposition import Registry, exposition
from kvrouter.telemetry.metrics import Sample, StateCollector
from kvrouter.telemetry.metrics_port import MetricsPortOptions, metrics_port


class RankView(Struct, frozen=True):
    """One rank: what its heartbeat says, and what is known here besides."""

    beat: RankBeat
    blocks: int
    """On the device, published."""


class AgentView(Struct, frozen=True):
    worker: str
    state: State
    """As announced."""
    ranks: Sequence[RankView]


class MetricsOf:
    """What the metrics are read from: the agents that run now, and their bus."""

    def __init__(self) -> None:
        self.bus: Bus | None = None
        self._agents: list[Callable[[], AgentView]] = []

    @contextlib.contextmanager
    def including(self, agent: Callable[[], AgentView]) -> Iterator[None]:
        """Show an agent, which tells what it knows now, while inside."""
        self._agents.append(agent)
        try:
            yield
        finally:
            self._agents.remove(agent)

    def samples(self) -> Iterator[Sample]:
        if self.bus is not None:
            yield "kvrouter_nats_connected", {}, self.bus.connected
        for agent in list(self._agents):
            view = agent()
            labels = {"worker": view.worker}
            yield "kvrouter_agent_state", {**labels, "state": view.state}, 1
            for rank in view.ranks:
                yield from _rank_samples(rank, {**labels, "rank": str(rank.beat.rank)})


def _rank_samples(rank: RankView, labels: dict[str, str]) -> Iterator[Sample]:
    yield "kvrouter_agent_blocks", labels, rank.blocks
    yield "kvrouter_agent_rank_partial", labels, rank.beat.partial


@contextlib.asynccontextmanager
async def agents_metrics(at: MetricsPortOptions) -> AsyncIterator[MetricsOf]:
    """Serve the metrics while inside, if there is a port. Raises ConfigError."""
    shown, registry = MetricsOf(), Registry()
    register_build(registry)
    registry.register(StateCollector(shown.samples))
    async with metrics_port(at, lambda names: exposition(registry, names=names)):
        yield shown
