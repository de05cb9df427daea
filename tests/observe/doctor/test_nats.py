"""What is found of NATS itself: real servers, and other programs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvrouter.bus import NatsOptions, accounts, local_users
from kvrouter.bus.server_info import ServerInfo, read_info
from kvrouter.config import NamespaceOptions
from kvrouter.observe.doctor import examination, nats_servers
from kvrouter.observe.doctor.examination import examine
from kvrouter.observe.doctor.nats_servers import Server, check_servers
from kvrouter.observe.doctor.settings import DoctorSettings
from tests.conftest import NatsServer
from tests.observe.doctor.sick import codes, seen, sick_namespace
from tests.observe.doctor.sick import examination as examined

NewServer = Callable[..., NatsServer]


@pytest.fixture(autouse=True)
def is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting is not what is tested."""
    monkeypatch.setattr(nats_servers, "CONNECT_S", 0.5)
    monkeypatch.setattr(examination, "OTHERS_S", 0.1)


@contextlib.asynccontextmanager
async def saying(line: bytes) -> AsyncIterator[str]:
    """A program that sends this to each client."""

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(line)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()


async def test_unusable_servers(free_port: Callable[[], int]) -> None:
    """A closed port, another service, INFO that is not JSON, an endless line: each is named."""
    gone = f"nats://127.0.0.1:{free_port()}"
    endless = b"INFO " + b"x" * 99_999
    async with saying(b"220 mail\r\n") as mail, saying(b"INFO {\r\n") as torn, saying(endless) as long:
        report = await examined(",".join([gone, mail, torn, long]), "n")

    found = codes(report)
    assert {"nats.unreachable": [gone], "nats.not_nats": [mail, torn, long]} == found
    assert "connection refused" == seen(report, "nats.unreachable")
    assert "sends '220 mail' instead of an INFO line" in [one.seen for one in report.findings]
    assert 2 == report.exit_code


async def test_rejected(new_nats_server: NewServer, tmp_path: Path) -> None:
    """Wrong credentials; then the right ones, and a limit that is too small."""
    config, password = tmp_path / "nats.conf", tmp_path / "password"
    config.write_text("max_payload: 100KB\nmax_pending: 1MB\nauthorization { user: a, password: b }\n")
    password.write_text("b")
    server = new_nats_server(config)
    server.start()
    rejected = await examined(server.url, "n")
    nats = NatsOptions((server.url,), user="a", password_file=password)
    settings = DoctorSettings(listen_s=0.5, timeout_s=20.0, bus=NamespaceOptions(nats, "n"))
    accepted = await examine(replace(settings, ignore=("fleet.silent",)))

    assert ["nats.rejected"] == [*codes(rejected)]
    assert "Authorization Violation" in seen(rejected, "nats.rejected")
    assert ["nats.max_payload"] == [*codes(accepted)]
    assert ["fleet.silent"] == accepted.ignored


@pytest.mark.parametrize("kept", ["nothing", "a directory", "another server's"])
async def test_files_of_another_user(
    new_nats_server: NewServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    """Without a user of the server, `doctor` names the file that it lacks, and what to do."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = tmp_path / "nats.conf"
    config.write_text("authorization { user: a, password: b }\n")
    server = new_nats_server(config)
    server.start()
    port = int(server.url.rpartition(":")[2])
    file = local_users.directory_of(port) / "frontend.nk"
    if kept == "a directory":
        file.mkdir(parents=True)
    elif kept == "another server's":
        local_users.make(port)
    report = await examined(server.url, "n")

    found = seen(report, "nats.rejected")
    assert str(file if kept != "another server's" else file.parent) in found
    assert "run this as the same Unix user" in found


async def test_denied(new_nats_server: NewServer, tmp_path: Path) -> None:
    """A user that may not hear the namespace."""
    config = tmp_path / "nats.conf"
    rights = '{ subscribe: "kvrouter.other.>" }'
    config.write_text(f"authorization {{ users: [{{ user: a, password: b, permissions: {rights} }}] }}\n")
    server = new_nats_server(config)
    server.start()
    report = await examined(server.url.replace("nats://", "nats://a:b@"), "n")

    assert "permissions violation for subscription" in seen(report, "nats.denied")
    assert "kvrouter.n." in seen(report, "nats.denied")
    assert "a:b" not in str(report)


async def test_split(nats_url: str, new_nats_server: NewServer) -> None:
    """Two servers that are not of one cluster: each passes on what is published there only."""
    other = new_nats_server()
    other.start()
    async with sick_namespace(nats_url) as here, sick_namespace(other.url) as there:
        there.name = here.name
        await there.begin()
        here.replica("r-here")
        there.replica("r-there")
        report = await examined(f"{nats_url},{other.url}", here.name, listen_s=2.0)

    found = codes(report)
    assert sorted([nats_url, other.url]) == sorted(found["nats.split"])
    assert ["--nats"] == found["nats.clusters"]


def test_facts_of_servers() -> None:
    """Versions, clusters, limits and round trips, without a connection."""
    well = ServerInfo("1", "a", "2.10.0", "c", 1 << 20)
    servers = [
        Server("well", well, round_trip_s=0.001),
        Server("old", ServerInfo("2", "b", "2.9.25", "c", 1 << 20)),
        Server("slow", ServerInfo("3", "c", "2.12.1", "c", 1 << 20), round_trip_s=0.5),
        Server("unstable", ServerInfo("4", "d", "v?", "c", 1 << 20), reconnects=3),
    ]

    found = {(finding.code, finding.about) for finding in check_servers(servers, "n")}

    assert {("nats.old", "old"), ("nats.slow", "slow"), ("nats.unstable", "unstable")} == found
    assert "4 of 4 servers answer, version 2.10.0, 2.12.1, 2.9.25, v?, cluster c" in nats_servers.described(
        servers
    )


async def test_info(nats_url: str) -> None:
    """A real server's INFO."""
    info = await read_info(nats_url)

    assert info.max_payload >= 1 << 20
    assert info.version[0] == "2"


async def test_user_verify(new_nats_server: NewServer, tmp_path: Path) -> None:
    """The user that `kvrouter nats-accounts` makes for it has the rights that are needed."""
    assert 0 == accounts.main([str(tmp_path), "--namespace", "n", "--agent", "w"])
    config = tmp_path / "nats.conf"
    config.write_text('include "./accounts.conf"\n')
    server = new_nats_server(config)
    server.start()
    nats = NatsOptions((server.url,), nkey_file=tmp_path / "verify.nk")
    report = await examine(DoctorSettings(listen_s=0.5, timeout_s=20.0, bus=NamespaceOptions(nats, "n")))

    assert ["fleet.silent"] == [*codes(report)]


async def test_nats_that_hangs(new_nats_server: NewServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """NATS stops answering while it is listened to."""
    monkeypatch.setattr(nats_servers, "ANSWER_S", 0.2)
    server = new_nats_server()
    server.start()
    async with sick_namespace(server.url) as namespace:
        namespace.name = "n"
        stopped = asyncio.Event()
        await namespace.bus.subscribe("kvrouter.n.hello", lambda *_: stopped.set())
        examining = asyncio.create_task(examined(server.url, "n"))
        await stopped.wait()
        server.pause()
        report = await examining
        server.resume()

    assert server.url in codes(report)["nats.unreachable"]
    assert "the connection was lost while listening" in seen(report, "nats.unreachable")
