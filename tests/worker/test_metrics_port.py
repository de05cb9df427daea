"""--metrics-port of an agent."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest

from kvrouter.errors import ConfigError
from kvrouter.telemetry.catalog import SECTIONS
from kvrouter.telemetry.metrics_port import MetricsPortOptions
from kvrouter.worker.agent import serve
from kvrouter.worker.metrics_port import agents_metrics
from tests.frontend.clients import get
from tests.worker.fake_engine import pack, store
from tests.worker.test_agent import A, B, Scene, scene

__all__ = ["scene"]  # the fixture


async def test_samples(scene: Scene, free_port: Callable[[], int]) -> None:
    """The metrics show engine, feed and bus; an agent that left has no series."""
    port, stop = free_port(), asyncio.Event()
    async with agents_metrics(MetricsPortOptions(port)) as metrics:
        agent = asyncio.create_task(serve(scene.options, stop, metrics=metrics))
        await scene.events.send(pack(store(2, parent=1)))
        await scene.listener.until_held({A, B})
        await scene.listener.beat(lambda beat: bool(beat.ranks[0].running))
        text = (await get(f"http://127.0.0.1:{port}", "/metrics")).body.decode()
        stop.set()
        await agent
        left = (await get(f"http://127.0.0.1:{port}", "/metrics")).body.decode()

    for line in (
        'kvrouter_agent_state{state="up",worker="w"} 1.0',
        'kvrouter_agent_blocks{rank="0",worker="w"} 2.0',
        'kvrouter_agent_rank_partial{rank="0",worker="w"} 0.0',
        "kvrouter_nats_connected 1.0",
    ):
        assert line in text.splitlines()
    assert 'worker="w"' not in left
    named = set(re.findall(r"^# TYPE (kvrouter_\S+)", text, re.MULTILINE))
    assert SECTIONS["Agents"].keys() <= named


async def test_port_in_use(free_port: Callable[[], int]) -> None:
    """A port that is in use is an error that names the flag; port 0 opens none."""
    port = free_port()
    async with agents_metrics(MetricsPortOptions(0)), agents_metrics(MetricsPortOptions(port)):
        with pytest.raises(ConfigError, match=rf"--metrics-port: cannot listen on 127.0.0.1:{port}"):
            async with agents_metrics(MetricsPortOptions(port)):
                pass
