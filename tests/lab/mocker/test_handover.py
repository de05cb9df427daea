"""Hand-overs between two mockers, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrouter.errors import ConfigError
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import EngineConfig, EngineRequest, StepWork, Timing
from kvrouter.lab.mocker.events import StoredBlocks
from kvrouter.lab.mocker.hashing import token_ids
from kvrouter.lab.mocker.server import Mocker, running_mocker
from kvrouter.worker.engines.discovery import learn
from kvrouter.worker.engines.http import EngineHttp
from kvrouter.worker.options import AgentOptions
from tests.frontend.workers import until

ALONE = MockerConfig(EngineConfig(num_blocks=64, max_model_len=1024), speedup=10_000)
NIXL = replace(ALONE, kv_connector="nixl", kv_transfer_ms_per_block=0)
PREFILL = replace(NIXL, role="prefill")
DECODE = replace(NIXL, role="decode")
PROMPT = list(range(100))
ASK = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
ASK_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False} | ASK
FAILED = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
Json = dict[str, Any]
Post = Callable[..., Awaitable[Json]]


@pytest.fixture
async def post() -> AsyncIterator[Post]:
    """Posts a completion; returns the answer."""
    async with aiohttp.ClientSession() as client:

        async def send(mocker: Mocker, prompt: list[int] = PROMPT, **more: object) -> Json:
            body = {"prompt": prompt, "max_tokens": 8, **more}
            async with client.post(f"{mocker.url}/v1/completions", json=body) as answer:
                made: Json = json.loads(await answer.read())
                return made

        yield send


async def prefill(post: Post, mocker: Mocker, prompt: list[int] = PROMPT) -> Any:
    """The parameters for the decode engine."""
    answer = await post(mocker, prompt, max_tokens=1, kv_transfer_params=ASK_PREFILL)
    return answer["kv_transfer_params"]


async def metrics(mocker: Mocker) -> dict[str, float]:
    """The series of its /metrics, by name."""
    async with aiohttp.ClientSession() as client, client.get(f"{mocker.url}/metrics") as answer:
        lines = [line.rpartition(" ") for line in (await answer.text()).splitlines() if line[0] != "#"]
    return {name.partition("{")[0].removeprefix("vllm:"): float(value) for name, _, value in lines}


@asynccontextmanager
async def pair(
    prefills: MockerConfig = PREFILL, decodes: MockerConfig = DECODE
) -> AsyncIterator[tuple[Mocker, Mocker]]:
    async with running_mocker(prefills) as first, running_mocker(decodes) as second:
        yield first, second


async def text_alone(post: Post, prompt: list[int] = PROMPT) -> str:
    """What a mocker answers that does it alone."""
    async with running_mocker(ALONE) as mocker:
        return text(await post(mocker, prompt))


def text(answer: Json) -> str:
    said: str = answer["choices"][0]["text"]
    return said


def cached(answer: Json) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def test_parameters(post: Post) -> None:
    """The prefill engine answers with vLLM 0.33's fields and one of its own, and pins the blocks."""
    async with running_mocker(PREFILL) as mocker:
        await post(mocker, PROMPT[:40])
        params = await prefill(post, mocker)

        port = int(mocker.url.rpartition(":")[2])
        assert {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": "127.0.0.1",
            "remote_port": port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": 100,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 32,
        }.items() <= params.items()
        assert {"remote_engine_id", "remote_request_id", "mocker_key"} <= params.keys()
        assert [7] == [len(group) for group in params["remote_block_ids"]]
        assert 7 == mocker.engine.cache.used_blocks


@pytest.mark.parametrize("tokens", [16, 17, 100, 700])
async def test_hand_over(post: Post, tokens: int) -> None:
    """The decode engine fetches the blocks, frees them there, and answers as one engine alone."""
    prompt = list(range(tokens))
    wanted = await text_alone(post, prompt)
    async with pair() as (first, second):
        params = await prefill(post, first, prompt)

        answer = await post(second, prompt, kv_transfer_params=params)

        blocks = -(-tokens // 16)
        assert (wanted, 0) == (text(answer), cached(answer))
        assert (0, 0) == (first.engine.cache.used_blocks, second.engine.cache.used_blocks)
        seen = await metrics(second)
        assert (blocks * 16 * 131072, tokens) == (
            seen["nixl_bytes_transferred_sum"],
            seen["external_prefix_cache_hits_total"],
        )
        for mocker in (first, second):
            mocker.engine.check()


async def test_pulled_blocks_are_ordinary(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not computed, are published as stored, and a later request finds them."""
    async with pair() as (first, second):
        params = await prefill(post, first)
        published: list[Any] = []
        monkeypatch.setattr(second.ranks[0].publisher, "publish", lambda _, events: published.extend(events))
        computed: list[int] = []
        step_s = Timing.step_s

        def counted(timing: Timing, work: StepWork) -> float:
            computed.append(work.prefill_tokens)
            return step_s(timing, work)

        monkeypatch.setattr(Timing, "step_s", counted)

        await post(second, kv_transfer_params=params)
        again = await post(second)

    (stored, *_) = [event for event in published if isinstance(event, StoredBlocks)]
    assert 1 == computed[0], "the last token, of which the next one is made"
    assert (PROMPT[:96], None) == (stored.token_ids, stored.parent_block_hash)
    assert 96 == cached(again)


async def test_half_is_known(post: Post) -> None:
    """Only what the decode engine lacks is read; it reports the cached tokens of the prefill engine."""
    async with pair() as (first, second):
        await post(second, PROMPT[:48])
        await post(first, PROMPT[:16])
        answer = await post(second, kv_transfer_params=await prefill(post, first))

        assert 16 == cached(answer)
        assert 4 == (await metrics(second))["nixl_num_descriptors_sum"]


async def test_cached_tokens_left_out(post: Post) -> None:
    """Without the prefill engine's tokens the decode engine reports the whole prompt."""
    async with pair() as (first, second):
        params = await prefill(post, first)
        del params["remote_prefill_cached_tokens"]

        assert 100 == cached(await post(second, kv_transfer_params=params))


@pytest.mark.parametrize(
    "change",
    [
        {"remote_host": None},
        {"remote_port": None},
        {"remote_block_ids": []},
        {"remote_block_ids": None},
        {"remote_engine_id": None},
        {"remote_request_id": None},
        {"do_remote_prefill": False},
    ],
)
async def test_incomplete_parameters(post: Post, change: Json) -> None:
    """Without one of them the decode engine prefills itself."""
    wanted = await text_alone(post)
    async with pair() as (first, second):
        params = await prefill(post, first)

        answer = await post(second, kv_transfer_params=params | change)

        assert wanted == text(answer)
        assert 0 == (await metrics(second))["nixl_bytes_transferred_count"]


@pytest.mark.parametrize("api", ["completions", "chat/completions", "messages"])
@pytest.mark.parametrize("change", [{"remote_engine_id": "0" * 36}, {"remote_port": 1}, {"remote_port": "x"}])
async def test_failed_hand_over(post: Post, tiny: Path, api: str, change: Json) -> None:
    """A stream has an error as its first event under status 200; other answers have status 500."""
    config = replace(DECODE, model_path=tiny)
    async with pair(decodes=config) as (first, second), aiohttp.ClientSession() as client:
        params = (await prefill(post, first)) | change
        chat = {"messages": [{"role": "user", "content": "blocks " * 40}], "max_tokens": 8}
        body = {"kv_transfer_params": params, **({"prompt": PROMPT} if api == "completions" else chat)}
        url = f"{second.url}/v1/{api}"
        async with (
            client.post(url, json=body) as whole,
            client.post(url, json=body | {"stream": True}) as streamed,
        ):
            statuses = (whole.status, streamed.status)
            error, event = (await whole.json())["error"], (await streamed.text()).split("\n\n")[0]

    assert (500, 200) == statuses
    data = json.loads(event.rpartition("data: ")[2])
    assert "Internal server error" == error["message"] == data["error"]["message"]
    if api != "messages":
        assert FAILED == data["error"]


async def test_known_engine_with_a_wrong_port(post: Post) -> None:
    """An engine that was met keeps its address."""
    async with pair() as (first, second):
        await post(second, PROMPT[:50], kv_transfer_params=await prefill(post, first, PROMPT[:50]))
        params = await prefill(post, first)

        answer = await post(second, kv_transfer_params=params | {"remote_port": 1})

    assert 48 == cached(answer)


async def test_second_read(post: Post) -> None:
    """The blocks of a request can be read once."""
    async with pair() as (first, second), running_mocker(DECODE) as third:
        params = await prefill(post, first)
        await post(second, kv_transfer_params=params)

        answer = await post(third, kv_transfer_params=params)

        assert FAILED == answer["error"]
        assert 1 == (await metrics(third))["nixl_num_failed_transfers_total"]


async def test_other_hash(post: Post) -> None:
    """Engines with another compatibility hash refuse the handshake."""
    async with pair(replace(PREFILL, kv_hash="a"), replace(DECODE, kv_hash="b")) as (first, second):
        answer = await post(second, kv_transfer_params=await prefill(post, first))

        assert FAILED == answer["error"]
        assert 7 == first.engine.cache.used_blocks, "the lease goes on"


async def test_lease_is_over(post: Post) -> None:
    """The blocks are free again, and the decode engine prefills itself."""
    wanted = await text_alone(post)
    async with pair(replace(PREFILL, kv_lease_s=0.01)) as (first, second):
        params = await prefill(post, first)
        await until(lambda: first.engine.cache.used_blocks == 0)

        assert wanted == text(await post(second, kv_transfer_params=params))
        assert 1 == (await metrics(first))["nixl_num_kv_expired_reqs_total"]


async def test_reader_leaves(post: Post) -> None:
    """A lease does not end while it is read. Once a reader has left, another one may read."""
    slow = replace(DECODE, kv_transfer_ms_per_block=10_000)
    async with pair(decodes=slow) as (first, second), running_mocker(DECODE) as third:
        params = await prefill(post, first)
        assert first.service.handover is not None
        leases = first.service.handover._leases
        (lease,) = leases.values()
        reading = asyncio.ensure_future(post(second, kv_transfer_params=params))
        await until(lambda: not leases)
        is_read, held = lease.timer.cancelled(), first.engine.cache.used_blocks
        reading.cancel()
        await until(lambda: bool(leases))

        answer = await post(third, kv_transfer_params=params)

        assert (True, 7) == (is_read, held)
        assert (0, 0) == (cached(answer), first.engine.cache.used_blocks)
        assert 1 == (await metrics(third))["nixl_bytes_transferred_count"]


async def test_prefill_engine_was_killed(post: Post) -> None:
    """Before the transfer, or in the middle of it."""

    async def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with running_mocker(DECODE) as second:
        async with running_mocker(PREFILL) as first:
            params = await prefill(post, first)
        dead = await post(second, kv_transfer_params=params)
        async with await asyncio.start_server(die, "127.0.0.1", 0) as dying:
            port = dying.sockets[0].getsockname()[1]
            died = await post(second, kv_transfer_params=params | {"remote_port": port})

    assert FAILED == dead["error"] == died["error"]


async def test_another_start_is_another_engine(post: Post) -> None:
    """What was handed over before a restart is not there."""
    async with running_mocker(PREFILL) as first:
        params = await prefill(post, first)
        again = replace(PREFILL, port=params["remote_port"])
    async with pair(again) as (first, second):
        answer = await post(second, kv_transfer_params=params)

    assert FAILED == answer["error"]


async def test_short_prompt(post: Post) -> None:
    """A prompt below one block is not handed over."""
    async with running_mocker(PREFILL) as mocker:
        assert await prefill(post, mocker, PROMPT[:15]) is None
        assert 0 == mocker.engine.cache.used_blocks


async def test_without_a_connector(post: Post) -> None:
    """The parameters of others mean nothing to a mocker without a connector, and it has no such routes."""
    async with running_mocker(ALONE) as mocker, aiohttp.ClientSession() as client:
        assert await prefill(post, mocker) is None
        assert "choices" in await post(mocker, kv_transfer_params={"do_remote_prefill": True})
        assert not [name for name in await metrics(mocker) if "nixl" in name or "external" in name]
        async with client.get(f"{mocker.url}/server_info") as answer:
            assert 404 == answer.status


async def test_stream(post: Post) -> None:
    """The last chunk of a stream has the parameters."""
    body = {"prompt": PROMPT, "max_tokens": 2, "stream": True, "kv_transfer_params": ASK_PREFILL}
    async with (
        running_mocker(PREFILL) as mocker,
        aiohttp.ClientSession(mocker.url) as client,
        client.post("/v1/completions", json=body) as answer,
    ):
        events = (await answer.text()).split("\n\n")

    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    assert [False, True] == ["kv_transfer_params" in chunk for chunk in chunks]


async def test_client_that_leaves_before_the_end() -> None:
    """Nothing stays held for a client that did not get the parameters."""
    async with running_mocker(PREFILL) as mocker:
        request = EngineRequest("1", token_ids(PROMPT), max_tokens=1, keeps_blocks=True)
        with mocker.ranks[0].serving([request]) as mailbox:
            await mailbox.take()
            held = mocker.engine.cache.used_blocks

        assert (7, 0) == (held, mocker.engine.cache.used_blocks)


@pytest.mark.parametrize(
    ("config", "role", "connector"),
    [
        (PREFILL, "prefill", "nixl"),
        (DECODE, "decode", "nixl"),
        (NIXL, "both", "nixl"),
        (replace(DECODE, kv_connector="mooncake"), "decode", "mooncake"),
    ],
)
async def test_the_agent_learns_it(config: MockerConfig, role: str, connector: str) -> None:
    """An agent needs no flags."""
    async with running_mocker(config) as mocker, EngineHttp.open(mocker.url) as http:
        facts = await learn(http, AgentOptions(mocker.url, "w"))

    assert (role, connector) == (facts.role, facts.kv_connector)


async def test_shared_storage(post: Post, tmp_path: Path) -> None:
    """Without parameters the decode engine finds what a prefill engine has computed, block by block."""
    wanted = await text_alone(post, [*PROMPT, 7])
    shares = replace(ALONE, kv_connector="example", kv_store=tmp_path / "kv")
    async with pair(replace(shares, role="prefill"), replace(shares, role="decode")) as (first, second):
        assert (await post(first, max_tokens=1))["kv_transfer_params"] is None
        answer = await post(second, [*PROMPT, 7])
        other = await post(second, PROMPT, cache_salt="s")

        assert (wanted, 96, 0) == (text(answer), cached(answer), cached(other))
        assert 96 == (await metrics(second))["external_prefix_cache_hits_total"]
        assert 0 == first.engine.cache.used_blocks
    async with running_mocker(replace(shares, role="decode", kv_hash="other")) as third:
        assert 0 == cached(await post(third))


MOONCAKE = replace(NIXL, kv_connector="mooncake")


async def mooncake(post: Post, first: Mocker, **change: Any) -> Json:
    """The parameters for the decode engine, as a router makes them."""
    async with aiohttp.ClientSession() as client, client.get(f"{first.url}/query") as answer:
        engine_id = (await answer.json())["0"]["engine_id"]
    asks = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1"}
    answered = await post(first, max_tokens=1, kv_transfer_params=asks)
    assert answered["kv_transfer_params"] is None
    hands = {"remote_engine_id": engine_id, "remote_bootstrap_addr": first.url}
    return {"do_remote_prefill": True, "transfer_id": "xfer-1"} | hands | change


async def test_mooncake(post: Post) -> None:
    """The decode engine finds the blocks by the id of the transfer, once; usage is what the router says."""
    wanted = await text_alone(post)
    roles = replace(MOONCAKE, role="prefill"), replace(MOONCAKE, role="decode")
    async with pair(*roles) as (first, second):
        params = await mooncake(post, first, remote_prefill_cached_tokens=0)
        held = first.engine.cache.used_blocks

        answer = await post(second, kv_transfer_params=params)
        again = await post(second, list(range(200, 300)), kv_transfer_params=params)

        assert (wanted, 0, 7) == (text(answer), cached(answer), held)
        assert FAILED == again["error"]
        assert 0 == first.engine.cache.used_blocks
        assert 7 * 16 * 131072 == (await metrics(second))["mooncake_bytes_transferred_sum"]
        for mocker in (first, second):
            mocker.engine.check()


@pytest.mark.parametrize("change", [{"remote_engine_id": "0" * 36}, {"transfer_id": "another"}])
async def test_a_wrong_mooncake_transfer(post: Post, change: Json) -> None:
    roles = replace(MOONCAKE, role="prefill"), replace(MOONCAKE, role="decode")
    async with pair(*roles) as (first, second):
        answer = await post(second, kv_transfer_params=await mooncake(post, first, **change))

        assert FAILED == answer["error"]


@pytest.mark.parametrize("name", ["transfer_id", "remote_engine_id", "remote_bootstrap_addr"])
async def test_a_mooncake_transfer_without_a_name(post: Post, name: str) -> None:
    wanted = await text_alone(post)
    roles = replace(MOONCAKE, role="prefill"), replace(MOONCAKE, role="decode")
    async with pair(*roles) as (first, second):
        answer = await post(second, kv_transfer_params=await mooncake(post, first, **{name: None}))

        assert wanted == text(answer)


async def test_pinned_blocks_delay_others(post: Post) -> None:
    """A request that finds no free blocks waits until a lease is over."""
    engine = EngineConfig(num_blocks=8, max_model_len=128)
    async with running_mocker(replace(PREFILL, engine=engine, kv_lease_s=0.1)) as mocker:
        await prefill(post, mocker)

        assert "choices" in await post(mocker, list(range(200, 300)))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"role": "prefill"}, "role prefill without a connector"),
        ({"kv_connector": "example"}, "kv-store DIR belong together"),
        ({"kv_connector": "nixl", "kv_store": Path("x")}, "kv-store DIR belong together"),
    ],
)
def test_wrong_flags(flags: Json, said: str) -> None:
    """Flags that do not fit together are refused."""
    with pytest.raises(ConfigError, match=said):
        MockerConfig(**flags)


# --- from peers ---

P2P = replace(ALONE, kv_connector="p2p", kv_transfer_ms_per_block=0)


def from_peer(mocker: Mocker | None, **changes: object) -> Json:
    """The parameter that names a peer."""
    port = int(mocker.url.rpartition(":")[2]) if mocker is not None else 9
    named = {"kv_request_id": "r", "remote_host": "127.0.0.1", "remote_port": port} | changes
    return {"kv_transfer_params": {"remote_kv_source": named}}


async def test_blocks_of_a_peer(post: Post) -> None:
    """What the peer holds is cached then, and announced here; its answer is the same."""
    async with pair(P2P, P2P) as (first, second):
        alone = await post(first)
        answer = await post(second, **from_peer(first))

        assert text(alone) == text(answer)
        assert 96 == cached(answer)
        assert 96 == cached(await post(second))
        assert 1 == (await metrics(second))["p2p_bytes_transferred_count"]


async def test_only_what_is_missing_is_read(post: Post) -> None:
    async with pair(P2P, P2P) as (first, second):
        await post(first)
        await post(second, PROMPT[:40])
        await post(second, **from_peer(first))

        assert 6 - 2 == (await metrics(second))["p2p_num_descriptors_sum"]


IN_VAIN: dict[str, Json] = {
    "nobody": {"remote_port": 9}, "no id": {"kv_request_id": ""}, "no port": {"remote_port": None}
}  # fmt: skip


@pytest.mark.parametrize("changes", IN_VAIN.values(), ids=IN_VAIN)
async def test_a_peer_that_does_not_answer(post: Post, changes: Json) -> None:
    """Dead, or not named whole: the engine computes."""
    async with pair(P2P, P2P) as (first, second):
        await post(first)
        answer = await post(second, **from_peer(first, **changes))

        assert (0, await text_alone(post)) == (cached(answer), text(answer))


async def test_a_peer_that_has_nothing(post: Post) -> None:
    """Its blocks were evicted, or it has another hash: the engine computes."""
    async with pair(P2P, P2P) as (first, second), running_mocker(replace(P2P, kv_hash="x")) as other:
        await post(other)
        for peer in (first, other):
            assert 0 == cached(await post(second, PROMPT, cache_salt=peer.url, **from_peer(peer)))
        assert 2 == (await metrics(second))["p2p_num_failed_transfers_total"]


def test_a_mocker_of_halves_has_no_peers() -> None:
    with pytest.raises(ConfigError, match="whole requests with one rank"):
        replace(P2P, role="prefill")
