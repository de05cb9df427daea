"""The Python interface: a program announces its worker, and a replica reads it over a real NATS server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from nats.aio.client import Client

import kvrouter
from kvrouter import KvPublisher, announce, connect
from kvrouter.bus import Bus, NatsOptions, Subjects
from kvrouter.core.fleet.replica import Replica, ReplicaSettings
from kvrouter.core.fleet.router import RouterRules
from kvrouter.core.wire.ids import RouterId, Target, WorkerId
from kvrouter.errors import ConfigError
from kvrouter.policies.kv import Kv
from kvrouter.replica.loop import ReplicaLoop
from tests.frontend.workers import until
from tests.worker.fakes import FakeBus

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "trtllm_worker.py"
_numbers = itertools.count()


class Reader:
    """A replica on the bus."""

    def __init__(self, replica: Replica, namespace: str, nats_url: str) -> None:
        self.replica = replica
        self.namespace = namespace
        self.nats_url = nats_url

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Return when `is_so` holds at the replica."""
        await until(is_so)

    def overlap(self, worker: str, tokens: list[int], block_size: int, **seed: str) -> list[int]:
        """The depth of a worker's blocks, per tier set."""
        hashes = kvrouter.sequence_hashes(kvrouter.block_hashes(tokens, block_size, **seed))  # type: ignore[arg-type]
        target = Target(WorkerId(worker), 0)
        found = [router.pool.index.overlap_by_tier(hashes) for router in self.replica.routers.values()]
        return next((depths[target] for depths in found if target in depths), [])

    def state(self, worker: str) -> str | None:
        """What the replica knows of a worker: None, or whether it takes requests."""
        for router in self.replica.routers.values():
            if WorkerId(worker) in router.pool.workers:
                return router.pool.workers[WorkerId(worker)].state
        return None


@contextlib.asynccontextmanager
async def open_reader(nats_url: str, namespace: str) -> AsyncIterator[Reader]:
    """A running replica."""
    replica = Replica(
        ReplicaSettings(),
        RouterId(f"reader{next(_numbers)}"),
        1,
        lambda _pool: RouterRules(Kv(), lambda: 0.5),
        chance=lambda: 0.5,
    )
    async with Bus.open(NatsOptions((nats_url,)), name="reader") as bus:
        replica_loop = ReplicaLoop(replica, bus, Subjects(namespace), heartbeat_s=0.1)
        await replica_loop.subscribe()
        task = asyncio.create_task(replica_loop.run())
        yield Reader(replica, namespace, nats_url)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def reader(nats_url: str, free_port: Callable[[], int]) -> AsyncIterator[Reader]:
    """A replica in a separate namespace."""
    async with open_reader(nats_url, f"door-{next(_numbers)}-{free_port()}") as reader:
        yield reader


async def test_example(reader: Reader) -> None:
    """docs/examples/trtllm_worker.py makes a worker that gets requests, with its blocks in their tiers."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLE), "--demo", "--nats", reader.nats_url, "--namespace", reader.namespace,
        "--url", "http://127.0.0.1:9", "--model", "tiny", "--block-size", "4",
        "--device-blocks", "100", "--host-blocks", "50",
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    tokens = list(range(1, 14))
    try:
        await reader.until(lambda: reader.overlap("trt-0", tokens, 4) == [2, 3])
        assert "up" == reader.state("trt-0")
        (router,) = reader.replica.routers.values()
        assert {Target(WorkerId("trt-0"), 0)} == set(router.pool.targets)
    finally:
        process.send_signal(signal.SIGTERM)

    assert 0 == await process.wait()
    await reader.until(lambda: reader.state("trt-0") is None)


async def test_worker(reader: Reader) -> None:
    """Stored and removed blocks arrive, and so do load, down, up, and the end."""
    async with connect(reader.nats_url) as nats:
        blocks = KvPublisher(nats, "own", 2)
        blocks.stored([b"a", b"b"], [1, 2, 3, 4], salt="s")
        async with announce(
            nats, [blocks], url="http://127.0.0.1:9/", model="m", namespace=reader.namespace, heartbeat_s=0.05
        ) as worker:
            await reader.until(lambda: reader.overlap("own", [1, 2, 3, 4], 2, salt="s") == [2])
            assert [] == reader.overlap("own", [1, 2, 3, 4], 2)
            blocks.removed([b"b"])
            await reader.until(lambda: reader.overlap("own", [1, 2, 3, 4], 2, salt="s") == [1])
            worker.load(running=3)
            worker.down()
            await reader.until(lambda: reader.state("own") == "down")
            await reader.until(lambda: reader.overlap("own", [1, 2, 3, 4], 2, salt="s") == [])
            worker.up()
            await reader.until(lambda: reader.state("own") == "up")
        await reader.until(lambda: reader.state("own") is None)


async def test_late_reader(nats_url: str, reader: Reader) -> None:
    """A replica that starts later requests the former frames, and gets them."""
    async with connect(nats_url) as nats:
        blocks = KvPublisher(nats, "own", 2)
        async with announce(nats, [blocks], url="http://h:1", model="m", namespace=reader.namespace):
            blocks.stored([1], [1, 2])
            await reader.until(lambda: reader.overlap("own", [1, 2], 2) == [1])
            async with open_reader(nats_url, reader.namespace) as late:
                await late.until(lambda: late.overlap("own", [1, 2], 2) == [1])


async def test_error_inside(nats_url: str, reader: Reader) -> None:
    """An error in the program ends the announcement, and the worker is gone."""

    async def break_down() -> None:
        blocks = KvPublisher(nats, "own", 2)
        async with announce(nats, [blocks], url="http://h:1", model="m", namespace=reader.namespace):
            await reader.until(lambda: reader.state("own") == "up")
            raise RuntimeError("the engine broke")

    async with connect(nats_url) as nats:
        with pytest.raises(ExceptionGroup) as raised:
            await break_down()

        assert raised.group_contains(RuntimeError, match="the engine broke")
        await reader.until(lambda: reader.state("own") is None)


@pytest.mark.parametrize(
    ("worker_id", "block_size", "rank", "message"),
    [
        ("a b", 16, 0, "worker_id 'a b'"),
        ("w", 0, 0, "block_size 0"),
        ("w", 16, -1, "rank -1"),
    ],
)
def test_bad_publisher(worker_id: str, block_size: int, rank: int, message: str) -> None:
    """Invalid arguments are rejected, with the value."""
    with pytest.raises(ConfigError, match=message):
        KvPublisher(FakeBus(), worker_id, block_size, rank)


def test_another_client() -> None:
    """A client of nats-py is rejected: its publish is a coroutine, and no message would be sent."""
    with pytest.raises(ConfigError, match=r"kvrouter\.connect"):
        KvPublisher(Client(), "w", 16)  # type: ignore[arg-type]


def test_not_announced() -> None:
    """A publisher without a pool cannot send."""
    with pytest.raises(ConfigError, match="announce it"):
        KvPublisher(FakeBus(), "w", 16).flush(0.0)


def test_bad_tier() -> None:
    """An unknown tier is rejected, with the valid ones."""
    with pytest.raises(ValueError, match="tier 'gpu': use one of device, host, disk"):
        KvPublisher(FakeBus(), "w", 16).removed([1], "gpu")


@pytest.mark.parametrize(
    ("ranks", "url", "message"),
    [
        ([], "http://h:1", "one KvPublisher per rank"),
        ([1, 0], "http://h:1", "in order from rank 0"),
        ([0], "h:1", "use http://HOST:PORT"),
    ],
)
async def test_bad_announcement(nats_url: str, ranks: list[int], url: str, message: str) -> None:
    """An invalid announcement is rejected, with the way out."""
    async with connect(nats_url) as nats:
        publishers = [KvPublisher(nats, "w", 16, rank) for rank in ranks]
        with pytest.raises(ConfigError, match=message):
            async with announce(nats, publishers, url=url, model="m"):
                pass


@pytest.mark.parametrize(("role", "connector"), [("encode", ""), ("prefill", ""), ("decode", "other")])
async def test_bad_role(nats_url: str, role: str, connector: str) -> None:
    async with connect(nats_url) as nats:
        half = announce(
            nats, [KvPublisher(nats, "w", 16)], url="http://h:1", model="m", role=role, kv_connector=connector
        )
        with pytest.raises(ConfigError, match="nixl or mooncake or example"):
            async with half:
                pass


def test_public_names() -> None:
    """The package has every public name; a wrong one is an AttributeError."""
    for name in kvrouter.__all__:
        assert getattr(kvrouter, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        kvrouter.Nonsense  # noqa: B018
