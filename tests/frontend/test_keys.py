"""Clients' keys at a frontend: who gets in, what each may, and what engines and others get of it."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvrouter.frontend.keys import command
from kvrouter.frontend.requests import engine_routes
from kvrouter.settings.read import load
from tests.frontend.clients import ask, connected, get
from tests.frontend.fleet import BODY, FleetOf
from tests.frontend.keyring import add_key, bearer
from tests.frontend.workers import OK, SSE_HEAD, chunk, event, says

PATH = "/v1/responses"
MESSAGE = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
OPERATOR = bearer("operators")


@dataclass
class Ring:
    """The file, and the flags of a frontend with it."""

    file: Path
    flags: tuple[str, ...]

    def add(self, name: str, *flags: str) -> str:
        """A new key, as a header."""
        return bearer(add_key(self.file, name, *flags))


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    file, admin = tmp_path / "keys.toml", tmp_path / "admin"
    file.write_text("")
    admin.write_text("operators")
    return Ring(file, ("--keys-file", str(file), "--admin-key-file", str(admin)))


async def test_forms_of_refusals(fleet_of: FleetOf, ring: Ring) -> None:
    """Without a key, and with a wrong or former one: 401 in the form of the API; no engine is asked."""
    good, former = ring.add("a"), ring.add("b", "--expires", "2020-01-01")
    async with fleet_of(*ring.flags, scripts=(OK,)) as fleet:
        for header in (
            "x-a: b",
            former,
            good[:-1],
            "authorization: Basic eDp5",
            "authorization: Bearer",
            "x-api-key: ",
        ):
            refused = await fleet.ask(None, header)
            assert (401, "invalid_api_key") == (refused.status, refused.json["error"]["code"])
            assert "Bearer" in refused.header("www-authenticate")
            message = await fleet.ask(MESSAGE, header, path="/v1/messages")
            assert (401, "authentication_error") == (message.status, message.json["error"]["type"])
        assert not fleet.requests
        assert 200 == (await fleet.ask(None, good)).status
        assert (
            200
            == (
                await fleet.ask(
                    MESSAGE, good.replace("authorization: Bearer", "x-api-key:"), path="/v1/messages"
                )
            ).status
        )


async def test_unread_body(fleet_of: FleetOf, ring: Ring) -> None:
    """A client without a key is answered before its body is read, and disconnected."""
    async with fleet_of(*ring.flags, scripts=(OK,)) as fleet, fleet.connected() as client:
        client.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 9000000\r\n\r\n{")
        refused = await client.response()
        assert (401, "close") == (refused.status, refused.header("connection"))


async def test_engines_get_no_clients_key(fleet_of: FleetOf, ring: Ring, tmp_path: Path) -> None:
    """They get their own, if there is one, on every route and from every port."""
    key, engines = ring.add("a"), tmp_path / "engines"
    engines.write_text("theirs")
    secret = key.rpartition(" ")[2]
    more = (f"x-api-key: {secret}", f"api-key: {secret}", f"authorization: Bearer {secret}")
    for flags, found in (((), None), (("--engine-api-key-file", str(engines)), "Bearer theirs")):
        async with fleet_of(*ring.flags, *flags, scripts=(OK,)) as fleet:
            for path in ("/v1/completions", "/v1/messages", "/v1/embeddings", PATH):
                body = {**BODY, **MESSAGE, "input": "x"}
                for url, sent in (
                    (fleet.url, key),
                    (fleet.url, OPERATOR),
                    (fleet.frontend.admin_url, "x-a: b"),
                ):
                    for _ in range(2):  # the second one shares its head with the first
                        assert 200 == (await ask(url, body, sent, *more, path=path)).status
            for request in fleet.workers[0].requests:
                assert secret.encode() not in request.head + request.body
                assert b"operators" not in request.head
                lines = [
                    line
                    for line in request.head.decode().lower().split("\r\n")
                    if line.startswith("authorization")
                ]
                assert lines == ([f"authorization: {found.lower()}"] if found else [])


async def test_no_log_has_a_key(fleet_of: FleetOf, ring: Ring) -> None:
    """Neither of requests that are served nor of refused ones, nor GET /decisions or /clients."""
    key = ring.add("a", "--override", "mode")
    secret = key.split("_", 2)[2]  # it may have underscores
    flags = ("--access-log", "all", "--log-decisions")
    async with fleet_of(*ring.flags, *flags, scripts=(OK,)) as fleet:
        for headers in (
            (key,),
            (key, "x-kvrouter-mode: nothing"),
            (key[:-1],),
            (key, "x-kvrouter-target: w0"),
        ):
            await fleet.ask(None, *headers)
        shown = [(await fleet.get(path)).body for path in ("/decisions", "/clients", "/tenants", "/workers")]
        assert secret[:-1] not in repr((fleet.trouble.logs, shown))
        assert fleet.trouble.logs


REFUSED: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({}, ("x-kvrouter-mode: p2c",), "mode"),
    ({}, ("x-kvrouter-overlap-weight: 2",), "weights"),
    ({}, ("x-kvrouter-temperature: 2",), "weights"),
    ({}, ("x-kvrouter-priority: 2",), "priority"),
    ({"priority": 2}, (), "priority"),
    ({"nvext": {"agent_hints": {"priority": 5}}}, (), "priority"),
    ({"kvrouter": {"mode": "p2c"}}, (), "mode"),
    ({"kvrouter": {"target": "w0", "mode": "direct"}}, (), "target,mode"),
    ({"nvext": {"backend_instance_id": "w0"}}, (), "target,mode"),
    ({}, ("x-kvrouter-mode: direct", "x-kvrouter-target: w0"), "target,mode"),
    ({}, ("x-kvrouter-dry-run: true",), "dry-run"),
    *[({name: 0}, (), "target") for name in ("data_parallel_rank", "routed_dp_rank")],
    ({"parameters": {"priority": -1}}, (), "priority"),
    ({"extra_body": {"instances": [{"x": 1}, {"sampling_params": {"priority": "7"}}]}}, (), "priority"),
    ({"sampling_params": [{"routed_dp_rank": 1}]}, (), "target"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "headers", "needs"), REFUSED)
async def test_overrides(
    fleet_of: FleetOf, ring: Ring, body: dict[str, Any], headers: tuple[str, ...], needs: str
) -> None:
    """What a key may not use is refused, and what it may use works; an operator may use all."""
    none = ring.add("none")
    some = ring.add("some", *(flag for one in needs.split(",") for flag in ("--override", one)))
    async with fleet_of(*ring.flags, scripts=(OK,)) as fleet:
        refused = await fleet.ask({**BODY, **body}, none, *headers)
        assert (403, "PermissionDeniedError") == (refused.status, refused.json["error"]["type"])
        assert not fleet.requests
        for key in (some, OPERATOR):
            assert 200 == (await fleet.ask({**BODY, **body}, key, *headers)).status
        assert (
            200 == (await fleet.ask({**BODY, "kvrouter": {"session": "s"}}, none, "x-session-id: t")).status
        )


STEERING: list[tuple[dict[str, Any], str]] = [
    ({"priority": -3}, "priority"),
    ({"parameters": {"priority": -3}}, "priority"),
    ({"instances": [{"text": "x"}, {"data_parallel_rank": 1}]}, "target"),
    ({"text": "x" * 300_000, "routed_dp_rank": 1}, "target"),
]


@pytest.mark.parametrize(("more", "needs"), STEERING)
async def test_overrides_that_are_passed_on(
    fleet_of: FleetOf, ring: Ring, more: dict[str, Any], needs: str
) -> None:
    """What engines take from a body that is not read is refused, too, however it is written."""
    none, some = ring.add("none"), ring.add("some", "--override", needs)
    written = json.dumps({"model": "m", **more}).encode()
    hidden = written.replace(b"priority", b"prior\\u0069ty").replace(b"_rank", b"_r\\u0061nk")
    async with fleet_of(*ring.flags, scripts=(OK,)) as fleet:
        for body in (written, hidden):
            for path in ("/inference/v1/generate", "/generate", "/pooling"):
                assert 403 == (await fleet.ask(body, none, path=path)).status
                assert 200 == (await fleet.ask(body, some, path=path)).status
        assert 6 == len(fleet.requests)
        plain = {"model": "m", "text": "priority", "priority": 0, "data_parallel_rank": None}
        assert 200 == (await fleet.ask(plain, none, path="/generate")).status
        deep = b'{"parameters":' * 6 + b'{"priority":1}' + b"}" * 6
        assert 400 == (await fleet.ask(deep, none, path="/generate")).status


async def test_sizes(fleet_of: FleetOf, ring: Ring) -> None:
    """A key's own limits of bodies and heads: 413 and 431, before a body that is too long is read."""
    key = ring.add("a", "--max-body-bytes", "1000", "--max-header-bytes", "400")
    other, packed = ring.add("b"), zlib.compress(b" " * 2000)
    async with fleet_of(*ring.flags, scripts=(OK,)) as fleet:
        long = {**BODY, "user": "x" * 1000}
        assert [413, 200] == [(await fleet.ask(long, one)).status for one in (key, other)]
        refused = await fleet.ask(None, key, "x-long: " + "y" * 400)
        assert 431 == refused.status
        assert 200 == (await fleet.ask(None, other, "x-long: " + "y" * 400)).status
        assert "max-header-bytes" in refused.json["error"]["message"]
        assert 413 == (await fleet.ask(packed, key, "content-encoding: deflate")).status
        assert 200 == (await fleet.ask(None, key)).status
        for length in (b"content-length: 9000000", b"transfer-encoding: chunked"):
            async with fleet.connected() as client:
                head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\n%b\r\n%b\r\n\r\n"
                client.writer.write(head % (key.encode(), length) + b"7d0\r\n" + b" " * 2000)
                refused = await client.response()
                assert (413, "close") == (refused.status, refused.header("connection"))
        assert 3 == len(fleet.requests)


async def test_connection_header(fleet_of: FleetOf, ring: Ring, tmp_path: Path) -> None:
    """No `connection` header takes the engines' key away, or passes a client's on."""
    key, engines = ring.add("a"), tmp_path / "engines"
    engines.write_text("theirs")
    named = (
        "authorization",
        "Authorization",
        "x-api-key, authorization, close",
        "keep-alive,AUTHORIZATION ,x-a",
    )
    async with fleet_of(*ring.flags, "--engine-api-key-file", str(engines), scripts=(OK,)) as fleet:
        for names in named:
            for path in ("/v1/completions", "/v1/embeddings"):
                sent = {**BODY, "input": "x"}
                assert 200 == (await fleet.ask(sent, key, f"connection: {names}", "x-a: b", path=path)).status
        for request in fleet.workers[0].requests:
            assert ["Bearer theirs"] == request.headers("authorization")
            assert key.rpartition(" ")[2].encode() not in request.head


async def test_what_engines_say(fleet_of: FleetOf, ring: Ring) -> None:
    """No trailer, and no header that is the router's own, reaches a client, in whatever pieces they come."""
    key = ring.add("a")
    inner = b"x-kvrouter-worker: w9\r\nx-kvrouter-overlap-blocks: 7\r\nx-request-id: own\r\n"
    head = SSE_HEAD[:-2] + b"trailer: x-secret\r\nconnection: x-hop\r\nx-hop: s3cret\r\n" + inner + b"\r\n"
    end = b"0\r\nx-secret: s3cret\r\nx-kvrouter-worker: w9\r\n\r\n"
    events = b"".join(chunk(event(str(number))) for number in range(50)) + chunk(b"data: [DONE]\n\n")
    whole = head + events + end
    for pieces in ([whole], [head, events, end], [head, *(events + end)[-80:].split(b"\n")]):
        sent = pieces if b"".join(pieces) == whole else [whole[:-60], *(bytes([one]) for one in whole[-60:])]
        async with fleet_of(*ring.flags, scripts=(says(*sent),)) as fleet, fleet.connected() as client:
            for _ in range(2):  # the second one is read behind the first: its end is where it should be
                answered = await client.ask({**BODY, "stream": True}, key)
                assert (200, 50) == (answered.status, len(answered.events))
                for secret in (b"s3cret", b"w9", b"overlap", b"own", b"trailer", b"x-secret"):
                    assert secret not in answered.head + answered.body


async def test_models(fleet_of: FleetOf, ring: Ring) -> None:
    """A model of others is refused as one that does not exist; lists have only the key's own."""
    mine, others, all_ = ring.add("a", "--model", "m"), ring.add("b", "--model", "x"), ring.add("c")
    async with fleet_of(*ring.flags, "--model-alias", "alias=m", scripts=(OK,)) as fleet:
        for path in ("/v1/completions", "/v1/embeddings", "/v1/messages", PATH, "/inference/v1/generate"):
            answers = {}
            for model in ("m", "alias", "nobody's", None):
                body = {**BODY, **MESSAGE, "input": "x", "model": model}
                answered = await fleet.ask(body, others, path=path)
                answers[model] = answered.status, answered.json["error"]["message"]
                assert b"'m'" not in answered.body
                if model in {"m", "alias"}:
                    assert {200} == {(await fleet.ask(body, key, path=path)).status for key in (mine, all_)}
            assert answers["m"] == answers["alias"] == answers["nobody's"] == (403, "the API key may use: x")
            assert answers[None][0] == 403
        listed = {}
        for key in (mine, others, all_, OPERATOR):
            async with connected(fleet.url) as client:
                client.send(b"", key, path="/v1/models", method="GET")
                listed[key] = [one["id"] for one in (await client.response()).json["data"]]
                client.send(b"", key, path="/v1/models/m", method="GET")
                assert (404 if key == others else 200) == (await client.response()).status
        assert [["alias", "m"], [], ["alias", "m"], ["alias", "m"]] == [
            sorted(one) for one in listed.values()
        ]


async def test_adapters(fleet_of: FleetOf, ring: Ring) -> None:
    """A key for an adapter is none for its base; SGLang's field for an adapter says no more than `model`."""
    base, adapter = ring.add("a", "--model", "m"), ring.add("b", "--model", "lora1")
    async with fleet_of(*ring.flags, scripts=(OK,), lora_names=["lora1", "lora2"]) as fleet:
        for model, key, status in (
            ("m", base, 200),
            ("lora1", adapter, 200),
            ("m", adapter, 403),
            (None, adapter, 403),
        ):
            assert status == (await fleet.ask({**BODY, "model": model}, key)).status
        for hidden in (
            b'"lora_path":"lora2"',
            b'"lora\\u005fpath":"lora2"',
            b'"temperature":NaN,"lora_path":["lora2"]',
            b'"extra_body":{"lora_path":"lora2"}',
        ):
            told = await fleet.ask(b'{"model":"m","prompt":"x",%b}' % hidden, base)
            assert (403, "lora_path") == (told.status, told.json["error"]["param"])
        assert 200 == (await fleet.ask({**BODY, "lora_path": None}, base)).status
        body = b' {"model":"m","text":"x","lora_path":"lora2"}'
        for kind in ("text/plain", "application/json"):
            told = await fleet.ask(body, base, f"content-type: {kind}", path="/generate")
            assert 403 == told.status
        nothing = await fleet.ask({**BODY, "model": ""}, base)
        assert (403, False) == (nothing.status, b"lora" in nothing.body)


async def test_sessions_and_responses(fleet_of: FleetOf, ring: Ring) -> None:
    """They are the tenant's: another key of it goes on, that of another tenant does not."""
    one, two = ring.add("one", "--tenant", "t"), ring.add("two", "--tenant", "t")
    other = ring.add("other", "--override", "target", "--override", "mode")
    async with fleet_of(*ring.flags, scripts=(OK,)) as fleet:
        await fleet.ask({"model": "m", "input": "x"}, one, path=PATH)
        made = fleet.workers[0].requests[0].json["request_id"]
        after = {"model": "m", "input": "x", "previous_response_id": made}
        for key, status in ((two, 200), (one, 200), (other, 404), (OPERATOR, 404)):
            assert status == (await fleet.ask(after, key, path=PATH)).status


async def test_what_clients_see(fleet_of: FleetOf, ring: Ring) -> None:
    """Nothing of others: no metrics, no names of workers; probes stay free."""
    key, chooser = ring.add("a"), ring.add("b", "--override", "target")
    async with fleet_of(*ring.flags, scripts=(OK,)) as fleet:
        for sent, may in ((key, False), (chooser, True), (OPERATOR, True)):
            answered = await fleet.ask(None, sent)
            assert may == bool(answered.headers("x-kvrouter-worker")), sent
        for path, free in (
            ("/live", True),
            ("/ready", True),
            ("/health", False),
            ("/metrics", False),
            ("/v1/models", False),
        ):
            assert free == (401 != (await get(fleet.url, path)).status), path
            assert 401 != (await get(fleet.frontend.admin_url, path)).status
        assert 401 == await _status(fleet.url, "/metrics", key)
        assert 200 == await _status(fleet.url, "/metrics", OPERATOR)
        assert 200 == await _status(fleet.url, "/health", key)
        # a browser sends its password with requests of other sites, too: those may only read
        password = "authorization: Basic " + base64.b64encode(b"x:operators").decode()
        assert 200 == await _status(fleet.url, "/health", password)
        assert 401 == (await fleet.ask(None, password)).status


async def _status(url: str, path: str, *headers: str) -> int:
    async with connected(url) as client:
        client.send(b"", *headers, path=path, method="GET")
        return (await client.response()).status


async def test_reloaded(fleet_of: FleetOf, ring: Ring) -> None:
    """A key counts, or no longer, from the reload on, also on open connections; a wrong file changes none."""
    old = ring.add("old")
    async with fleet_of(*ring.flags, scripts=(OK,)) as fleet, fleet.connected() as client:
        reload = fleet.frontend.reload
        assert reload is not None
        assert 200 == (await client.ask(BODY, old)).status
        good = ring.file.read_text()
        ring.file.write_text("?")
        with pytest.raises(Exception, match="--keys-file"):
            await reload.reload()
        assert 200 == (await client.ask(BODY, old)).status
        ring.file.write_text(good)
        command.change(load(command.COMMAND, ("revoke", "old", "--file", str(ring.file)), {}).settings)
        new = ring.add("new")
        assert {"keys-file": "changed"} == (await reload.reload()).applied
        assert {} == (await reload.reload()).applied
        assert [401, 200] == [(await client.ask(BODY, key)).status for key in (old, new)]


async def test_one_key(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVROUTER_API_KEY: one for all, which may do what clients without keys may."""
    async with fleet_of("--api-key", "sk-1", scripts=(OK,)) as fleet:
        assert 401 == (await fleet.ask()).status
        answered = await fleet.ask(None, bearer("sk-1"), "x-kvrouter-mode: p2c")
        assert (200, "w0") == (answered.status, answered.header("x-kvrouter-worker"))
        assert 404 == await _status(
            fleet.url, "/metrics", bearer("sk-1")
        )  # no operators' key: not on this port


async def test_cache_salt(fleet_of: FleetOf, ring: Ring) -> None:
    """Keys with different salts share no block, in the engine and here; the client's own still counts."""
    one, two = ring.add("one", "--cache-salt", "s"), ring.add("two", "--cache-salt", "s")
    other, plain = ring.add("other"), {**BODY, "prompt": list(range(64))}
    bodies = (
        plain,
        {**plain, "cache_salt": "own"},
        {**plain, "nvext": {"cache_salt": "own"}},
        {**MESSAGE, "model": "m"},
    )
    async with fleet_of(*ring.flags, "--tenant-cache-salt", scripts=(OK,)) as fleet:
        salts = {}
        for key in (one, two, other):
            for body in bodies:
                assert (
                    200
                    == (
                        await fleet.ask(
                            body, key, path="/v1/messages" if "messages" in body else "/v1/completions"
                        )
                    ).status
                )
            await fleet.ask({"model": "m", "input": "x"}, key, path=PATH)
            salts[key] = [each.json["cache_salt"] for each in fleet.workers[0].requests[-5:]]
        assert ["s", "s:own", "s:own", "s", "s"] == salts[one] == salts[two]
        assert 32 == len(salts[other][0])
        assert salts[other][0] + ":own" == salts[other][1]
        assert 200 == (await fleet.ask(plain, OPERATOR)).status
        assert "cache_salt" not in fleet.workers[0].requests[-1].json


async def test_salted_hashes(fleet_of: FleetOf, ring: Ring) -> None:
    """A tenant sees no overlap with what another one has sent; without the setting it does."""
    flags = ("--router-mode", "kv", "--no-use-kv-events")
    one, other = (ring.add(name, "--override", "target") for name in ("one", "other"))
    for salt, is_shared in ((("--tenant-cache-salt",), False), ((), True)):
        async with fleet_of(*ring.flags, *flags, *salt, scripts=(OK,)) as fleet:
            answers = [await fleet.ask(None, key) for key in (one, one, other)]
            found = [int(one.header("x-kvrouter-overlap-blocks")) > 0 for one in answers]
            assert [False, True, is_shared] == found


SALTED = (
    "/v1/embeddings",
    "/generate",
    "/inference/v1/generate",
    "/pooling",
    "/v1/score",
    "/rerank",
    "/invocations",
)


async def test_salt_that_is_passed_on(fleet_of: FleetOf, ring: Ring) -> None:
    """Also where bodies are not read; a client's own still counts, and where engines take none it is 403."""
    key, other = ring.add("a", "--cache-salt", "s"), ring.add("b")
    async with fleet_of(*ring.flags, "--tenant-cache-salt", scripts=(OK,)) as fleet:
        for path in SALTED:
            for body in ({"model": "m"}, {"model": "m", "cache_salt": "own", "extra_key": ["k"]}, {}):
                assert 200 == (await fleet.ask(body, key, path=path)).status
            plain, own, empty = [one.json for one in fleet.workers[0].requests[-3:]]
            assert ["s", "s:own", "s"] == [one["cache_salt"] for one in (plain, own, empty)]
            if path == "/generate":
                assert ["s", 's:["k"]'] == [one["extra_key"] for one in (plain, own)]
        assert 200 == (await fleet.ask({"model": "m"}, other, path="/generate")).status
        assert 32 == len(fleet.workers[0].requests[-1].json["cache_salt"])
        for path in sorted(engine_routes.UNSALTED):
            assert 403 == (await fleet.ask({"model": "m"}, key, path=path)).status
            assert 200 == (await fleet.ask({"model": "m"}, OPERATOR, path=path)).status
