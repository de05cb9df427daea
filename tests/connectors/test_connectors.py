"""What each half of a request gets in its body, and what is handed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from kvrouter.connectors import SERVED, decode_body, prefill_body
from kvrouter.connectors.nixl import ASKING, NEEDED, Nixl
from kvrouter.core.wire.heartbeats import CONNECTORS
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
    found = Nixl().handed_over(answer, url)
    return None if found is None else json.loads(bytes(found))


def asked(**fields: Any) -> Any:
    return json.loads(prefill_body(json.dumps({"prompt": [1], **fields}).encode(), ASKING))


def test_every_connector_is_served() -> None:
    """Agents and frontends know the same ones."""
    assert set(CONNECTORS) == SERVED.keys()


def test_connectors_are_the_engines() -> None:
    """An engine's `kv_connector` is one of these names."""
    former = {"SharedStorageConnector"}
    assert former == _CLASSES.keys() - ENGINE["connectors"]


def test_parameters_are_the_engines() -> None:
    """The engine reads what it is asked with, and names all that the decode engine needs."""
    assert json.loads(bytes(ASKING)).keys() <= ENGINE["nixl_reads"]
    assert ENGINE["nixl_needs"] < set(NEEDED) <= ENGINE["nixl_answers"] & ENGINE["nixl_reads"]
    assert not ENGINE["example_reads"]
    assert SERVED["example"].asking is None


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


def test_the_decode_engine_gets_the_clients_body() -> None:
    body = b'{"prompt": [1], "temperature": 1.50}'
    assert body == decode_body(body, None)
    assert b'"temperature": 1.50' in decode_body(body, Raw(b'{"a":1}'))
    assert {"a": 1} == json.loads(decode_body(body, Raw(b'{"a":1}')))["kv_transfer_params"]
