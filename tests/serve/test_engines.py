"""`--engine`: valid and invalid values."""

from __future__ import annotations

import pytest

from kvrouter.errors import ConfigError
from kvrouter.serve.engines import _FLAGS, EngineSpec, check_different, read_engine
from kvrouter.serve.settings import ServeOptions
from kvrouter.settings.declare import declared


def test_url_alone() -> None:
    """A URL is enough: the id is derived from it, the rest queried from the engine."""
    assert EngineSpec("http://127.0.0.1:25100", "127-0-0-1-25100") == read_engine("http://127.0.0.1:25100/")


def test_every_key() -> None:
    """Each key is a flag of the agent."""
    spec = read_engine(
        "http://e:1,kv=tcp://e:2,replay=tcp://e:3,id=w,topic=kv@e@m,model=m,block-size=32,whole=true,"
        "role=prefill,connector=nixl,bootstrap-port=8998,kv-address=e:4,kv-hash=h,"
        "label.zone=a,label.node=n=1"
    )

    assert [
        "--engine-url=http://e:1",
        "--worker-id=w",
        "--kv-events=tcp://e:2",
        "--kv-replay=tcp://e:3",
        "--kv-topic=kv@e@m",
        "--model=m",
        "--kv-cache-block-size=32",
        "--whole=true",
        "--role=prefill",
        "--kv-connector=nixl",
        "--bootstrap-port=8998",
        "--kv-address=e:4",
        "--kv-hash=h",
        "--label=zone=a",
        "--label=node=n=1",
    ] == spec.flags()
    (shown,) = [one.setting.help for one in declared(ServeOptions) if one.name == "engine"]
    assert all(key in shown for key in _FLAGS if key != "whole")  # a former name of role=both


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("127.0.0.1:25100", "begin with the engine's URL"),
        ("kv=tcp://e:1", "begin with the engine's URL"),
        ("http://", "use http://HOST:PORT"),
        ("http://e:port", "--engine"),
        ("http://e:1,kvs=tcp://e:2", "unknown key 'kvs'; keys: id, kv, replay"),
        ("http://e:1,label.=x", "unknown key 'label.'"),
        ("http://e:1,kv=e:2", "use tcp://HOST:PORT"),
        ("http://e:1,replay=http://e:2", "use tcp://HOST:PORT"),
        ("http://e:1,kv=tcp://e", "use tcp://HOST:PORT"),
        ("http://e:1/v1", "without /v1"),
        ("http://e:1/v1/,kv=tcp://e:2", "without /v1"),
        ("http://e:1/a?b=c,kv=tcp://e:2", "without a query or fragment"),
        ("http://e:1/a|b", "write it as %XX"),
        ("http://e:1,whole=perhaps", "use true or false"),
        ("http://e:1,role=prefiller", "use both, prefill or decode"),
        ("http://e:1,connector=lmcache", "not served yet; use nixl or mooncake or example"),
        ("http://e:1,connector=p2pnccl", "unknown; use nixl or mooncake or example"),
        ("http://e:1,bootstrap-port=x", "use a port"),
        ("http://e:1,kv-address=e", "use HOST:PORT"),
        ("http://e:1,block-size=0", "use a number of tokens"),
        ("http://e:1,block-size=many", "use a number of tokens"),
        ("http://e:1,kv", "not key=value"),
        ("http://e:1,kv=", "not key=value"),
        ("http://e:1,", "not key=value"),
        ("http://e:1,id=a b", "use 1 to 64"),
    ],
)
def test_refused(text: str, said: str) -> None:
    """A wrong value is rejected with the remedy."""
    with pytest.raises(ConfigError, match=said):
        read_engine(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://e:1", "http://e:1/"),
        ("http://e:1", "http://E:1,id=other"),
        ("http://e", "http://e:80,id=other"),
        ("http://localhost:1", "http://127.0.0.1:1"),
        ("http://[::1]:1", "http://localhost:1,id=other"),
    ],
)
def test_one_engine_twice(one: str, other: str) -> None:
    """The same engine under two names is rejected: its load and blocks would count twice."""
    with pytest.raises(ConfigError, match="are the same engine: remove one of them"):
        check_different([read_engine(one), read_engine(other)])


def test_two_engines_of_one_id() -> None:
    """Two engines with one id are rejected: each agent would take over the other's worker."""
    with pytest.raises(ConfigError, match="give one of them id=NAME"):
        check_different([read_engine(url) for url in ("http://e:1/a-b", "http://e:1/a/b")])

    check_different([read_engine(text) for text in ("http://e:1/a-b", "http://e:1/a/b,id=other")])


def test_engines_behind_one_gateway() -> None:
    """Engines that differ in their paths only are different engines, with ids of their own."""
    specs = [read_engine(f"http://gate:8000/{name}/") for name in ("a", "b")]
    check_different(specs)

    assert [("http://gate:8000/a", "gate-8000-a"), ("http://gate:8000/b", "gate-8000-b")] == [
        (spec.url, spec.worker_id) for spec in specs
    ]
