"""kvrouter.compat.dynamo: the documents' snippets with only their imports changed, and what they omit."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import pytest
import structlog

from kvrouter.compat import dynamo
from kvrouter.compat.dynamo import (
    ApproxKvIndexer,
    Component,
    DistributedRuntime,
    ForwardPassMetrics,
    KvIndexer,
    KvPushRouter,
    KvRouterConfig,
    KvStats,
    OverlapScores,
    RadixTree,
    WorkerMetricsPublisher,
    WorkerStats,
    compute_block_hash_for_seq,
)
from kvrouter.compat.dynamo.runtime import HeldEndpoint
from kvrouter.errors import ConfigError
from kvrouter.worker.options import worker_id_of
from tests.client.hands import Clock
from tests.compat.running import SNIPPETS, run, run_awaiting
from tests.e2e.fleet import running_fleet
from tests.frontend.workers import until_found

MODULE = "kvrouter.compat.dynamo"
LLAMA = "meta-llama/Llama-2-7b-hf"
TOKENS = list(range(100, 164))


@pytest.fixture(autouse=True)
def nats(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_SERVER", nats_url)


@pytest.fixture
async def workers(nats_url: str) -> AsyncIterator[set[str]]:
    """The ids of two workers in the namespace of the documents."""
    async with running_fleet(nats_url, "dynamo", frontends=1, mockers=2, model_name=LLAMA) as fleet:
        yield {worker_id_of(mocker.url) for mocker in fleet.mockers}


@pytest.fixture
async def component() -> AsyncIterator[Component]:
    """A component in a namespace of its own."""
    runtime = DistributedRuntime.detached()
    yield runtime.namespace(uuid.uuid4().hex).component("engine")
    await runtime.shutdown()


async def as_a_program(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it as its last line does, on an event loop of its own: nothing closes the router but its end."""
    await asyncio.to_thread(lambda: asyncio.run(main()))


class Sent:
    """The client of the pattern with manual state: it has already generated."""

    async def generate(self, _tokens: list[int], *, request_id: str) -> None:
        assert "req-123" == request_id


async def test_documents(workers: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The router's example script, and the routing by TTFT, with two workers."""
    await as_a_program(run("dynamo_push_router.txt", MODULE, "dynamo._core")["main"])
    generated = capsys.readouterr().out
    await as_a_program(run("dynamo_minimize_ttft.txt", MODULE, "dynamo._core")["minimize_ttft_routing"])
    minimized = capsys.readouterr().out

    assert "\nGenerated 20 tokens: [" in generated
    assert 20 == minimized.count("Generated tokens: [")
    assert any(f"Selected worker {worker} with 10 prefill tokens" in minimized for worker in workers)


async def test_patterns(workers: set[str]) -> None:
    """The four routing patterns of KvPushRouter, and the client of Basic Routing, with two workers."""
    runtime = DistributedRuntime.detached()
    router = KvPushRouter(runtime.endpoint("dynamo.backend.generate"), 16)
    names: dict[str, Any] = {"router": router, "router_1": router, "router_2": router, "client": Sent()}
    names |= {"tokens": TOKENS, "custom_cost_fn": lambda load: load["potential_decode_blocks"]}
    text = (SNIPPETS / "dynamo_patterns.txt").read_text().replace('"model-name"', repr(LLAMA))
    await run_awaiting(text, names)
    parts = [part async for part in names["stream"]]

    assert {names["worker_id_1"], names["worker_id_2"], names["worker_id"]} <= workers
    assert "length" == parts[-1]["finish_reason"]
    with pytest.raises(ConfigError, match="was freed"):
        await router.free("req-123")

    names = {"namespace": runtime.namespace}
    await run_awaiting((SNIPPETS / "dynamo_client.txt").read_text(), names)
    client = await names["client"]
    request = {"prompt": [1, 2, 3], "max_tokens": 2}
    answers = [
        await client.generate(request),
        await client.random(request),
        await client.round_robin(request),
    ]
    answers.append(await client.direct(request, min(workers)))

    assert workers == set(await client.wait_for_instances())
    assert [2] * 4 == [(await anext(answer))["usage"]["completion_tokens"] for answer in answers]
    assert callable(dynamo.namespace("dynamo").component)
    await runtime.shutdown()


async def test_custom_engine(component: Component) -> None:
    """An engine reports blocks and load by the documents' class, and the router's names see them."""
    early, later = (
        run(f"dynamo_custom_engine{version}.txt", MODULE, "dynamo.llm")["CustomEnginePublisher"]
        for version in ("", "_later")
    )
    publishers = [early(component, 7, 16), later(component, 16, dp_rank=1)]
    load = WorkerMetricsPublisher()
    await load.create_endpoint(component)
    load.publish(1, 25)
    await component.announce(url="http://127.0.0.1:9", model="m", kv_total_blocks=100)
    publishers[0].on_blocks_stored(TOKENS[:48], [-11, 12, 13])
    publishers[0].on_blocks_removed([13])
    publishers[1].on_blocks_stored(TOKENS[:16], [5])
    publishers[1].on_blocks_stored(TOKENS[16:], [6, 7, 8], parent_hash=5)
    indexer, router = KvIndexer(component, 16), KvPushRouter(component.endpoint("generate"), 16)
    scores = await until_found(
        lambda: indexer.find_matches_for_request(TOKENS, 0), lambda found: found.scores == {"7": 4}
    )

    assert scores == await indexer.find_matches(compute_block_hash_for_seq(TOKENS, 16))
    assert ("7", 1, 4) == await router.best_worker([*TOKENS, 1])
    assert ("7", 4) == await router.best_worker_id([*TOKENS, 1], {"overlap_score_weight": 4.0})
    loads = {load["dp_rank"]: load for load in await router.get_potential_loads([*TOKENS, 1])}
    assert 33 == loads[0]["potential_prefill_tokens"]
    assert {"worker_id", "dp_rank", "potential_prefill_tokens", "potential_decode_blocks"} == loads[1].keys()


async def test_a_booking_counts_until_it_is_freed(component: Component) -> None:
    """best_worker with a request id books; generate that is never read books nothing."""
    run("dynamo_custom_engine.txt", MODULE, "dynamo.llm")["CustomEnginePublisher"](component, 1, 16)
    await component.announce(url="http://127.0.0.1:9", model="m")
    router = KvPushRouter(component.endpoint("generate"), 16)

    async def charged() -> int:
        (load,) = await router.get_potential_loads([1] * 32)
        return int(load["potential_prefill_tokens"])

    await router.best_worker_id(TOKENS, request_id="a")
    await router.generate(TOKENS)
    assert 32 + 64 == await charged()
    with pytest.raises(ConfigError, match="in use"):
        await router.best_worker_id(TOKENS, request_id="a")
    await router.mark_prefill_complete("a")
    assert 32 == await charged()
    await router.free("a")
    assert 32 == await charged()


async def test_load_of_earlier_versions(component: Component) -> None:
    """ForwardPassMetrics become requests and usage."""
    load = WorkerMetricsPublisher()
    await load.create_endpoint(component)
    load.publish(ForwardPassMetrics(WorkerStats(3, 8, 2), KvStats(10, 40, 0.25)))

    assert {0: {"running": 3, "waiting": 2, "kv_usage": 0.25}} == component.loads


async def test_approx_indexer() -> None:
    """120 s after the routing decision nothing is assumed any more."""
    clock = Clock()
    indexer = ApproxKvIndexer(None, 16, clock=clock)
    await indexer.process_routing_decision_for_request(TOKENS, 3)

    assert {"3": 4} == await indexer.find_matches_for_request(TOKENS)
    clock.now += 121
    assert {} == await indexer.find_matches_for_request(TOKENS)


def stored(event_id: int, names: list[int], hashes: list[int], parent: int | None = None) -> bytes:
    """A stored event as Dynamo serializes it."""
    blocks = [{"block_hash": name, "tokens_hash": one} for name, one in zip(names, hashes, strict=True)]
    data = {"stored": {"parent_hash": parent, "blocks": blocks}}
    return msgspec.json.encode({"event_id": event_id, "data": data, "dp_rank": 0})


def test_radix_tree() -> None:
    """Blocks of two workers, a removal in the middle, a worker that goes, and a tree built from its dump."""
    hashes: list[int] = [*compute_block_hash_for_seq(TOKENS, 16)]
    tree = RadixTree()
    tree.apply_event(1, stored(0, [11, 12], hashes[:2]))
    tree.apply_event(1, stored(1, [13, 14], hashes[2:], parent=12))
    tree.apply_event(2, stored(0, [91, 92, 93], hashes[:3]))
    assert {"1": 4, "2": 3} == tree.find_matches(hashes).scores
    assert {"1": 1, "2": 1} == tree.find_matches(hashes, early_exit=True)

    tree.apply_event(1, b'{"event_id": 2, "data": {"removed": {"block_hashes": [12]}}}')
    assert {"2": 3, "1": 1} == tree.find_matches(hashes)

    copy = RadixTree()
    for text in tree.dump_tree_as_events():
        event = msgspec.json.decode(text)
        copy.apply_event(event["worker_id"], msgspec.json.encode(event["event"]))
    assert tree.find_matches(hashes) == copy.find_matches(hashes)

    tree.remove_worker(2)
    assert {"1": 1} == tree.find_matches(hashes)
    tree.clear_all_blocks(1)
    assert OverlapScores() == tree.find_matches(hashes)
    copy.apply_event(2, b'{"event_id": 9, "data": "cleared"}')
    assert {"1": 1} == copy.find_matches(hashes)


def test_events_that_cannot_be_applied() -> None:
    """They raise ValueError, as in Dynamo."""
    tree = RadixTree()
    with pytest.raises(ValueError, match="not a KV cache event"):
        tree.apply_event(1, b"{}")
    with pytest.raises(ValueError, match="parent_hash 5"):
        tree.apply_event(1, stored(0, [6], [7], parent=5))


def test_arguments_without_meaning() -> None:
    """They are accepted, and one line of the log says why they are not needed; others are refused."""
    with structlog.testing.capture_logs() as logs:
        KvRouterConfig(router_snapshot_threshold=5, router_reset_states=True, durable_kv_events=True)

    assert ["durable_kv_events", "router_snapshot_threshold", "router_reset_states"] == [
        line["argument"] for line in logs
    ]
    assert all(line["why"] for line in logs)
    with pytest.raises(ConfigError, match="--router-queue-threshold"):
        KvRouterConfig(router_queue_threshold=2.0)
    with pytest.raises(ConfigError, match="ApproxKvIndexer"):
        RadixTree(expiration_duration_secs=5)


async def test_what_cannot_be_opened() -> None:
    """Whoever waits for it gets the error, of whatever kind, and the next one tries again."""

    @contextlib.asynccontextmanager
    async def opens() -> AsyncIterator[str]:
        if not tried:
            tried.append("once")
            raise OSError("no file descriptor is free")
        yield "opened"

    tried: list[str] = []
    held = HeldEndpoint(opens)

    with pytest.raises(OSError, match="no file descriptor"):
        await held.get()
    assert "opened" == await held.get()
    await asyncio.wait(held.close())


async def test_what_would_be_wrong_is_refused(component: Component) -> None:
    """Overrides and options that cannot take effect raise, instead of being dropped."""
    router = KvPushRouter(component.endpoint("generate"), 16)
    publisher = dynamo.KvEventPublisher(component, kv_block_size=16)

    with pytest.raises(ConfigError, match="router_config_override 'weight'"):
        await router.generate(TOKENS, router_config_override={"weight": 1})
    with pytest.raises(ConfigError, match="output_options return_full_text"):
        await router.generate(TOKENS, output_options={"return_full_text": True})
    for wrong in ("text", [-1], [2**32], [[1, 2]], [1.5]):
        with pytest.raises(ConfigError, match=r"token_ids: .*; use numbers"):
            await router.generate(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dp_rank: give the worker_id"):
        await router.generate(TOKENS, dp_rank=1)
    with pytest.raises(ConfigError, match="lora_name"):
        publisher.publish_stored(TOKENS, [16] * 4, [1, 2, 3, 4], lora_id=2)
    with pytest.raises(ConfigError, match=r"python -m kvrouter\.worker"):
        dynamo.KvEventPublisher(component, kv_block_size=16, zmq_endpoint="tcp://127.0.0.1:5557")
    with pytest.raises(ValueError, match=r"namespace\.component\.endpoint"):
        DistributedRuntime.detached().endpoint("dynamo")
