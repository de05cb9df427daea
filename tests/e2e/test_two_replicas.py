"""Two replicas, four mockers with their agents, one NATS: the results for a client and an operator."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import Target
from kvrouter.core.wire.senders import KvSource
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.worker.options import worker_id_of
from tests.e2e.fleet import Fleet, running_fleet, until
from tests.frontend.workers import until_found


@pytest.fixture
async def fleet(nats_url: str, tiny: Path) -> AsyncIterator[Fleet]:
    """Two frontends in mode kv with four mockers."""
    async with running_fleet(nats_url, uuid.uuid4().hex, model_path=tiny) as running:
        yield running


@pytest.fixture
async def clients(fleet: Fleet) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """An OpenAI client for each frontend."""
    made = [
        openai.AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0)
        for frontend in fleet.frontends
    ]
    yield made
    for client in made:
        await client.close()


def system_prompt(group: int) -> str:
    """About 20 blocks that the requests of one group share."""
    return f"You are assistant number {group}. " * 40


def content_of(view: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """A frontend's view of each target's blocks and load."""
    fields = ("incarnation", "last_seq", "blocks", "digest", "active_blocks", "charged_prefill_tokens")
    return {row["worker_id"]: tuple(row[field] for field in fields) for row in view["targets"]}


def is_settled(fleet: Fleet) -> bool:
    """Whether no request is in flight, and every replica has all frames of engines and peers."""
    return all(
        has_every_frame(replica, fleet) and knows_every_block(replica, fleet)
        for replica in (frontend.replica for frontend in fleet.frontends)
    )


def has_every_frame(replica: Replica, fleet: Fleet) -> bool:
    """Whether its readers are at their sources' frames, and no booking is left."""
    sent = {
        (frontend.replica.router_id, pool): router.feed.source.seq
        for frontend in fleet.frontends
        for pool, router in frontend.replica.routers.items()
    }
    in_step = all(
        reader.lag == 0
        and reader.state is FeedState.LIVE
        and (isinstance(source, KvSource) or reader.seq == sent[source.router_id, source.pool])
        for source, reader in replica.readers.items()
    )
    return in_step and not any(router.pool.active.owners() for router in replica.routers.values())


def knows_every_block(replica: Replica, fleet: Fleet) -> bool:
    """Whether its index has as many blocks for each target as the engine has on its device."""
    held = {
        worker_id_of(mocker.url): len(set(mocker.engine.cache.cached_hashes())) for mocker in fleet.mockers
    }
    return all(
        router.pool.index.digest(source.target)[0] == held[source.worker_id]
        for router in replica.routers.values()
        for source in replica.readers
        if isinstance(source, KvSource)
    )


async def settle(fleet: Fleet) -> list[dict[str, Any]]:
    """Wait until the fleet is at rest and both replicas show the same; bounded."""
    await until(lambda: is_settled(fleet))
    return await until_found(fleet.views, lambda views: content_of(views[0]) == content_of(views[1]))


async def ask_and_settle(fleet: Fleet, client: openai.AsyncOpenAI, prompt: list[int]) -> Any:
    """The raw answer to one completion, once every replica knows the resulting blocks."""
    answer = await client.completions.with_raw_response.create(model="tiny", prompt=prompt, max_tokens=2)
    await until(lambda: is_settled(fleet))
    return answer


async def test_replicas_agree_after_mixed_traffic(fleet: Fleet, clients: list[openai.AsyncOpenAI]) -> None:
    """Requests alternate between replicas; both end with equal indexes and empty active tables."""

    async def ask(number: int) -> None:
        client = clients[number % 2]
        messages: Any = [
            {"role": "system", "content": system_prompt(number % 5)},
            {"role": "user", "content": f"question {number}"},
        ]
        if number % 3:
            stream = await client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=20, stream=True
            )
            assert 20 == len(
                [chunk async for chunk in stream if chunk.choices and chunk.choices[0].delta.content]
            )
        else:
            answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=20)
            assert answer.usage is not None
            assert 20 == answer.usage.completion_tokens

    await asyncio.gather(*(ask(number) for number in range(60)))
    views = await settle(fleet)

    assert content_of(views[0]) == content_of(views[1])
    assert 4 == len(content_of(views[0]))
    assert sum(row["blocks"] for row in views[0]["targets"]) > 100
    for view in views:
        assert [{}] == [pool["owners"] for pool in view["bookings"]]
        assert 0 == sum(feed["counters"]["digest_mismatches"] for feed in view["feeds"])
        assert 0 == sum(feed["counters"]["contradictions"] for feed in view["feeds"])
    assert not any(mocker.engine.has_work() for mocker in fleet.mockers)


async def test_a_prefix_cached_through_one_replica_is_found_by_the_other(
    fleet: Fleet, clients: list[openai.AsyncOpenAI]
) -> None:
    """Replica B sends a request to the worker that replica A has warmed, and its prediction is right."""
    prompt = list(range(100, 500))
    first = await clients[0].completions.with_raw_response.create(model="tiny", prompt=prompt, max_tokens=2)
    await settle(fleet)

    second = await clients[1].completions.with_raw_response.create(model="tiny", prompt=prompt, max_tokens=2)

    assert second.headers["x-kvrouter-worker"] == first.headers["x-kvrouter-worker"]
    usage = second.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 16 * int(second.headers["x-kvrouter-overlap-blocks"])
    assert "24" == second.headers["x-kvrouter-overlap-blocks"]


async def test_text_and_its_token_ids_are_the_same_prompt(
    fleet: Fleet, clients: list[openai.AsyncOpenAI]
) -> None:
    """The token ids of a text, from the engine, find the blocks that the text has filled."""
    text = system_prompt(1)
    first = await clients[0].completions.with_raw_response.create(model="tiny", prompt=text, max_tokens=1)
    async with fleet.http.post(f"{fleet.mockers[0].url}/tokenize", json={"prompt": text}) as response:
        tokens = (await response.json())["tokens"]
    await settle(fleet)

    second = await clients[1].completions.with_raw_response.create(model="tiny", prompt=tokens, max_tokens=1)

    assert second.headers["x-kvrouter-worker"] == first.headers["x-kvrouter-worker"]
    assert (len(tokens) - 1) // 16 == int(second.headers["x-kvrouter-overlap-blocks"])


async def test_a_booking_is_seen_by_the_other_replica_while_it_lasts(
    fleet: Fleet, clients: list[openai.AsyncOpenAI]
) -> None:
    """A stream through A shows as load at B, and is gone there when its client has left."""
    owner, other = fleet.frontends[0].replica, fleet.frontends[1].replica

    def seen() -> int:
        return sum(r.pool.active.owners().get(owner.router_id, 0) for r in other.routers.values())

    stream = await clients[0].completions.create(
        model="tiny", prompt=[7] * 64, max_tokens=20_000, stream=True
    )
    await until(lambda: seen() == 1)
    await stream.close()
    await until(lambda: seen() == 0)

    await settle(fleet)
    await until(lambda: not any(mocker.engine.has_work() for mocker in fleet.mockers))


async def test_errors_are_openai_errors(clients: list[openai.AsyncOpenAI]) -> None:
    """The client raises the same errors as with OpenAI's service."""
    chat: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await clients[0].chat.completions.create(model="other", messages=chat)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await clients[0].completions.create(model="tiny", prompt=[1] * 40_000)
    with pytest.raises(openai.BadRequestError, match="messages"):
        await clients[0].chat.completions.create(model="tiny", messages=None)  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await clients[0].completions.create(model="tiny", prompt=[1] * 40_000, stream=True)


async def test_a_worker_that_leaves_is_replaced(fleet: Fleet, clients: list[openai.AsyncOpenAI]) -> None:
    """If a worker rejects connections, the next request is retried on another one."""
    prompt = list(range(1000, 1400))
    first = await clients[0].completions.with_raw_response.create(model="tiny", prompt=prompt, max_tokens=2)
    warmed = first.headers["x-kvrouter-worker"]
    await settle(fleet)
    for frontend in fleet.frontends:
        (router,) = frontend.replica.routers.values()
        worker = router.pool.workers[warmed]  # type: ignore[index]
        worker.card = _unreachable(worker.card)

    second = await clients[1].completions.with_raw_response.create(model="tiny", prompt=prompt, max_tokens=2)

    assert second.headers["x-kvrouter-worker"] != warmed


def _unreachable(card: Card) -> Card:
    return msgspec.structs.replace(card, url="http://127.0.0.1:1")


@pytest.mark.parametrize("mode", ["round-robin", "random"])
async def test_modes_without_tokens_spread_requests(nats_url: str, mode: str) -> None:
    """These modes serve without a tokenizer, and use every worker."""
    async with running_fleet(
        nats_url, uuid.uuid4().hex, frontends=1, mockers=2, flags=["--router-mode", mode]
    ) as fleet:
        client = openai.AsyncOpenAI(base_url=f"{fleet.frontends[0].url}/v1", api_key="none")
        used = {
            (
                await client.completions.with_raw_response.create(model="tiny", prompt=[5] * 40, max_tokens=1)
            ).headers["x-kvrouter-worker"]
            for _ in range(20)
        }
        await client.close()

    assert 2 == len(used)


async def test_without_events_the_approximate_index_is_shared(nats_url: str) -> None:
    """With --no-use-kv-events replica B finds the worker that replica A has used for the same prompt."""
    async with running_fleet(nats_url, uuid.uuid4().hex, mockers=3, flags=["--no-use-kv-events"]) as fleet:
        clients = [
            openai.AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="none") for frontend in fleet.frontends
        ]
        prompt = list(range(320))
        first = await clients[0].completions.with_raw_response.create(
            model="tiny", prompt=prompt, max_tokens=2
        )
        (there,) = fleet.frontends[1].replica.routers.values()
        await until(lambda: is_settled(fleet) and len(there.pool.index) == 20)
        second = await clients[1].completions.with_raw_response.create(
            model="tiny", prompt=prompt, max_tokens=2
        )
        for client in clients:
            await client.close()

    assert second.headers["x-kvrouter-worker"] == first.headers["x-kvrouter-worker"]
    assert "19" == second.headers["x-kvrouter-overlap-blocks"]


async def test_texts_are_shared(nats_url: str, tiny: Path) -> None:
    """In mode prefix-affinity replica B sends a text where replica A sent one with the same beginning."""
    flags = ["--router-mode", "prefix-affinity"]
    async with running_fleet(nats_url, uuid.uuid4().hex, mockers=3, model_path=tiny, flags=flags) as fleet:
        a, b = (
            openai.AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="none") for frontend in fleet.frontends
        )
        (there,) = fleet.frontends[1].replica.routers.values()
        texts = there.tables.texts

        async def worker_of(client: openai.AsyncOpenAI, text: str) -> str:
            sent = await client.completions.with_raw_response.create(model="tiny", prompt=text, max_tokens=2)
            return sent.headers["x-kvrouter-worker"]

        def knows(text: str) -> bool:
            return texts.match(text, there.pool.targets)[0] == len(text)

        for number in range(8):
            text = f"{number} once upon a time there was a router "
            first = await worker_of(a, text)
            await until(partial(knows, text))

            assert first == await worker_of(b, text + "that agreed")
        await a.close()
        await b.close()


async def test_host_tier_attracts_requests(nats_url: str) -> None:
    """Blocks in host memory still attract their requests, and count as cached."""
    small = EngineConfig(num_blocks=128, host_blocks=1024, max_model_len=2048)
    async with running_fleet(nats_url, uuid.uuid4().hex, frontends=1, mockers=2, engine=small) as fleet:
        client = openai.AsyncOpenAI(base_url=f"{fleet.frontends[0].url}/v1", api_key="none")

        async def ask(start: int) -> Any:
            prompt = list(range(start, start + 1600))
            return await ask_and_settle(fleet, client, prompt)

        first = await ask(0)
        home = Target(first.headers["x-kvrouter-worker"])
        hashes = sequence_hashes(block_hashes(range(1600), 16))
        (router,) = fleet.frontends[0].replica.routers.values()
        there = 0
        for other in range(1, 40):  # pushes the first prompt out of the device; equal workers are drawn
            there += (await ask(other * 2000)).headers["x-kvrouter-worker"] == home.worker_id
            if there == 3:
                break
        await until(lambda: router.pool.index.overlap_by_tier(hashes)[home] == [0, 100])
        again = await ask(0)
        usage = again.parse().usage
        await client.close()

    assert again.headers["x-kvrouter-worker"] == home.worker_id
    assert usage.prompt_tokens_details.cached_tokens == 1584
    assert "0" == again.headers["x-kvrouter-overlap-blocks"]


@pytest.mark.parametrize(("flags", "host"), [([], "127.0.0.1"), (["--advertise", "router-0"], "router-0")])
async def test_address_that_peers_show(nats_url: str, flags: list[str], host: str) -> None:
    """An admin listener on every interface: the address from which NATS is reached, or --advertise."""
    more = ["--admin-host", "0.0.0.0", *flags]
    async with running_fleet(nats_url, uuid.uuid4().hex, mockers=1, flags=more) as fleet:
        ports = [frontend.admin_url.rpartition(":")[2] for frontend in fleet.frontends]
        shown = [peer.address for one in fleet.frontends for peer in one.replica.peers.values()]

    assert [f"http://{host}:{port}" for port in reversed(ports)] == shown
