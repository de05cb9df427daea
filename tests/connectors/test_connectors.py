"""What each half of a request gets in its body, and what is handed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from kvrouter.connectors import SERVED, bodies_at_once, decode_body, prefill_body
from kvrouter.connectors.mooncake import Mooncake
from kvrouter.connectors.nixl import ASKING, NEEDED, Nixl
from kvrouter.connectors.sglang import SglangPair
from kvrouter.connectors.source import Source, source_at
from kvrouter.core.wire.heartbeats import CONNECTORS, PAIRS_ONLY, Card
from kvrouter.worker.engines.roles import _CLASSES

# The names in vLLM's own files (scripts/kit/engine_events.py). `scripts/test-vllm DIR --pd` compares them
# with the engine that it runs.
RECORD = Path(__file__).parents[1] / "data/engine_events.json"
ENGINE = {name: set(names) for name, names in json.loads(RECORD.read_bytes())["vllm"]["hand_over"].items()}
HANDED = {
    "do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "e",
    "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "invented": 1e30,
}  # fmt: skip


def handed(url: str, **changes: Any) -> Any:
    """What a decode engine gets of an answer of the prefill engine at this URL."""
    answer = json.dumps({"id": "a", "usage": {}, "kv_transfer_params": HANDED | changes}).encode()
    found = Nixl().handed_over(answer, Source(url))
    return None if found is None else json.loads(bytes(found))


SOURCE = Source("http://10.0.0.7:8000", engine_id="e1", address="10.0.0.7:8998", transfer_id="xfer-1")
MOONCAKE_ASKS = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1"}
MOONCAKE_HANDS = {
    "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": "xfer-1", "remote_engine_id": "e1",
    "remote_bootstrap_addr": "http://10.0.0.7:8998", "remote_prefill_cached_tokens": 64,
}  # fmt: skip
# Read by vLLM for each connector.
CACHED = {"remote_prefill_cached_tokens"}


def mooncake_hands(finish_reason: Any = "length", source: Source = SOURCE, **usage: Any) -> Any:
    """What a decode engine gets after this answer of the prefill engine."""
    choices = [{"index": 0, "text": "a", "finish_reason": finish_reason}]
    answer = json.dumps({"id": "a", "choices": choices, "usage": usage}).encode()
    found = Mooncake().handed_over(answer, source)
    return None if found is None else json.loads(bytes(found))


def asked(**fields: Any) -> Any:
    return json.loads(prefill_body(json.dumps({"prompt": [1], **fields}).encode(), ASKING))


def test_every_connector_is_served() -> None:
    """Agents and frontends know the same ones."""
    assert set(CONNECTORS) == SERVED.keys()
    assert PAIRS_ONLY == {name for name, one in SERVED.items() if one.is_at_once}


def test_connectors_are_the_engines() -> None:
    """An engine's `kv_connector` is one of these names."""
    former = {"SharedStorageConnector"}
    assert former == _CLASSES.keys() - ENGINE["connectors"]


def test_parameters_are_the_engines() -> None:
    """The engine reads what it is asked with, and names all that the decode engine needs."""
    assert json.loads(bytes(ASKING)).keys() <= ENGINE["nixl_reads"]
    assert ENGINE["nixl_needs"] < set(NEEDED) <= ENGINE["nixl_answers"] & ENGINE["nixl_reads"]
    assert not ENGINE["example_reads"]
    assert SERVED["example"].asking(Source("")) is None
    assert MOONCAKE_ASKS.keys() | MOONCAKE_HANDS.keys() <= ENGINE["mooncake_reads"] | CACHED
    assert ENGINE["mooncake_needs"] < MOONCAKE_HANDS.keys()


@pytest.mark.parametrize("limit", [None, 1, 9, 9.0, 1e3, "9", 10**30])
def test_a_limit_becomes_one_token(limit: Any) -> None:
    """In whatever form the engine takes it: a prefill engine must not generate an answer."""
    fields = asked(max_tokens=limit, max_completion_tokens=limit, n=1, logprobs=3)
    assert (1, 1, 1) == (fields["max_tokens"], fields["max_completion_tokens"], fields["min_tokens"])
    assert {"n", "logprobs"}.isdisjoint(fields)
    assert fields["kv_transfer_params"]["do_remote_decode"] is True


@pytest.mark.parametrize("limit", [0, -1, 0.5, "many", [9], True])
def test_an_invalid_limit_stays(limit: Any) -> None:
    assert limit == asked(max_tokens=limit)["max_tokens"]


def test_what_changes_the_prompt_stays() -> None:
    kept = {"tools": [{"type": "function"}], "cache_salt": "s", "response_format": {"type": "json_object"}}
    assert kept.items() <= asked(stream=True, stream_options={"include_usage": True}, **kept).items()
    assert "stream_options" not in asked(stream=True, stream_options={})
    assert "stream_options" in asked(stream_options={})


def test_parameters_are_verbatim() -> None:
    assert HANDED == handed("http://127.0.0.1:8000")


@pytest.mark.parametrize("name", NEEDED)
def test_all_or_none(name: str) -> None:
    assert handed("http://10.0.0.7:8000", **{name: None}) is None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_a_default_host(host: str) -> None:
    """A prefill engine that names its own loopback is elsewhere for the decode engine."""
    assert "10.0.0.7" == handed("http://10.0.0.7:8000", remote_host=host)["remote_host"]
    assert host == handed("http://localhost:8000", remote_host=host)["remote_host"]
    assert "10.9.9.9" == handed("http://10.0.0.7:8000", remote_host="10.9.9.9")["remote_host"]


def test_mooncake() -> None:
    """The router names the transfer, and hands on how much the prefill engine had cached."""
    asks = Mooncake().asking(SOURCE)
    assert asks is not None
    assert MOONCAKE_ASKS == json.loads(bytes(asks))
    assert MOONCAKE_HANDS == mooncake_hands(prompt_tokens_details={"cached_tokens": 64})
    assert CACHED == MOONCAKE_HANDS.keys() - mooncake_hands().keys()


@pytest.mark.parametrize("finish_reason", ["stop", "abort", "error", "tool_calls", "", None])
def test_mooncake_keeps_nothing(finish_reason: str | None) -> None:
    """The prefill engine drops blocks unless the answer ended at its length: the decode engine would hang."""
    assert mooncake_hands(finish_reason) is None


@pytest.mark.parametrize("answer", [b"", b"[]", b"\xff", b"{}", b'{"choices":[]}', b'{"choices":[{}]}'])
def test_mooncake_answers(answer: bytes) -> None:
    assert Mooncake().handed_over(answer, SOURCE) is None


def test_a_mooncake_engine_without_an_id() -> None:
    """No decode engine could find the blocks, which would be kept for minutes."""
    unknown = Source(SOURCE.url, address=SOURCE.address, transfer_id="x")
    assert Mooncake().asking(unknown) is None
    assert mooncake_hands(source=unknown) is None


@pytest.mark.parametrize(
    ("url", "card", "address"),
    [
        ("http://p:8000/a", {"bootstrap_port": 8998}, "p:8998"),
        ("http://[::1]:8000", {"bootstrap_port": 1}, "[::1]:1"),
        ("http://p:8000", {"kv_address": "q:7"}, "q:7"),
    ],
)
def test_sources(url: str, card: dict[str, Any], address: str) -> None:
    """The id is that of the rank, and each hand-over has a name of its own."""
    ranks = Card(worker_id="w", url=url, model="m", block_size=16, kv_engine_ids=("e0", "e1"), **card)
    first, second = source_at(url, ranks, 1), source_at(url, ranks, 2)
    assert (url, "e1", address) == (first.url, first.engine_id, first.address)
    assert "" == second.engine_id
    assert first.transfer_id != second.transfer_id
    assert Source(url) == source_at(url, None, 0)


def test_the_decode_engine_gets_the_clients_body() -> None:
    body = b'{"prompt": [1], "temperature": 1.50}'
    assert body == decode_body(body, None)
    assert b'"temperature": 1.50' in decode_body(body, Raw(b'{"a":1}'))
    assert {"a": 1} == json.loads(decode_body(body, Raw(b'{"a":1}')))["kv_transfer_params"]


# SGLang 0.5.23's PDRoutingFields, without those that no router of pairs needs.
SGLANG_READS = {"bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"}


@pytest.mark.parametrize(
    ("address", "where"),
    [("p:8998", ("p", 8998)), ("[::1]:7", ("::1", 7)), ("10.0.0.7:0", ("10.0.0.7", None))],
)
def test_sglang(address: str, where: tuple[str, int | None]) -> None:
    """Both bodies have the same fields at the top. No port: the engines' own default."""
    asks = SglangPair().asking(Source("http://q:1", address=address, room=2**63 - 1, rank=3))
    assert asks is not None
    fields = json.loads(bytes(asks))
    assert fields.keys() == SGLANG_READS
    assert where == (fields["bootstrap_host"], fields["bootstrap_port"])
    assert (2**63 - 1, 3) == (fields["bootstrap_room"], fields["disagg_prefill_dp_rank"])
    assert SglangPair().handed_over(b"{}", Source("")) is None


@pytest.mark.parametrize("stream", [{}, {"stream": False, "stream_options": None}, {"stream": True}])
def test_bodies_at_once(stream: dict[str, Any]) -> None:
    """What decides the first token stays: the decode engine gets that of the prefill engine."""
    client = {"prompt": [1], "max_tokens": 9, "min_tokens": 2, "logprobs": 3, "seed": 1, "temperature": 1.5}
    body = json.dumps(client | stream | {"stream_options": {"include_usage": True}}).encode()
    prefill, decode = map(json.loads, bodies_at_once(body, Raw(b'{"bootstrap_room":7}')))
    assert json.loads(body) | {"bootstrap_room": 7} == decode
    if stream.get("stream"):
        assert "stream_options" not in prefill
        decode.pop("stream_options")
    assert prefill == decode | ({"stream": False} if "stream" in decode else {})


def test_rooms() -> None:
    """Each hand-over has one of its own, at the prefill worker's rank."""
    card = Card(worker_id="w", url="http://p:8000", model="m", block_size=16, bootstrap_port=8998)
    first, second = source_at(card.url, card, 1), source_at(card.url, card, 1)
    assert (1, "p:8998") == (first.rank, first.address)
    assert first.room != second.room
    assert max(first.room, second.room) < 2**63
