"""Learning each kind of engine, from the recorded answers in tests/data/engines."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from aiohttp import web

from kvrouter.core.wire.heartbeats import Card
from kvrouter.errors import ConfigError
from kvrouter.worker.engines import sglang as sglang_texts
from kvrouter.worker.engines import vllm as vllm_texts
from kvrouter.worker.engines.discovery import learn
from kvrouter.worker.engines.endpoints import NO_REPLAY, REPLAY_NOT_GIVEN, contradictions
from kvrouter.worker.engines.facts import EngineFacts, build_card, with_discovered
from kvrouter.worker.engines.http import EngineError, EngineGoneError, EngineHttp, Models
from kvrouter.worker.engines.metrics import RankLoad, Scrape
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import EventEndpoints

DATA = Path(__file__).parents[2] / "data" / "engines"
VLLM = {
    "/v1/models": "vllm-0.32-models.json",
    "/version": "vllm-0.32-version.json",
    "/metrics": "vllm-0.32-metrics.txt",
    "/kv_event_sources": "vllm-0.32-kv_event_sources.json",
}
SGLANG = {
    "/v1/models": "sglang-0.5-models.json",
    "/server_info": "sglang-0.5-server_info.json",
    "/metrics": "sglang-0.5-metrics.txt",
}


@dataclass
class Recorded:
    """An engine that gives the recorded answer for each path, else 404."""

    url: str
    answers: dict[str, bytes]
    statuses: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    @property
    def options(self) -> AgentOptions:
        """The options of its agent."""
        return AgentOptions(self.url, "w")

    async def learn(self, options: AgentOptions | None = None) -> EngineFacts:
        """Learn the engine."""
        async with EngineHttp.open(self.url) as engine:
            return await learn(engine, options or self.options)

    def change(self, path: str, **values: object) -> None:
        """Answer with other values in a JSON object."""
        answer = msgspec.json.decode(self.answers[path])
        self.answers[path] = msgspec.json.encode({**answer, **values})

    async def answer(self, http: web.Request) -> web.Response:
        """Answer a request."""
        self.asked.append(http.path)
        self.bodies.append(await http.read())
        body = self.answers.get(http.path)
        return web.Response(body=body, status=self.statuses.get(http.path, 404 if body is None else 200))


@contextlib.asynccontextmanager
async def recorded(files: Mapping[str, str], port: int) -> AsyncIterator[Recorded]:
    """Serve recorded answers."""
    answers = {path: (DATA / name).read_bytes() for path, name in files.items()}
    engine = Recorded(f"http://127.0.0.1:{port}", answers)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield engine
    finally:
        await runner.cleanup()


@pytest.fixture
async def vllm(free_port: Callable[[], int]) -> AsyncIterator[Recorded]:
    """A vLLM engine."""
    async with recorded(VLLM, free_port()) as engine:
        yield engine


@pytest.fixture
async def sglang(free_port: Callable[[], int]) -> AsyncIterator[Recorded]:
    """An SGLang engine with two data-parallel ranks."""
    async with recorded(SGLANG, free_port()) as engine:
        yield engine


async def test_vllm(vllm: Recorded) -> None:
    """An agent learns everything that it needs from vLLM itself; this one lacks nothing."""
    facts = await vllm.learn()

    assert ("vllm", "0.32.0", 1, ()) == (facts.kind, facts.version, facts.ranks, facts.lacks)
    assert (("tiny",), ("lora-a",), 2048) == (
        facts.models.served_names, facts.models.lora_names, facts.models.max_model_len,
    )  # fmt: skip
    assert (32, 100, True) == (
        facts.scrape.block_size, facts.scrape.device_blocks, facts.scrape.has_prefix_caching,
    )  # fmt: skip
    assert "/models/tiny-qwen2" == facts.tokenizer
    feed = EventEndpoints("tcp://127.0.0.1:26557", "tcp://127.0.0.1:26657", "kv@127.0.0.1:26100@tiny")
    assert (feed,) == facts.endpoints


@pytest.mark.parametrize(("version", "takes"), [("0.31.2", False), ("0.32.0", True), ("", False)])
async def test_token_ids_of_chats(vllm: Recorded, version: str, takes: bool) -> None:
    """The card says from vLLM 0.32 on that chats may come with the ids of their prompts."""
    vllm.change("/version", version=version)

    assert takes is _card(vllm.options, await vllm.learn()).takes_token_ids


async def test_vllm_without_events(vllm: Recorded) -> None:
    """If events and prefix caching are off, `lacks` has the flags that switch them on."""
    vllm.answers["/kv_event_sources"] = b"{}"
    caching = b'enable_prefix_caching="True"'
    vllm.answers["/metrics"] = vllm.answers["/metrics"].replace(caching, b'enable_prefix_caching="False"')

    facts = await vllm.learn()

    assert (vllm_texts.CACHING_OFF, vllm_texts.EVENTS_OFF) == facts.lacks
    card = build_card(vllm.options, facts, event_block_size=0, widest_tier=0, started_at_us=1)
    assert card.prefix_caching is False
    assert not with_discovered(vllm.options, facts).endpoints


@pytest.mark.parametrize(
    ("flag", "events", "size"), [(None, 0, 32), (None, 64, 64), (None, 16, 32), (16, 0, 16), (16, 32, 32)]
)
async def test_block_size(vllm: Recorded, flag: int | None, events: int, size: int) -> None:
    """The metrics say 32, or the flag replaces them; events may raise the size, never lower it."""
    facts = await vllm.learn()
    options = replace(vllm.options, block_size=flag)

    card = build_card(options, facts, event_block_size=events, widest_tier=0, started_at_us=1)

    assert size == card.block_size


async def test_old_vllm(vllm: Recorded) -> None:
    """For a vLLM that reports no endpoints the flags count; without flags `lacks` names them."""
    del vllm.answers["/kv_event_sources"]
    given = replace(vllm.options, endpoints=[EventEndpoints("tcp://e:1", "tcp://e:2")])

    assert (vllm_texts.ENDPOINTS_UNKNOWN,) == (await vllm.learn()).lacks
    assert () == (await vllm.learn(given)).lacks
    assert (REPLAY_NOT_GIVEN,) == (
        await vllm.learn(replace(given, endpoints=[EventEndpoints("tcp://e:1")]))
    ).lacks


async def test_events_by_flag(vllm: Recorded) -> None:
    """Event endpoints in the flags keep the replay endpoint that the engine reports."""
    given = replace(vllm.options, endpoints=[EventEndpoints("tcp://localhost:26557")])

    facts = await vllm.learn(given)

    assert () == facts.lacks
    feed = EventEndpoints("tcp://localhost:26557", "tcp://127.0.0.1:26657")
    assert [feed] == with_discovered(given, facts).endpoints


async def test_wrong_events_by_flag(vllm: Recorded) -> None:
    """If the flags give another port than the engine reports, `lacks` has both, and what is missing."""
    given = replace(vllm.options, endpoints=[EventEndpoints("tcp://127.0.0.1:24666")])

    (contradiction, missing) = (await vllm.learn(given)).lacks

    assert "reports its events at tcp://127.0.0.1:26557, but --kv-events" in contradiction
    assert "is tcp://127.0.0.1:24666" in contradiction
    assert "give --kv-replay tcp://HOST:PORT" in missing


def _card(options: AgentOptions, facts: EngineFacts) -> Card:
    settled = with_discovered(options, facts)
    return build_card(settled, facts, event_block_size=0, widest_tier=0, started_at_us=1)


async def test_exchanged_endpoints_by_flag(vllm: Recorded) -> None:
    """Events and replay at other ports than the engine reports: both can be read from the card."""
    feed = EventEndpoints("tcp://localhost:24666", "tcp://localhost:24766")
    given = replace(vllm.options, endpoints=[feed])

    card = _card(given, await vllm.learn(given))

    assert [
        ("events", "tcp://127.0.0.1:26557", "tcp://localhost:24666"),
        ("replay", "tcp://127.0.0.1:26657", "tcp://localhost:24766"),
    ] == contradictions(card.notes)


async def test_only_lacks_of_events_are_notes(vllm: Recorded) -> None:
    """Prefix caching has a field of the card. No note has the word that audits look for."""
    vllm.answers["/kv_event_sources"] = b"{}"
    caching = b'enable_prefix_caching="True"'
    vllm.answers["/metrics"] = vllm.answers["/metrics"].replace(caching, b'enable_prefix_caching="False"')
    facts = await vllm.learn()
    every = (*facts.lacks, NO_REPLAY, REPLAY_NOT_GIVEN, sglang_texts.CACHED_TOKENS_UNKNOWN)

    notes = _card(vllm.options, replace(facts, lacks=every)).notes

    assert (vllm_texts.EVENTS_OFF, NO_REPLAY, REPLAY_NOT_GIVEN) == notes
    assert not [note for note in notes if "predict" in note]


async def test_many_ranks_at_other_ports(vllm: Recorded) -> None:
    """A thousand endpoints with long names are one short text."""
    feeds = [EventEndpoints(f"ipc:///{'x' * 999}:{rank}") for rank in range(1000)]
    lacks = (await vllm.learn(replace(vllm.options, endpoints=feeds))).lacks

    assert "and 997 more" in lacks[0]
    assert 1000 > max(map(len, lacks))


async def test_topic_by_flag(vllm: Recorded) -> None:
    """A topic in the flags leaves the endpoints to the engine."""
    given = replace(vllm.options, topic="kv@")

    (feed,) = with_discovered(given, await vllm.learn(given)).endpoints

    assert EventEndpoints("tcp://127.0.0.1:26557", "tcp://127.0.0.1:26657", "kv@") == feed


async def test_no_replay(vllm: Recorded) -> None:
    """Events without a replay are used, and `lacks` states the cost."""
    vllm.answers["/kv_event_sources"] = b'{"0": {"publisher": "zmq", "endpoint": "tcp://*:5557"}}'

    facts = await vllm.learn()

    assert (NO_REPLAY,) == facts.lacks
    assert (EventEndpoints("tcp://127.0.0.1:5557"),) == facts.endpoints


async def test_vllm_ranks_without_events(vllm: Recorded) -> None:
    """Without events the metrics give the number of ranks."""
    vllm.answers["/kv_event_sources"] = b"{}"
    vllm.answers["/metrics"] += b'vllm:num_requests_running{engine="1",model_name="tiny"} 4.0\n'

    facts = await vllm.learn()

    assert 2 == with_discovered(vllm.options, facts).ranks
    assert 4 == facts.scrape.loads[1].running


def test_flags_before_discovery() -> None:
    """Endpoints in the flags are kept; the first rank's endpoints give the endpoints of all ranks."""
    given = AgentOptions("http://e:1", "w", endpoints=[EventEndpoints("tcp://e:5557", "tcp://e:5657", "t")])
    feeds = (EventEndpoints("tcp://x:1"), EventEndpoints("tcp://x:2"))
    facts = EngineFacts(Models(("m",), ()), "", Scrape(), ranks=2, endpoints=feeds)

    settled = with_discovered(given, facts)

    assert [*given.endpoints, EventEndpoints("tcp://e:5558", "tcp://e:5658", "t")] == list(settled.endpoints)
    assert 2 == settled.ranks
    assert given == with_discovered(given, replace(facts, ranks=1))


async def test_sglang(sglang: Recorded) -> None:
    """SGLang's settings, metrics and events give the same facts in its own names."""
    facts = await sglang.learn()

    assert ("sglang", "0.5.9", 2) == (facts.kind, facts.version, facts.ranks)
    assert {0: RankLoad(3, 1, 0.25), 1: RankLoad(0, 0, None)} == facts.scrape.loads
    assert (16, 1280, 2560) == (
        facts.scrape.block_size, facts.scrape.device_blocks, facts.scrape.host_blocks,
    )  # fmt: skip
    assert (8192, 128, "/models/qwen2.5-0.5b-instruct") == (
        facts.max_batched_tokens, facts.max_sequences, facts.tokenizer,
    )  # fmt: skip
    assert ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"] == [feed.events for feed in facts.endpoints]
    assert (sglang_texts.CACHED_TOKENS_UNKNOWN,) == facts.lacks


async def test_sglang_card(sglang: Recorded) -> None:
    """The card names the kind and how a rank is addressed."""
    facts = await sglang.learn()

    card = build_card(
        with_discovered(sglang.options, facts), facts, event_block_size=0, widest_tier=0, started_at_us=1
    )

    assert ("sglang", 2, "X-data-parallel-rank", 16) == (
        card.engine, card.ranks, card.rank_header, card.block_size,
    )  # fmt: skip
    assert {"device": 1280, "host": 2560} == card.tiers


async def test_sglang_without_metrics(sglang: Recorded) -> None:
    """Without metrics the settings give block size and capacity, which later scrapes keep."""
    del sglang.answers["/metrics"]
    sglang.change("/server_info", enable_metrics=False, kv_events_config=None, disable_radix_cache=True)

    facts = (await sglang.learn()).with_scrape(Scrape({0: RankLoad(1)}))

    assert (16, 1280, {0: RankLoad(1)}) == (
        facts.scrape.block_size, facts.scrape.device_blocks, facts.scrape.loads,
    )  # fmt: skip
    assert (
        sglang_texts.CACHING_OFF,
        sglang_texts.EVENTS_OFF,
        sglang_texts.NO_METRICS,
        sglang_texts.CACHED_TOKENS_UNKNOWN,
    ) == facts.lacks


async def test_older_sglang(sglang: Recorded) -> None:
    """The settings of an older SGLang are found at the older path."""
    sglang.answers["/get_server_info"] = sglang.answers.pop("/server_info")

    assert "0.5.9" == (await sglang.learn()).version


async def test_sglang_page_size_1(sglang: Recorded) -> None:
    """Page size 1 is rejected, with the flag to change."""
    sglang.change("/server_info", page_size=1)
    del sglang.answers["/metrics"]

    with pytest.raises(EngineError, match=r"--page-size 16"):
        await sglang.learn()


@pytest.mark.parametrize(
    "answer", [b"nonsense", b'{"page_size": "many"}', b'{"kv_events_config": "{"}', b"{}"]
)
async def test_sglang_nonsense(sglang: Recorded, answer: bytes) -> None:
    """Unreadable settings, or settings without a page size, are an error."""
    sglang.answers["/server_info"] = answer
    del sglang.answers["/metrics"]

    with pytest.raises((EngineError, ConfigError)):
        await sglang.learn()


@pytest.mark.parametrize(
    ("mode", "half"),
    [
        (None, ("both", "", 0)),
        ("null", ("both", "", 0)),
        ("prefill", ("prefill", "sglang", 8765)),
        ("decode", ("decode", "sglang", 0)),
    ],
)
async def test_half_of_a_pair_of_sglang(
    sglang: Recorded, mode: str | None, half: tuple[str, str, int]
) -> None:
    """SGLang names its half, and a prefill engine the port of its bootstrap server."""
    changes = {"disable_radix_cache": mode == "decode", "disaggregation_bootstrap_port": 8765}
    sglang.change("/server_info", disaggregation_mode=mode, **changes)
    facts = await sglang.learn()

    card = build_card(
        with_discovered(sglang.options, facts), facts, event_block_size=0, widest_tier=0, started_at_us=1
    )
    assert half == (card.role, card.kv_connector, card.bootstrap_port)
    assert sglang_texts.CACHING_OFF not in facts.lacks  # a decode engine has no cache of prompts by default


NIXL = b'vllm:nixl_num_failed_transfers_total{engine="0"} 0.0\n'
MOONCAKE = b'vllm:mooncake_xfer_time_seconds_count{engine="0"} 0.0\n'


def server_info(**config: str) -> bytes:
    """What vLLM answers in dev mode."""
    return msgspec.json.encode({"vllm_config": {"kv_transfer_config": config or None}})


PREFILLS = server_info(kv_role="kv_producer", kv_connector="NixlConnector")
DECODES = server_info(kv_role="kv_consumer", kv_connector="NixlPullConnector")
SERVES_BOTH = server_info(kv_role="kv_both", kv_connector="ExampleConnector")
BOTH: dict[str, Any] = {"role": "both"}
HALF: dict[str, Any] = {"role": "decode", "kv_connector": "nixl"}
ROLES: list[tuple[bytes | None, bytes, dict[str, Any], tuple[str, str, bool]]] = [
    (None, b"", {}, ("both", "", False)),
    (None, b"", BOTH, ("both", "", False)),
    (None, b"", HALF, ("decode", "nixl", False)),
    (None, NIXL, {}, ("both", "", True)),
    (None, NIXL, BOTH, ("both", "nixl", False)),
    (None, NIXL, {"whole": True}, ("both", "nixl", False)),
    (None, NIXL, {"role": "prefill"}, ("prefill", "nixl", False)),
    (None, NIXL, {"role": "prefill", "kv_connector": "example"}, ("prefill", "example", False)),
    (b"nonsense", NIXL, {}, ("both", "", True)),
    (server_info(), NIXL, {}, ("both", "", True)),
    (None, MOONCAKE, {"role": "decode"}, ("decode", "mooncake", False)),
    (None, b"vllm:mooncake_store_operation_total 1\n", {}, ("both", "", False)),
    (server_info(kv_connector="MooncakeConnector"), b"", {}, ("both", "", True)),
    (server_info(kv_connector="MooncakeConnector"), b"", BOTH, ("both", "mooncake", False)),
    (server_info(kv_role="kv_both"), NIXL, {}, ("both", "nixl", False)),
    (server_info(kv_role="kv_both", kv_connector="X"), b"", {}, ("both", "", False)),
    (SERVES_BOTH, b"", {}, ("both", "example", False)),
    (SERVES_BOTH, b"", {"role": "prefill"}, ("prefill", "example", False)),
    (server_info(kv_role="kv_producer"), NIXL, {}, ("prefill", "nixl", False)),
    (PREFILLS, b"", {}, ("prefill", "nixl", False)),
    (PREFILLS, b"", {"role": "prefill"}, ("prefill", "nixl", False)),
    (DECODES, b"", {}, ("decode", "nixl", False)),
    (DECODES, NIXL, HALF | {"whole": False}, ("decode", "nixl", False)),
]
"""What /server_info answers (None: 404), metrics of a connector, flags; role, connector, whether it lacks."""


@pytest.mark.parametrize(("info", "metrics", "flags", "shown"), ROLES)
async def test_roles_of_vllm(
    vllm: Recorded, info: bytes | None, metrics: bytes, flags: dict[str, Any], shown: tuple[str, str, bool]
) -> None:
    """Role and connector come from the flags, else from the engine; the card has them.

    An unknown role counts as both, and `lacks` has the flag that settles it.
    """
    vllm.answers["/metrics"] += metrics
    if info is not None:
        vllm.answers["/server_info"] = info
    options = replace(vllm.options, **flags)

    facts = await vllm.learn(options)

    lacks = [text for text in facts.lacks if "give --role both, prefill or decode" in text]
    assert shown == (facts.role, facts.kv_connector, bool(lacks))
    card = _card(replace(options, bootstrap_port=8998, kv_address="p:5710", kv_hash="h"), facts)
    assert (*shown[:2], 8998, "p:5710", "h") == (
        card.role,
        card.kv_connector,
        card.bootstrap_port,
        card.kv_address,
        card.kv_hash,
    )


@pytest.mark.parametrize(
    ("info", "flags", "said"),
    [
        (
            None,
            {"role": "prefill"},
            "role prefill without a connector: give --kv-connector nixl or mooncake",
        ),
        (None, {"kv_connector": "nixl"}, "nixl without a role: give --role prefill or decode"),
        (PREFILLS, {"kv_connector": "p2p", "kv_address": "h:1"}, "remove --kv-connector p2p"),
        (None, {"whole": False}, "pair .--no-whole.: give --role prefill or decode"),
        (PREFILLS, HALF, "kv_role kv_producer in /server_info.: remove --role decode"),
        (PREFILLS, BOTH, "remove --role both"),
        (DECODES, {"whole": True}, "kv_role kv_consumer in /server_info.: remove --whole"),
        (server_info(kv_role="kv_producer"), {}, "role prefill without a connector"),
        (
            server_info(kv_role="kv_producer", kv_connector="NixlPushConnector"),
            {},
            "role prefill.: connector 'nixl-push' is not served: a second use .* hangs both engines",
        ),
        (
            server_info(kv_role="kv_consumer", kv_connector="LMCacheConnectorV1"),
            {},
            "connector 'lmcache' is not served yet; use nixl or mooncake or example",
        ),
        (
            server_info(kv_role="kv_consumer", kv_connector="P2pNcclConnector"),
            {},
            "connector 'P2pNcclConnector' is unknown; use nixl or mooncake or example",
        ),
    ],
)
async def test_refused_halves(vllm: Recorded, info: bytes | None, flags: dict[str, Any], said: str) -> None:
    """Half of a pair that nobody can use is refused with what to change."""
    if info is not None:
        vllm.answers["/server_info"] = info

    with pytest.raises(EngineError, match=said):
        await vllm.learn(replace(vllm.options, **flags))


BOOTSTRAP = b'{"1":{"engine_id":"e1","worker_addr":{"0":{"0":"tcp://h:1"}}},"0":{"engine_id":"e0"}}'


async def test_a_mooncake_prefill_engine(vllm: Recorded) -> None:
    """Its bootstrap server names the engine of each rank, for the card; a decode engine has no server."""
    port = urlsplit(vllm.url).port or 0
    half = replace(vllm.options, kv_connector="mooncake", bootstrap_port=port, ranks=2)
    vllm.answers |= {"/query": BOOTSTRAP}

    facts = await vllm.learn(replace(half, role="prefill"))

    card = _card(replace(half, role="prefill"), facts)
    assert (("e0", "e1"), port) == (card.kv_engine_ids, card.bootstrap_port)
    assert not (await vllm.learn(replace(half, role="decode"))).kv_engine_ids
    by_address = replace(half, role="prefill", bootstrap_port=1, kv_address=f"127.0.0.1:{port}")
    assert ("e0", "e1") == (await vllm.learn(by_address)).kv_engine_ids
    assert 8998 == _card(replace(half, bootstrap_port=0), facts).bootstrap_port


async def test_another_server(vllm: Recorded) -> None:
    """A port of another program answers 404."""
    port = urlsplit(vllm.url).port or 0
    options = replace(vllm.options, role="prefill", kv_connector="mooncake", bootstrap_port=port)
    with pytest.raises(EngineError, match=r"/query answered 404: give --bootstrap-port"):
        await vllm.learn(options)


@pytest.mark.parametrize(
    "answer", [b"", b"{}", b"[]", b'{"1":{"engine_id":"e"}}', b'{"a":{"engine_id":"e"}}', b'{"0":{}}']
)
async def test_no_bootstrap_server(vllm: Recorded, answer: bytes) -> None:
    """The agent waits for it, and says what to change."""
    vllm.answers |= {"/query": answer}
    options = replace(vllm.options, role="prefill", kv_connector="mooncake")
    with pytest.raises(EngineError, match=r"/query|give --bootstrap-port .* or --kv-address HOST:PORT"):
        await vllm.learn(replace(options, bootstrap_port=urlsplit(vllm.url).port or 0))


WRONG_HALVES: list[tuple[str, dict[str, Any], str]] = [
    ("null", {"role": "decode"}, "--disaggregation-mode null: remove --role decode"),
    ("null", {"whole": False}, "--no-whole"),
    ("decode", {"whole": True}, "--disaggregation-mode decode: remove --whole"),
    ("decode", BOTH, "--disaggregation-mode decode: remove --role both"),
    ("prefill", {"role": "decode"}, "--disaggregation-mode prefill: remove --role decode"),
    ("decode", HALF, "--kv-connector nixl: SGLang's engines have only sglang"),
]


@pytest.mark.parametrize(("mode", "flags", "said"), WRONG_HALVES)
async def test_wrong_roles_of_sglang(sglang: Recorded, mode: str, flags: dict[str, Any], said: str) -> None:
    sglang.change("/server_info", disaggregation_mode=mode)
    with pytest.raises(EngineError, match=said):
        await sglang.learn(replace(sglang.options, **flags))


async def test_roles_of_sglang(sglang: Recorded) -> None:
    """Flags that agree, and those of an engine that shows no settings."""
    for flags in (BOTH, {"whole": True}):
        assert "both" == (await sglang.learn(replace(sglang.options, **flags))).role
    sglang.answers.pop("/server_info")
    options = replace(sglang.options, role="prefill", kv_connector="sglang", block_size=16)
    facts = await sglang.learn(options)
    assert ("prefill", "sglang") == (facts.role, facts.kv_connector)


HTML = b"<!doctype html><html><body>It works</body></html>"
UNUSABLE: list[tuple[int, bytes]] = [
    *((status, b"") for status in (301, 401, 403, 404, 405, 429, 500, 501, 502, 503, 504)),
    (200, b""),
    (200, HTML),
    (401, HTML),
    (200, b'{"error": "Unexpected endpoint or method. (GET /metrics)"}'),
    (200, b"\x00\xff" * 500),
    (200, b"vllm:num_requests_running{"),
    (200, b'vllm:num_requests_running{\x1b[2J="\r'),
    (200, b"vllm:num_requests_running " + b"9" * 100_000),
    (200, b"\n" * 300_000),
    (200, b"process_start_time_seconds 10.0\npython_gc_objects_collected_total 1.0\n"),
    (200, b"tgi_queue_size 0\n"),
    (200, b'vllm:cache_config_info{block_size="None"} 1.0\n'),
]
"""Answers of /metrics that say nothing of load and blocks."""


@pytest.mark.parametrize(("status", "body"), UNUSABLE)
async def test_without_metrics(vllm: Recorded, status: int, body: bytes) -> None:
    """An engine without usable metrics serves, with an assumed block size; `lacks` says what is missing."""
    vllm.answers["/metrics"], vllm.statuses["/metrics"] = body, status

    facts = await vllm.learn()

    no_load, block_size = facts.lacks
    assert "load unknown" in no_load
    assert no_load.isprintable()
    assert (f"answered {status}" in no_load) == (status != 200)
    assert ("--engine-api-key-file" in no_load) == (status in {401, 403})
    assert vllm_texts.BLOCK_SIZE_ASSUMED == block_size
    card = _card(vllm.options, facts)
    assert (16, 1, True) == (card.block_size, card.ranks, card.publishes_events)
    assert not facts.has_metrics
    given = replace(vllm.options, block_size=64)
    assert 64 == _card(given, await vllm.learn(given)).block_size


async def test_assumed_block_size(vllm: Recorded) -> None:
    """The size that events show, and that of later metrics, count more than the assumed one."""
    del vllm.answers["/metrics"]
    facts = await vllm.learn()

    assert [16, 8, 32] == [facts.block_size(vllm.options, size) for size in (0, 8, 32)]
    assert 8 == facts.with_scrape(Scrape(block_size=8)).block_size(vllm.options)


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, HTML), (200, b""), (200, b"[]"), *((status, b"") for status in (401, 403, 404, 405, 410, 501))],
)
@pytest.mark.parametrize("path", ["/kv_event_sources", "/version", "/server_info"])
async def test_hidden_paths(vllm: Recorded, path: str, status: int, body: bytes) -> None:
    """A path that a gateway hides, or answers with a page of its own, is as if the engine had none."""
    vllm.answers[path], vllm.statuses[path] = body, status

    facts = await vllm.learn()

    unknown = ["event endpoints unknown"] if path == "/kv_event_sources" else []
    assert unknown == [lack.partition(",")[0] for lack in facts.lacks]
    assert ("" if path == "/version" else "0.32.0") == facts.version


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_events_are_asked_for_again(vllm: Recorded, status: int) -> None:
    """A path of events that fails for now is asked again: without its answer the engine is routed by load."""
    vllm.statuses["/kv_event_sources"] = status

    with pytest.raises(EngineError, match=f"/kv_event_sources answered {status}"):
        await vllm.learn()


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_gateway_that_fails_on_other_paths(vllm: Recorded, status: int) -> None:
    """A gateway that answers errors to all but OpenAI's paths is used: its engine's routes stay unknown."""
    for path in ("/kv_event_sources", "/version", "/server_info", "/metrics"):
        vllm.statuses[path] = status

    facts = await vllm.learn()

    assert () == facts.endpoints
    assert [lack for lack in facts.lacks if f"/kv_event_sources answered {status}" in lack]


@pytest.mark.parametrize("owner", ["llamacpp", "library", "lmdeploy", "organization_owner", "sglang"])
async def test_only_the_models(vllm: Recorded, owner: str) -> None:
    """A server of any kind that has nothing but /v1/models serves, and `lacks` has what is missing."""
    models = b'{"object": "list", "data": [{"id": "m", "owned_by": "%s"}]}' % owner.encode()
    vllm.answers = {"/v1/models": models}

    facts = await vllm.learn()

    beginnings = {lack.partition(",")[0] for lack in facts.lacks} - {
        sglang_texts.SETTINGS_UNKNOWN.partition(",")[0]
    }
    assert beginnings >= {"load unknown", "event endpoints unknown", "block size unknown"}
    card = _card(vllm.options, facts)
    assert ("m", 16, False) == (card.model, card.block_size, card.publishes_events)


async def test_gone_between_two_answers(vllm: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that closes its port before it was asked for metrics is awaited, not taken without them."""

    async def gone(_self: EngineHttp) -> Scrape:
        raise EngineGoneError("/metrics: connection refused")

    monkeypatch.setattr(EngineHttp, "scrape", gone)

    with pytest.raises(EngineGoneError):
        await vllm.learn()


async def test_sglang_health(sglang: Recorded) -> None:
    """SGLang is not probed at /health, which would generate a token each time."""
    async with EngineHttp.open(sglang.url) as engine:
        await learn(engine, sglang.options)
        assert not await engine.trouble()

    assert "/health" not in sglang.asked


@pytest.mark.parametrize(
    ("answer", "reports"),
    [
        (b'{"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}', True),
        (b'{"usage": {"prompt_tokens_details": null}}', False),
        (b"nonsense", None),
        (None, None),
    ],
)
async def test_cached_tokens(vllm: Recorded, answer: bytes | None, reports: bool | None) -> None:
    """A short request shows it. One token would end a vLLM with ExampleConnector."""
    if answer is not None:
        vllm.answers["/v1/completions"] = answer

    async with EngineHttp.open(vllm.url) as engine:
        assert reports is await engine.reports_cached_tokens("tiny")
    assert [1, 1] == msgspec.json.decode(vllm.bodies[-1])["prompt"]
