"""Routes for operators are on the admin listener, and with the key on the clients' port."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import pytest

from kvrouter.errors import ConfigError
from kvrouter.frontend.run import running_frontend
from kvrouter.frontend.settings import parse_options
from kvrouter.observe.settings import ReplicaAccess
from kvrouter.observe.verify import VerifyError, compare
from tests.frontend.clients import Client, Response, connected
from tests.frontend.fleet import BODY, STREAM, FleetOf

DRY = "x-kvrouter-dry-run: true"
BUSY = {"model": "m", "active_decode_blocks_threshold": 0.9}
KEY = "s3cret"
ALLOWED = [200, 200, 404, 200, 200, 200, 200, 200, 200]
"""Statuses of `all_for_operators`. The decision that it requests is not kept."""


async def all_for_operators(client: Client, *headers: str) -> list[Response]:
    """One request to each route for operators."""
    lines = "".join(f"{line}\r\n" for line in headers)
    answers = []
    for path in ("/workers", "/decisions", "/decisions/x", "/busy_threshold"):
        client.writer.write(f"GET {path} HTTP/1.1\r\nhost: t\r\n{lines}\r\n".encode("latin-1"))
        answers.append(await client.response())
    answers.append(await client.ask(BUSY, *headers, path="/busy_threshold"))
    answers.append(await client.ask(BODY, *headers, path="/v1/route"))
    answers.append(await client.ask(BODY, *headers, DRY))
    answers.append(await client.ask({**STREAM, "kvrouter": {"dry_run": True}}, *headers))
    answers.append(await client.ask({"model": "m", "input": "x"}, *headers, DRY, path="/v1/embeddings"))
    return answers


async def test_not_on_the_clients_port(fleet_of: FleetOf) -> None:
    """Each is a 404 that names the admin listener. Nothing changes, and other requests are served."""
    async with fleet_of() as fleet, fleet.connected() as client:
        before = (await fleet.get("/busy_threshold")).json
        answers = await all_for_operators(client)
        served = [await client.ask(BODY), await client.ask(BODY, "x-kvrouter-dry-run: false")]

        assert [404] * 9 == [answer.status for answer in answers]
        errors = [answer.json["error"] for answer in answers]
        assert {"NotFoundError"} == {error["type"] for error in errors}
        assert all("--admin-port" in error["message"] for error in errors)
        assert errors[4]["message"].startswith("POST /busy_threshold is for operators")
        assert errors[6]["message"].startswith("a dry run is for operators")
        assert before == (await fleet.get("/busy_threshold")).json
        assert ([200, 200], 2) == ([answer.status for answer in served], len(fleet.requests))


async def test_what_clients_may_ask(fleet_of: FleetOf) -> None:
    """Clients may use the APIs and the routes of load balancers and Prometheus."""
    async with fleet_of() as fleet, fleet.connected() as client:
        for path in ("/live", "/ready", "/health", "/metrics", "/v1/models", "/v1/models/m", "/version"):
            assert (await client.get(path)).status in {200, 503}, path
        assert 200 == (await client.ask({"prompt": "x"}, path="/tokenize")).status


async def test_admin_listener(fleet_of: FleetOf) -> None:
    """It serves all routes without a key. Its address is logged at the start."""
    async with fleet_of() as fleet, connected(fleet.frontend.admin_url) as client:
        answers = await all_for_operators(client)
        (said,) = fleet.logged("frontend.listening")

        assert ALLOWED == [answer.status for answer in answers]
        assert "no decision about 'x'" in answers[2].json["error"]["message"]
        assert "x-kvrouter-router of its answer" in answers[2].json["error"]["message"]
        assert not fleet.requests
        assert 200 == (await client.ask(BODY)).status
        assert fleet.frontend.admin_url.startswith("http://127.0.0.1:")
        assert (fleet.frontend.url, fleet.frontend.admin_url) == (said["url"], said["admin"])


async def test_weight_in_the_log(fleet_of: FleetOf) -> None:
    """The start says which weight serves, how to get the published one, and which flags have no effect."""
    given = ("--router-active-request-weight", "2", "--router-kv-overlap-score-credit-decay", "0.5")

    async with fleet_of("--router-mode", "kv", *given) as fleet:
        (said,) = fleet.logged("frontend.listening")
        (warned,) = fleet.logged("frontend.flags_without_effect")
        assert ("auto", "--kv-overlap-score-weight 1") == (said["weight"], said["published_weight"])
        assert [given[0], given[2]] == warned["flags"]
    for flags in (["kv"], ["kv", *given, "--kv-overlap-score-weight", "1"], ["random", *given]):
        async with fleet_of("--router-mode", *flags) as fleet:
            assert not fleet.logged("frontend.flags_without_effect")


async def test_key(fleet_of: FleetOf, tmp_path: Path) -> None:
    """With --admin-key-file the clients' port serves all routes with the key; a wrong key is a 401."""
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    wrong = [
        "x-a: b",
        "authorization: Bearer s3cre",
        f"authorization: Basic {KEY}",
        f"authorization: Basic {b64encode(b'operator:s3cre').decode()}",
        "authorization: Bearer \xe9",
    ]
    async with fleet_of("--admin-key-file", str(file)) as fleet, fleet.connected() as client:
        given = await all_for_operators(client, f"authorization: bearer {KEY}")
        refused = [answer for line in wrong for answer in await all_for_operators(client, line)]

        assert ALLOWED == [answer.status for answer in given]
        challenged = {(one.status, one.header("www-authenticate")) for one in refused}
        assert {(401, 'Basic realm="kvrouter"')} == challenged
        errors = [answer.json["error"] for answer in refused]
        assert {"AuthenticationError"} == {error["type"] for error in errors}
        assert all("Authorization: Bearer KEY" in error["message"] for error in errors)
        assert KEY not in json.dumps(errors)
        assert 200 == (await fleet.get("/workers")).status
        assert 200 == (await client.ask(BODY)).status


async def test_key_as_a_browsers_password(fleet_of: FleetOf, tmp_path: Path) -> None:
    """It opens what is read, and nothing that changes: browsers send it with other sites' forms too."""
    file = tmp_path / "key"
    file.write_text(KEY)
    basic = b64encode(f"operator:{KEY}".encode()).decode()
    async with fleet_of("--admin-key-file", str(file)) as fleet, fleet.connected() as client:
        given = await all_for_operators(client, f"authorization: Basic {basic}")

        assert [*ALLOWED[:4], 401, 401, 401, 401, 401] == [answer.status for answer in given]


async def test_verify_with_the_key(fleet_of: FleetOf, tmp_path: Path) -> None:
    """`kvrouter verify` can use the clients' ports with the key."""
    file = tmp_path / "key"
    file.write_text(KEY)
    flags = ("--router-replica-sync", "--admin-key-file", str(file))
    async with fleet_of(*flags, replicas=2) as fleet:
        urls = [frontend.url for frontend in fleet.frontends]
        report = await compare(urls, timeout_s=20.0, access=ReplicaAccess(file))
        with pytest.raises(VerifyError, match=r"answers 401.*--admin-key-file"):
            await compare(urls, timeout_s=20.0)

        assert report.is_equal, report.differences


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b" \n", "it is empty"), (b"\xff\xfe", "the file is not UTF-8 text")],
)
def test_key_files_that_cannot_be_used(tmp_path: Path, content: bytes | None, said: str) -> None:
    """A frontend does not start if its key cannot be read."""
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(ConfigError, match=f"--admin-key-file {file}: {said}"):
        parse_options(["--admin-key-file", str(file)])


def test_key_is_not_shown(tmp_path: Path) -> None:
    """The repr of the options does not contain the key."""
    file = tmp_path / "key"
    file.write_text(KEY)

    assert KEY not in repr(parse_options(["--admin-key-file", str(file)]))


async def test_admin_port_taken(fleet_of: FleetOf) -> None:
    """A frontend does not start, and the message names the flag."""
    async with fleet_of() as fleet:
        port = fleet.frontend.admin_url.rpartition(":")[2]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: .* \(--admin-port\)"):
            async with running_frontend(parse_options(["--port", "0", "--admin-port", port])):
                pass
