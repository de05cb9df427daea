"""A draining worker: the operator's signals, the looks at the engine's load, and the announcements."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from kvrouter.core.wire.heartbeats import WorkerBeat
from kvrouter.worker import drain
from kvrouter.worker.drain import Duty, Looks, until_drained
from kvrouter.worker.engines.http import EngineHttp
from kvrouter.worker.engines.metrics import RankLoad
from tests.worker.fake_engine import EngineServer
from tests.worker.listener import Listener

BUSY, IDLE, UNKNOWN = {0: RankLoad(1, 0)}, {0: RankLoad(0, 0)}, {0: RankLoad()}
NO_ANSWER = "the engine does not report its load"
SOON_S = 10.0
_namespaces = itertools.count()


# --- what the operator asks for ---


@pytest.fixture
def duty() -> Duty:
    """The duty of a running worker."""
    made = Duty(asyncio.Event())
    made.attend(lambda: None)
    return made


def test_retire(duty: Duty) -> None:
    """The first SIGTERM drains, the second leaves."""
    duty.retire()
    first = (duty.is_draining, duty.leave.is_set())
    duty.retire()

    assert (True, False) == first
    assert duty.leave.is_set()


def test_retire_before_there_is_a_worker() -> None:
    """While the agent waits for its engine there is nothing to drain."""
    duty = Duty(asyncio.Event())

    duty.retire()

    assert duty.leave.is_set()


def test_pause(duty: Duty) -> None:
    """SIGUSR1 drains without leaving, the next one ends it; it has no effect on a worker that retires."""
    seen = []
    for step in (duty.pause, duty.pause, duty.retire, duty.pause, duty.pause):
        step()
        seen.append(duty.is_draining)

    assert [True, False, True, True, True] == seen
    assert not duty.leave.is_set()


def test_worker_is_notified() -> None:
    """The worker is notified of each change; signals before its start are kept."""
    duty, changes = Duty(asyncio.Event()), []
    duty.pause()
    duty.attend(lambda: changes.append(duty.is_draining))

    duty.pause()
    duty.retire()

    assert [False, True] == changes


# --- looks at the engine ---


@pytest.mark.parametrize(
    ("looks", "verdicts"),
    [
        ([IDLE, IDLE], ["", "idle"]),
        ([BUSY, IDLE, BUSY, IDLE, IDLE], ["", "", "", "", "idle"]),
        ([{0: RankLoad(0, 3)}] * 4, [""] * 4),
        ([{0: RankLoad(0, 0), 1: RankLoad(2, 0)}] * 4, [""] * 4),
        ([{}, UNKNOWN, {}], ["", "", NO_ANSWER]),
        ([{}, {}, BUSY, {}, IDLE, {}, IDLE, IDLE], [""] * 7 + ["idle"]),
    ],
    ids=["idle", "two in a row", "waiting", "another rank", "blind", "in between"],
)
def test_looks(looks: list[dict[int, RankLoad]], verdicts: list[str]) -> None:
    """Two looks in a row without a request end the draining, and so do three without numbers."""
    judge = Looks()

    assert verdicts == [judge.take(loads) for loads in looks]


@pytest.fixture
async def engine(free_port: Callable[[], int]) -> AsyncIterator[EngineServer]:
    """An engine with three requests running."""
    async with EngineServer.open(free_port()) as server:
        yield server


async def test_waits_for_the_last_request(engine: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent waits until the metrics count no request, and no longer."""
    monkeypatch.setattr(drain, "LOOK_S", 0.01)
    async with EngineHttp.open(engine.url) as http, asyncio.timeout(SOON_S):
        waiting = asyncio.create_task(until_drained(http, lambda: False))
        await engine.scraped(3)
        assert not waiting.done()
        engine.metrics = engine.metrics.replace(" 3.0", " 0.0")

        assert "idle" == await waiting


async def test_engine_that_is_not_there(free_port: Callable[[], int]) -> None:
    """If the engine's port is closed, or it is known to be down, there is nothing to wait for."""
    async with EngineHttp.open(f"http://127.0.0.1:{free_port()}") as http, asyncio.timeout(SOON_S):
        assert "the engine is gone" == await until_drained(http, lambda: False)
        assert "the engine is down" == await until_drained(http, lambda: True)


async def test_engine_without_metrics(engine: EngineServer) -> None:
    """An engine that never reports its load does not delay the agent."""
    engine.metrics = "go_goroutines 7\n"
    async with EngineHttp.open(engine.url) as http, asyncio.timeout(SOON_S):
        assert NO_ANSWER == await until_drained(http, lambda: False)


# --- the process ---


class Agent:
    """`python -m kvrouter.worker` as a process, and its heartbeats."""

    def __init__(self, process: asyncio.subprocess.Process, listener: Listener) -> None:
        self.process = process
        self._listener = listener

    async def beat(self, state: str) -> WorkerBeat:
        """The next heartbeat with this state."""
        return await self._listener.beat(lambda beat: beat.state == state)

    async def ended(self) -> tuple[int, str]:
        """Its exit code, and its log."""
        async with asyncio.timeout(SOON_S):
            _, output = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, output.decode()


@contextlib.asynccontextmanager
async def running_agent(nats_url: str, engine: EngineServer, *flags: str) -> AsyncIterator[Agent]:
    """An agent that has announced its engine."""
    namespace = f"drain-{next(_namespaces)}-{engine.url.rpartition(':')[2]}"
    async with Listener.open(nats_url, namespace, "tiny") as listener:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvrouter.worker", "--engine-url", engine.url, "--worker-id", "w",
            "--nats", nats_url, "--namespace", namespace, "--probe-s", "0.05", *flags,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        agent = Agent(process, listener)
        try:
            await agent.beat("up")
            yield agent
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()


async def test_signals(nats_url: str, engine: EngineServer) -> None:
    """SIGUSR1: draining, also after the engine was down; the next SIGUSR1: up.

    SIGTERM: draining, with heartbeats while requests run, then `leave` and exit code 0.
    """
    async with running_agent(nats_url, engine, "--heartbeat-s", "0.1") as agent:
        agent.process.send_signal(signal.SIGUSR1)
        await agent.beat("draining")
        engine.is_healthy = False
        await agent.beat("down")
        engine.is_healthy = True
        await agent.beat("draining")
        agent.process.send_signal(signal.SIGUSR1)
        while (await agent.beat("up")).ranks[0].running != 3:
            pass  # its load is not known yet after it was down
        agent.process.send_signal(signal.SIGTERM)
        beats = [await agent.beat("draining") for _ in range(8)]
        engine.metrics = engine.metrics.replace(" 3.0", " 0.0")
        await agent.beat("leave")
        code, output = await agent.ended()

    assert [3] * 8 == [beat.ranks[0].running for beat in beats]
    assert 0 == code
    assert "reason=idle" in output


async def test_second_sigterm(nats_url: str, engine: EngineServer) -> None:
    """The second SIGTERM ends the agent at once, although requests run."""
    async with running_agent(nats_url, engine) as agent:
        agent.process.send_signal(signal.SIGINT)
        await agent.beat("draining")
        agent.process.send_signal(signal.SIGTERM)
        await agent.beat("leave")
        code, output = await agent.ended()

    assert 0 == code
    assert "leaving at once on request" in output


async def test_drain_timeout(nats_url: str, engine: EngineServer) -> None:
    """After --drain-timeout-s the agent leaves, although requests run."""
    async with running_agent(nats_url, engine, "--drain-timeout-s", "0.5") as agent:
        agent.process.send_signal(signal.SIGTERM)
        await agent.beat("leave")
        code, output = await agent.ended()

    assert 0 == code
    assert "--drain-timeout-s 0.5 has passed" in output
