"""The event endpoints that engines report, and the agent's view of them."""

from __future__ import annotations

import pytest

from kvrouter.errors import KvRouterError
from kvrouter.worker.engines.endpoints import EventsConfig, read_config, read_sources
from kvrouter.worker.engines.http import EngineError
from kvrouter.worker.zmq.sockets import EventEndpoints


@pytest.mark.parametrize(
    ("reported", "host", "used"),
    [
        ("tcp://*:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://[::]:5557", "engine", "tcp://engine:5557"),
        ("tcp://*:5557", "::1", "tcp://[::1]:5557"),
        ("tcp://[::ffff:127.0.0.1]:5557", "127.0.0.1", "tcp://127.0.0.1:5557"),
        ("ipc:///tmp/events", "127.0.0.1", "ipc:///tmp/events"),
        ("tcp://10.0.0.9:5557", "10.0.0.7", "tcp://*:5557"),
        ("tcp://0.0.0.0:5557", "10.0.0.7", "tcp://*:5557"),
    ],
)
def test_as_the_agent_sees_it(reported: str, host: str, used: str) -> None:
    """The agent connects to an endpoint that the engine binds, and binds one to which it connects."""
    endpoints = EventsConfig(publisher="zmq", endpoint=reported).endpoints(host)

    assert endpoints == EventEndpoints(used)


def test_replay_is_always_bound() -> None:
    """The engine binds a replay endpoint of any form."""
    config = EventsConfig(publisher="zmq", endpoint="tcp://10.0.0.9:1", replay_endpoint="tcp://0.0.0.0:2")

    assert EventEndpoints("tcp://*:1", "tcp://engine:2") == config.endpoints("engine")


def test_an_engine_that_binds_any_endpoint() -> None:
    """A mocker binds a plain address, too."""
    config = EventsConfig(publisher="zmq", endpoint="tcp://127.0.0.1:1")

    assert EventEndpoints("tcp://127.0.0.1:1") == config.endpoints("engine", binds=True)


def test_ranks_in_their_order() -> None:
    """The sources are the ranks by number: 10 comes after 2."""
    body = ",".join(
        f'"{rank}": {{"publisher": "zmq", "endpoint": "tcp://*:{5000 + rank}"}}' for rank in (10, 2, 0)
    )

    feeds = read_sources(f"{{{body}}}".encode(), "e")

    assert ["tcp://e:5000", "tcp://e:5002", "tcp://e:5010"] == [endpoints.events for endpoints in feeds]


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"0": {"enable_kv_cache_events": false, "publisher": "zmq", "endpoint": "tcp://*:1"}}',
        b'{"0": {"enable_kv_cache_events": true, "publisher": "null"}}',
        b'{"0": {"publisher": "zmq"}, "1": {"publisher": null}}',
    ],
)
def test_events_off(body: bytes) -> None:
    """An engine that publishes nothing, or not on every rank, has no endpoints."""
    assert () == read_sources(body, "e")


@pytest.mark.parametrize("body", [b"", b"[]", b'{"zero": {}}', b'{"0": {"endpoint": 5}}'])
def test_nonsense(body: bytes) -> None:
    """An answer in another format is an error that names the path."""
    with pytest.raises(EngineError, match="/kv_event_sources"):
        read_sources(body, "e")


def test_sglang_ranks() -> None:
    """SGLang reports rank 0's ports; the other ranks' ports are above them."""
    text = '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "topic": "t"}'

    feeds = read_config(text, "e", 2)

    assert (
        EventEndpoints("tcp://e:5557", "tcp://e:5657", "t"),
        EventEndpoints("tcp://e:5558", "tcp://e:5658", "t"),
    ) == feeds


@pytest.mark.parametrize("text", ["nonsense", '{"publisher": "zmq", "endpoint": "ipc:///tmp/x"}'])
def test_sglang_nonsense(text: str) -> None:
    """An unreadable config, or one without a port to count ranks from, is an error."""
    with pytest.raises(KvRouterError):
        read_config(text, "e", 2)


@pytest.mark.parametrize(
    "endpoint", ["tcp://*", "tcp://*:http", "tcp://*:123456", "tcp://a b:1", "x\\u0000", "*"]
)
def test_odd_endpoints(endpoint: str) -> None:
    """An endpoint that no socket accepts is an error with its text, not an error of the agent's flags."""
    config = f'{{"publisher": "zmq", "endpoint": "{endpoint}"}}'
    with pytest.raises(EngineError, match="event"):
        read_sources(f'{{"0": {config}}}'.encode(), "h")
    with pytest.raises(EngineError, match="event"):
        read_config(config, "h", 2)


def test_endless_ranks() -> None:
    """There are at most 1,024 ranks."""
    body = ",".join(f'"{rank}": {{}}' for rank in range(1025))

    with pytest.raises(EngineError, match="/kv_event_sources"):
        read_sources(f"{{{body}}}".encode(), "h")
