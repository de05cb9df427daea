"""The whole agent between a fake engine and a real NATS server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import pytest
from structlog.testing import capture_logs

from kvrouter import long_wait
from kvrouter.bus import Bus
from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from kvrouter.core.wire.heartbeats import Card, Hello, RankBeat, WorkerBeat
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import VERSION, Cleared, ReplayRequest
from kvrouter.core.wire.ops import encode as encode_op
from kvrouter.version import __version__
from kvrouter.worker import agent, pool_choice
from kvrouter.worker.agent import serve
from kvrouter.worker.announcer import TakenOverError
from kvrouter.worker.engines.adapter import Batch
from kvrouter.worker.engines.endpoints import NO_REPLAY
from kvrouter.worker.engines.http import EngineError
from kvrouter.worker.engines.vllm import CACHING_OFF, Event, VllmAdapter
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.pool_choice import Rejoining
from kvrouter.worker.publisher import Sink
from kvrouter.worker.zmq.sockets import EngineEvents, EventEndpoints
from tests.worker.closed_sets import ClosedSets
from tests.worker.fake_engine import EngineServer, EventSockets, pack, store
from tests.worker.listener import Listener

A, B = sequence_hashes(block_hashes([1, 1, 2, 2], 2))
_namespaces = itertools.count()


@dataclass
class Scene:
    """An engine, a listener, and the options of an agent."""

    engine: EngineServer
    events: EventSockets
    listener: Listener
    options: AgentOptions

    @contextlib.asynccontextmanager
    async def agent(self, options: AgentOptions | None = None) -> AsyncIterator[asyncio.Task[None]]:
        """A running agent, which leaves at the end."""
        stop = asyncio.Event()
        task = asyncio.create_task(serve(options or self.options, stop))
        yield task
        stop.set()
        await task


@pytest.fixture
async def scene(nats_url: str, free_port: Callable[[], int]) -> AsyncIterator[Scene]:
    """Everything except the agent; the engine has one block already."""
    namespace = f"agent-{next(_namespaces)}-{free_port()}"
    async with (
        EngineServer.open(free_port()) as engine,
        EventSockets.open() as events,
        Listener.open(nats_url, namespace, "tiny") as listener,
    ):
        await events.send(pack(store(1)))
        feeds = [EventEndpoints(events.events, events.replay)]
        options = AgentOptions(
            engine.url, "w", nats_url, namespace, feeds, heartbeat_s=0.05, probe_s=0.02, flush_s=0.001
        )
        yield Scene(engine, events, listener, options)


async def test_replay_is_learnt(scene: Scene) -> None:
    """With only --kv-events, the replay that the engine reports gives the blocks cached before."""
    scene.engine.sources = {"0": scene.events.source()}
    options = replace(scene.options, endpoints=[EventEndpoints(scene.events.events)])

    async with scene.agent(options):
        await scene.listener.until_held({A})


async def test_events_of_another_engine(scene: Scene) -> None:
    """An agent that reads events elsewhere than its engine reports them logs it, and its card says it."""
    scene.engine.sources = {
        "0": {"publisher": "zmq", "endpoint": "tcp://*:9", "replay_endpoint": "tcp://*:8"}
    }
    with capture_logs() as logs:
        async with scene.agent():
            beat = await scene.listener.beat(lambda beat: beat.card is not None)

    lacks = [entry for entry in logs if entry["event"] == "engine.lacks"]
    assert beat.card is not None
    assert [("warning", "w")] * 2 == [(entry["log_level"], entry["worker"]) for entry in lacks]
    assert list(beat.card.notes) == [entry["lack"] for entry in lacks]
    assert (
        f"at tcp://127.0.0.1:9, but --kv-events (kvrouter serve: kv=) is {scene.events.events}:"
        in lacks[0]["lack"]
    )
    assert f"but --kv-replay (kvrouter serve: replay=) is {scene.events.replay}:" in lacks[1]["lack"]
    (up,) = [entry for entry in logs if entry["event"] == "worker.up"]
    assert (scene.events.events, scene.events.replay) == (up["events"], up["replay"])


async def test_engine_comes_back_without_a_replay(scene: Scene) -> None:
    """What another process of the engine lacks is logged when it comes back; the rest is not repeated."""
    scene.engine.sources = {"0": scene.events.source() | {"replay_endpoint": None}}
    caching = scene.engine.metrics.replace('engine="0",num', 'engine="0",enable_prefix_caching="False",num')
    options = replace(scene.options, endpoints=[EventEndpoints(scene.events.events)])
    with capture_logs() as logs:
        async with scene.agent(options):
            await scene.listener.beat(lambda beat: beat.card is not None and NO_REPLAY in beat.card.notes)
            scene.engine.is_healthy = False
            await scene.listener.beat(lambda beat: beat.state == "down")
            scene.engine.metrics = caching
            scene.engine.is_healthy = True
            await scene.listener.beat(
                lambda beat: beat.card is not None and beat.card.prefix_caching is False
            )

    assert [NO_REPLAY, CACHING_OFF] == [entry["lack"] for entry in logs if entry["event"] == "engine.lacks"]


async def test_announces(scene: Scene) -> None:
    """The agent announces the engine's card, its load and the state of its feed, and leaves at the end."""
    listener = scene.listener
    async with scene.agent():
        beat = await listener.beat(
            lambda beat: bool(beat.card and beat.ranks[0].seq and beat.ranks[0].running)
        )
        await listener.until_held({A})

    assert beat.card is not None
    assert (
        Card(
            worker_id="w",
            url=scene.engine.url,
            model="tiny",
            served_names=("tiny",),
            lora_names=("adapter",),
            block_size=2,
            tiers={"device": 100},
            max_model_len=512,
            engine="vllm",
            engine_version="0.32.0",
            started_at_us=beat.incarnation,
            engine_started_at_us=10_000_000,
            takes_token_ids=True,
            agent_version=__version__,
            tokenizer="/m",
        )
        == beat.card
    )
    assert [RankBeat(0, beat.incarnation, beat.ranks[0].seq, False, 3)] == beat.ranks
    assert "leave" == (await listener.beat(lambda beat: beat.state == "leave")).state


async def test_extra_series_and_adapters(scene: Scene) -> None:
    """An additional series, and the adapters in use and waited for, are in the next heartbeat."""
    scene.engine.metrics += (
        'vllm:num_preemptions_total{engine="0"} 7\n'
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="adapter",waiting_lora_adapters="b"} 1\n'
    )
    options = replace(scene.options, metrics={"preempted": "vllm:num_preemptions_total"})
    async with scene.agent(options):
        beat = await scene.listener.beat(lambda beat: bool(beat.ranks[0].metrics))
        (rank,) = beat.ranks
        assert ({"preempted": 7.0}, ("adapter",), ("b",)) == (
            rank.metrics,
            rank.running_loras,
            rank.waiting_loras,
        )
        scene.listener.bus.publish(scene.listener.subjects.hello, b"")
        carried = await scene.listener.beat(lambda beat: bool(beat.card and beat.card.max_loras))

    assert carried.card is not None
    assert 2 == carried.card.max_loras


async def test_publishes_events(scene: Scene) -> None:
    """The engine's stored blocks, replayed or live, arrive at the listener."""
    async with scene.agent():
        await scene.events.until_subscribed()
        await scene.listener.until_held({A})
        await scene.events.send(pack(store(2, parent=1)))

        await scene.listener.until_held({A, B})


@pytest.mark.usefixtures("reads_again_soon")
async def test_events_raise(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error in an event stops its rank for a pause; then the history is read again."""
    is_sound = asyncio.Event()
    publish = VllmAdapter.publish

    def broken(adapter: VllmAdapter, batch: Batch[Event], sink: Sink) -> None:
        publish(adapter, batch, sink)
        if not is_sound.is_set():
            is_sound.set()
            raise IndexError("an unexpected event")

    monkeypatch.setattr(VllmAdapter, "publish", broken)
    async with scene.agent():
        await is_sound.wait()
        await scene.listener.until_held({A})


@pytest.mark.usefixtures("reads_again_soon")
async def test_reading_raises(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error before a batch is queued ends after a pause, too."""
    async with scene.agent():
        await scene.listener.until_held({A})
        await scene.events.until_subscribed()
        with monkeypatch.context() as patch:
            is_read = asyncio.Event()

            def broken(_feed: EngineEvents, _topic: bytes) -> bool:
                is_read.set()
                raise IndexError("an unexpected topic")

            patch.setattr(EngineEvents, "_is_followed", broken)
            await scene.events.send(pack(store(2, parent=1)))
            await is_read.wait()

        await scene.listener.until_held({A, B})


@pytest.mark.usefixtures("reads_again_soon")
async def test_history_is_read_again(scene: Scene) -> None:
    """An engine that reports too few blocks for a while is whole again afterwards."""
    sound = scene.engine.metrics
    async with scene.agent():
        await scene.listener.until_held({A})
        scene.engine.metrics = sound.replace('num_gpu_blocks="100"', 'num_gpu_blocks="1"')
        await scene.engine.scraped(scene.engine.scrapes + 2)
        await scene.events.send(pack(store(2, parent=1)))
        await scene.listener.beat(lambda beat: beat.ranks[0].partial)
        scene.engine.metrics = sound

        await scene.listener.until_held({A, B})
        await scene.listener.beat(lambda beat: not beat.ranks[0].partial)


async def test_odd_replay_endpoint(scene: Scene) -> None:
    """If no replay can be requested, events are followed all the same."""
    feed = EventEndpoints(scene.events.events, "tcp://nowhere", replay_timeout_s=0.05)
    options = replace(scene.options, endpoints=[feed])
    async with scene.agent(options):
        await scene.events.until_subscribed()
        await scene.events.send(pack(store(1, 2)))
        await scene.listener.until_held({A, B})


async def test_hello(scene: Scene) -> None:
    """A hello is answered with the card, long before the next heartbeat."""
    listener = scene.listener
    async with scene.agent(replace(scene.options, heartbeat_s=3600)):
        await listener.beat(lambda beat: beat.card is not None)
        listener.bus.publish(listener.subjects.hello, b"")

        assert await listener.beat(lambda beat: beat.card is not None)


async def test_replay(scene: Scene) -> None:
    """A process that requests one gets a snapshot; malformed requests and unknown ranks get nothing."""
    listener = scene.listener
    subject = listener.subjects.kv_replay(WorkerId("w"))
    async with scene.agent():
        await listener.until_held({A})
        listener.bus.publish(subject, b"nonsense")
        listener.bus.publish(subject, encode_op(ReplayRequest(VERSION, 9, 0, 0)))
        snapshot = await listener.snapshot()

    assert {A} == ClosedSets().apply(snapshot.ops).tiers[0]


async def test_engine_down_and_up(scene: Scene) -> None:
    """Three failed probes mean down and Cleared; when the engine answers, its history is read again."""
    listener = scene.listener
    async with scene.agent():
        await listener.until_held({A})
        scene.engine.is_healthy = False
        await listener.beat(lambda beat: beat.state == "down")
        await listener.until_held(set())
        scene.engine.is_healthy = True

        await listener.beat(lambda beat: beat.state == "up")
        await listener.until_held({A})
    assert Cleared() in listener.live_ops


@pytest.mark.parametrize("status", [404, 500, 503])
async def test_only_health_answers(scene: Scene, status: int) -> None:
    """An engine whose /health alone answers is down, with the reason in log and card, until all answers."""
    listener = scene.listener
    with capture_logs() as logs:
        async with scene.agent():
            await listener.until_held({A})
            scene.engine.status = status
            down = await listener.beat(lambda beat: beat.state == "down" and beat.card is not None)
            scene.engine.status = 200
            up = await listener.beat(lambda beat: beat.state == "up" and beat.card is not None)
            await listener.until_held({A})

    reason = f"/v1/models answered {status}: this rank is retired"
    assert down.card is not None
    assert up.card is not None
    assert f"down: {reason}" in down.card.notes
    assert not any("down:" in note for note in up.card.notes)
    (line,) = [entry for entry in logs if entry["event"] == "engine.down"]
    assert reason == line["reason"]
    assert line["remedy"]


async def test_engine_that_stays_down(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is down for long is awaited with the last reason, at growing intervals."""
    monkeypatch.setattr(long_wait, "FIRST_S", 0.1)
    with capture_logs() as logs:
        async with scene.agent():
            await scene.listener.until_held({A})
            scene.engine.is_healthy = False
            beat = await scene.listener.beat(lambda beat: beat.state == "down")
            while not (said := [entry for entry in logs if entry["event"] == "engine.awaited"]):
                beat = await scene.listener.beat(lambda beat: beat.state == "down")
            scene.engine.is_healthy = True
            await scene.listener.beat(lambda beat: beat.state == "up")

    assert "down" == beat.state
    assert ("/health answered 503", scene.engine.url) == (said[0]["reason"], said[0]["url"])
    assert "engine's log" in said[0]["remedy"]


SLEEP = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} '


async def test_sleep(scene: Scene) -> None:
    """A sleeping engine takes no requests, and its blocks are gone before it says so, asleep and awake."""
    listener = scene.listener
    metrics = scene.engine.metrics
    async with scene.agent():
        await listener.until_held({A})
        scene.engine.metrics = f"{metrics}{SLEEP}0.0\n"
        await listener.beat(lambda beat: beat.state == "down")
        await listener.until_held(set())
        scene.engine.metrics = f"{metrics}{SLEEP}1.0\n"
        await listener.beat(lambda beat: beat.state == "up")
        await scene.events.send(pack({"type": "AllBlocksCleared"}, store(2)))
        await listener.until_held(set(sequence_hashes(block_hashes([2, 2], 2))))


async def test_asleep_at_the_start(scene: Scene) -> None:
    """The history of an engine that sleeps is not what it holds."""
    metrics = scene.engine.metrics
    scene.engine.metrics = f"{metrics}{SLEEP}0.0\n"
    async with scene.agent():
        assert "down" == (await scene.listener.beat(lambda _: True)).state
        scene.engine.metrics = f"{metrics}{SLEEP}1.0\n"
        await scene.listener.beat(lambda beat: beat.state == "up")
        await scene.listener.until_held(set())


async def test_late_clear(scene: Scene) -> None:
    """The clear of /reset_prefix_cache comes with the next step: only that step's blocks are left."""
    async with scene.agent():
        await scene.listener.until_held({A})
        await scene.events.send(pack({"type": "AllBlocksCleared"}, store(2)))

        await scene.listener.until_held(set(sequence_hashes(block_hashes([2, 2], 2))))


async def test_engine_restarted_between_probes(scene: Scene) -> None:
    """If the engine's process is younger than the table, its history is read again."""
    async with scene.agent():
        await scene.listener.until_held({A})
        scene.events.restart()
        scene.engine.metrics = scene.engine.metrics.replace("seconds 10.0", "seconds 150.0")

        await scene.listener.until_held(set())


async def test_another_engine_between_probes(scene: Scene) -> None:
    """An engine that restarts too fast to be down is learnt again: its card is of the new process."""
    async with scene.agent():
        await scene.listener.beat(lambda beat: beat.card is not None and beat.card.engine_version == "0.32.0")
        scene.events.restart()
        scene.engine.version = "0.33.0"
        scene.engine.metrics = scene.engine.metrics.replace("seconds 10.0", "seconds 150.0")

        await scene.listener.beat(lambda beat: beat.card is not None and beat.card.engine_version == "0.33.0")


METRICS_4 = (
    'vllm:cache_config_info{block_size="4",engine="0",num_gpu_blocks="50"} 1.0\n'
    "process_start_time_seconds 150.0\n"
)


def has_block_size(size: int) -> Callable[[WorkerBeat], bool]:
    """Whether a heartbeat has a card with this block size."""
    return lambda beat: beat.card is not None and beat.card.block_size == size


def of_another_size(scene: Scene) -> None:
    """Make the engine another process, whose blocks have 4 tokens."""
    scene.events.restart()
    scene.engine.metrics = METRICS_4


async def test_engine_comes_back_with_another_block_size(scene: Scene) -> None:
    """Events of the former process do not count: the first card has the new size."""
    async with scene.agent():
        await scene.listener.until_held({A})
        scene.engine.is_healthy = False
        await scene.listener.beat(lambda beat: beat.state == "down")
        of_another_size(scene)
        scene.engine.is_healthy = True

        beat = await scene.listener.beat(lambda beat: beat.state == "up" and beat.card is not None)

    assert beat.card is not None
    assert (4, {"device": 50}) == (beat.card.block_size, beat.card.tiers)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (8, 4)])
async def test_engine_restarted_between_probes_with_another_block_size(
    scene: Scene, before: int, after: int
) -> None:
    """A new process has its own block size, larger or smaller, before its first event."""
    tokens = [7] * before
    await scene.events.send(pack({**store(9), "token_ids": tokens, "block_size": before}))
    async with scene.agent():
        await scene.listener.beat(has_block_size(before))
        of_another_size(scene)

        await scene.listener.beat(has_block_size(after))
        await scene.listener.until_held(set())
        await scene.events.send(pack({**store(9), "token_ids": [1, 1, 2, 2], "block_size": 4}))
        await scene.listener.until_held(set(sequence_hashes(block_hashes([1, 1, 2, 2], 4))))


async def test_events_do_not_lower_the_block_size(scene: Scene) -> None:
    """Partial last blocks are smaller; the card keeps the largest size of the engine's life."""
    async with scene.agent():
        await scene.events.send(pack({**store(9), "token_ids": [7] * 8, "block_size": 8}))
        await scene.listener.beat(has_block_size(8))
        await scene.events.send(pack(store(5)))
        await scene.listener.until_held({A, *sequence_hashes(block_hashes([7] * 8, 8))})
        await scene.engine.scraped(scene.engine.scrapes + 2)
        while not scene.listener.beats.empty():
            scene.listener.beats.get_nowait()

        beat = await scene.listener.beat(lambda _: True)

    assert 2 == beat.card_version, "once larger, and not smaller again"


async def test_another_model(scene: Scene) -> None:
    """An engine that comes back with another model ends the agent: its pool has changed."""
    task = asyncio.create_task(serve(scene.options, asyncio.Event()))
    await scene.listener.until_held({A})
    scene.engine.is_healthy = False
    await scene.listener.beat(lambda beat: beat.state == "down")
    scene.engine.model = "other"
    scene.engine.is_healthy = True

    with pytest.raises(ExceptionGroup) as raised:
        await task

    assert raised.group_contains(EngineError, match="now serves 'other'")


@pytest.fixture
def asks_for_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "MODELS_EVERY_S", 0.02)


@pytest.mark.usefixtures("asks_for_models")
async def test_adapters_come(scene: Scene) -> None:
    """An adapter that the engine loads later is announced."""
    async with scene.agent():
        await scene.listener.beat(lambda beat: bool(beat.card and beat.card.lora_names == ("adapter",)))
        scene.engine.adapters = ["adapter", "other"]

        await scene.listener.beat(
            lambda beat: bool(beat.card and beat.card.lora_names == ("adapter", "other"))
        )


@pytest.mark.usefixtures("asks_for_models")
async def test_another_model_without_an_outage(scene: Scene) -> None:
    """An engine that serves another model without an outage ends its agent, with the reason."""
    with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match="'tiny' and now serves 'other'")):
        async with scene.agent() as task:
            await scene.listener.beat(lambda beat: beat.state == "up")
            scene.engine.model = "other"
            await asyncio.wait([task])


async def test_another_pool(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told that several pools serve its name, an agent leaves and joins the one of equal engines."""
    monkeypatch.setattr(pool_choice, "LISTEN_AGAIN_S", 0.2)
    old = Card(
        worker_id="old",
        url="http://127.0.0.1:9",
        model="former",
        served_names=("tiny", "former"),
        block_size=2,
        tokenizer="/m",
    )
    bus, subjects = scene.listener.bus, scene.listener.subjects
    async with scene.agent():
        await scene.listener.until_held({A})
        own = await scene.listener.beat(lambda beat: beat.card is not None)
        bus.publish(subjects.hello, encode_op(Hello(("other",))))
        bus.publish(subjects.hello, encode_op(Hello(("tiny",))))
        announcing = asyncio.create_task(_announce(bus, subjects.live_worker(WorkerId("old")), old))
        left = await scene.listener.beat(lambda beat: beat.state == "leave")
        moved = await scene.listener.beat(lambda beat: beat.card is not None)
        announcing.cancel()

    assert own.card is not None
    assert moved.card is not None
    assert ("tiny", "former") == (own.card.model, moved.card.model)
    assert moved.incarnation > left.incarnation == own.incarnation
    assert [1] == [rank.seq for rank in moved.ranks]


async def _announce(bus: Bus, subject: str, card: Card) -> None:
    while True:
        bus.publish(subject, encode_op(WorkerBeat(VERSION, 1, "up", "former", [], 1, card)))
        await asyncio.sleep(0.02)


async def test_given_pool(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --model an agent stays in its pool, whatever a replica tells it."""
    monkeypatch.setattr(Rejoining, "until_better", None)
    async with scene.agent(replace(scene.options, model="tiny")):
        await scene.listener.until_held({A})
        scene.listener.bus.publish(scene.listener.subjects.hello, encode_op(Hello(("tiny",))))
        await scene.listener.beat(lambda beat: beat.card is not None)


async def test_namesake(scene: Scene) -> None:
    """An agent that receives heartbeats of a later one with its worker id ends with an error."""
    later = WorkerBeat(VERSION, 2**62, "up", "p", [], 1)

    task = asyncio.create_task(serve(scene.options, asyncio.Event()))
    await scene.listener.until_held({A})
    await scene.listener.usurp(later)

    with pytest.raises(ExceptionGroup) as raised:
        await task

    assert raised.group_contains(TakenOverError)


async def test_without_events(scene: Scene) -> None:
    """An engine without events is announced as such, with its load."""
    async with scene.agent(replace(scene.options, endpoints=())):
        beat = await scene.listener.beat(lambda beat: beat.card is not None)

    assert beat.card is not None
    assert not beat.card.publishes_events
    assert [RankBeat(0, beat.incarnation, 0, False, 3)] == beat.ranks


async def test_metrics_appear(scene: Scene) -> None:
    """An engine without metrics is announced without load; once it has metrics, they count."""
    scene.engine.metrics, metrics = "<html></html>", scene.engine.metrics
    async with scene.agent(replace(scene.options, endpoints=())):
        first = await scene.listener.beat(lambda beat: beat.card is not None)
        scene.engine.metrics = metrics
        await scene.listener.beat(has_block_size(2))
        later = await scene.listener.beat(lambda beat: beat.ranks[0].running is not None)

    assert first.card is not None
    assert (16, None, 3) == (first.card.block_size, first.ranks[0].running, later.ranks[0].running)


async def test_metrics_show_more_ranks(scene: Scene) -> None:
    """If the first metrics of an engine show more ranks than its agent announces, the agent ends."""
    scene.engine.metrics, metrics = "", scene.engine.metrics
    task = asyncio.create_task(serve(replace(scene.options, endpoints=()), asyncio.Event()))
    await scene.listener.beat(lambda beat: beat.card is not None)
    scene.engine.metrics = metrics + 'vllm:num_requests_running{engine="1"} 3.0\n'

    with pytest.raises(ExceptionGroup) as raised:
        await task

    assert raised.group_contains(EngineError, match="has 2 ranks and had 1: start the agent again")


async def test_metrics_disappear(scene: Scene) -> None:
    """An answer that is not the engine's metrics is no restart: the table stays, the load is unknown."""
    async with scene.agent():
        await scene.listener.until_held({A})
        scene.engine.metrics = ""
        beat = await scene.listener.beat(lambda beat: beat.ranks[0].running is None)
        await scene.engine.scraped(scene.engine.scrapes + 2)
        await scene.events.send(pack(store(2, parent=1)))
        await scene.listener.until_held({A, B})

    assert "up" == beat.state


async def test_discovers_events(scene: Scene) -> None:
    """Without endpoints in its flags the agent uses the reported ones."""
    scene.engine.sources = {"0": scene.events.source()}

    async with scene.agent(replace(scene.options, endpoints=())):
        beat = await scene.listener.beat(lambda beat: beat.card is not None)
        await scene.listener.until_held({A})

    assert beat.card is not None
    assert beat.card.publishes_events


async def test_events_move(scene: Scene) -> None:
    """An engine that comes back with other event endpoints, or with its first ones, ends the agent."""
    scene.engine.sources = {}
    task = asyncio.create_task(serve(replace(scene.options, endpoints=()), asyncio.Event()))
    await scene.listener.beat(lambda beat: beat.card is not None)
    scene.engine.is_healthy = False
    await scene.listener.beat(lambda beat: beat.state == "down")
    scene.engine.sources = {"0": scene.events.source()}
    scene.engine.is_healthy = True

    with pytest.raises(ExceptionGroup) as raised:
        await task

    assert raised.group_contains(EngineError, match="elsewhere than before")


async def test_engine_not_up_yet(scene: Scene, free_port: Callable[[], int]) -> None:
    """The agent waits for its engine, and can be stopped meanwhile."""
    url = f"http://127.0.0.1:{free_port()}"
    async with scene.agent(replace(scene.options, engine_url=url)) as task:
        pass

    assert task.done()


async def test_process(scene: Scene, nats_url: str) -> None:
    """`python -m kvrouter.worker` runs until SIGTERM, publishes `leave` and exits with 0."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrouter.worker",
        "--engine-url", scene.engine.url,
        "--kv-events", scene.events.events, "--kv-replay", scene.events.replay,
        "--nats", nats_url, "--namespace", scene.options.namespace, "--worker-id", "w",
        "--drain-timeout-s", "0",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        await scene.listener.until_held({A})
    finally:
        process.send_signal(signal.SIGTERM)

    _, output = await process.communicate()
    assert 0 == process.returncode
    assert b"--drain-timeout-s 0: leaving at once" in output
    await scene.listener.beat(lambda beat: beat.state == "leave")
