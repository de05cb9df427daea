"""The users of an embedded server: made for its Unix user alone, found by the commands of the same host."""

from __future__ import annotations

import asyncio
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrouter.bus import Bus, NatsOptions, accounts, local_users
from kvrouter.bus.embedded import embedded_server
from kvrouter.bus.rights import AGENT, CALLER, FRONTEND, TOOL, VERIFY
from kvrouter.errors import ConfigError
from tests.conftest import NatsServer
from tests.frontend.workers import until

EVERY = (FRONTEND, AGENT, VERIFY, TOOL, CALLER)
PATIENCE_S = 20.0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def url(free_port: Callable[[], int]) -> str:
    """A URL without a server."""
    return f"nats://127.0.0.1:{free_port()}"


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def seeds_in(directory: Path) -> dict[str, bytes]:
    return {name: (directory / f"{name}.nk").read_bytes() for name in EVERY}


async def refusal(options: NatsOptions, user: str = VERIFY) -> str:
    """Why a client with these options is not let in; empty if it is."""
    connected = asyncio.Event()
    async with Bus.open(options, name="test", user=user) as bus:
        bus.on_connect(connected.set)
        await until(lambda: connected.is_set() or bus.is_rejected, within_s=PATIENCE_S)
        return bus.outage_reason


def test_files_are_of_their_unix_user(home: Path) -> None:
    """Nobody else may read the directory or a file in it, also if the directory was open before."""
    directory = local_users.directory_of(4222)
    directory.mkdir(parents=True, mode=0o755)

    local_users.make(4222)

    assert home / "kvrouter" / "nats-4222" == directory
    assert 0o700 == stat.S_IMODE(directory.stat().st_mode)
    assert {0o600} == {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()}
    assert {*(f"{name}.nk" for name in EVERY), "server.conf"} == {file.name for file in directory.iterdir()}


@pytest.mark.usefixtures("home")
def test_again(free_port: Callable[[], int]) -> None:
    """A later server on the port has the same users; one on another port has others."""
    file = local_users.make(4222)
    before, content = seeds_in(file.parent), file.read_text()

    local_users.make(4222)
    other = local_users.make(4223)

    assert (before, content) == (seeds_in(file.parent), file.read_text())
    assert not {*before.values()} & {*seeds_in(other.parent).values()}


@pytest.mark.usefixtures("home")
def test_many_at_once() -> None:
    """Processes that make the users at the same time agree on them."""
    barrier = threading.Barrier(8)

    def make(_number: int) -> str:
        barrier.wait(PATIENCE_S)
        return local_users.make(4222).read_text()

    with ThreadPoolExecutor(8) as threads:
        made = set(threads.map(make, range(8)))

    file = local_users.directory_of(4222) / "server.conf"
    assert {file.read_text()} == made
    assert len(EVERY) + 1 == len([*file.parent.iterdir()])


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.usefixtures("home")
async def test_same_unix_user(url: str, name: str) -> None:
    """A process of the same Unix user is let in without any flag."""
    async with embedded_server(NatsOptions(), url):
        assert "" == await refusal(NatsOptions((url,)), name)
        assert "" == await refusal(NatsOptions((url.replace("127.0.0.1", "localhost"),)), name)


async def test_without_the_files(url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Unix user, or a version before, is not let in, and is told what to give; a seed lets it in."""
    seed = local_users.directory_of(port_of(url)) / "frontend.nk"
    async with embedded_server(NatsOptions(), url):
        monkeypatch.setenv("XDG_STATE_HOME", str(home.parent / "stranger"))
        reason = await refusal(NatsOptions((url,)))
        before = await refusal(NatsOptions((url,)), user="")
        with_seed = await refusal(NatsOptions((url,), nkey_file=seed), user="")

    missing = home.parent / "stranger" / "kvrouter" / f"nats-{port_of(url)}" / "frontend.nk"
    assert f"{missing}: No such file or directory" in reason
    assert "same Unix user" in reason
    assert "--nats-nkey" in reason
    assert "Authorization Violation" in before
    assert "" == with_seed


@pytest.mark.usefixtures("home")
async def test_open_server(url: str) -> None:
    """With --nats-open nobody needs a user, and none is made."""
    async with embedded_server(NatsOptions(is_open=True), url):
        assert "" == await refusal(NatsOptions((url,)), user="")
        assert "" == await refusal(NatsOptions((url,)))

    assert not local_users.directory_of(port_of(url)).exists()


@pytest.mark.usefixtures("home")
async def test_users_outlive_the_server(url: str) -> None:
    """A client of a server that ends is let in by the next one on the port."""
    connections = asyncio.Queue[None]()
    async with asyncio.timeout(PATIENCE_S):
        async with Bus.open(NatsOptions((url,)), name="test", user=AGENT) as bus:
            bus.on_connect(lambda: connections.put_nowait(None))
            for _ in range(2):
                async with embedded_server(NatsOptions(), url):
                    await connections.get()


@pytest.mark.usefixtures("home")
async def test_server_of_somebody_else(new_nats_server: Callable[..., NatsServer], tmp_path: Path) -> None:
    """Files of a former server on the port do not keep clients from one that lets everybody in.

    Neither one without users, nor one with users of which unknown clients are one.
    """
    plain = new_nats_server()
    config = tmp_path / "default.conf"
    config.write_text('authorization { users = [{ user: "any", password: "x" }] }\nno_auth_user: any\n')
    default = new_nats_server(config)
    for server in (plain, default):
        local_users.make(server.port)
        server.start()

        assert "" == await refusal(NatsOptions((server.url,)))


@pytest.mark.usefixtures("home")
async def test_other_server_gets_no_signature(
    new_nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    """A server with users of its own is not that of the files: the reason names them."""
    assert 0 == accounts.main([str(tmp_path / "users")])
    server = new_nats_server(tmp_path / "users" / "accounts.conf")
    server.start()
    directory = local_users.make(server.port).parent

    reason = await refusal(NatsOptions((server.url,)))

    assert f"{directory} has the users of another server" in reason


@pytest.mark.usefixtures("home")
async def test_own_credentials_win(url: str, tmp_path: Path) -> None:
    """Where flags or the URL say who a client is, it is nobody else."""
    password = tmp_path / "password"
    password.write_text("secret")
    assert 0 == accounts.main([str(tmp_path / "users")])
    address = url.removeprefix("nats://")
    async with embedded_server(NatsOptions(), url):
        for options in (
            NatsOptions((f"nats://somebody:secret@{address}",)),
            NatsOptions((url,), user="somebody", password_file=password),
            NatsOptions((url,), token_file=password),
            NatsOptions((url,), nkey_file=tmp_path / "users" / "frontend.nk"),
        ):
            assert "see the --nats-… flags in --help" in await refusal(options)


async def test_server_found_of_another_unix_user(
    url: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who would start a server on a port, and may not use the one that is there, is told at once."""
    seed = local_users.directory_of(port_of(url)) / "frontend.nk"
    async with embedded_server(NatsOptions(), url):
        monkeypatch.setenv("XDG_STATE_HOME", str(home.parent / "stranger"))
        with pytest.raises(ConfigError, match=r"same Unix user.*--nats-nkey.*another port"):
            async with embedded_server(NatsOptions(), url):
                pass
        async with embedded_server(NatsOptions(nkey_file=seed), url) as found:
            assert url == found


@pytest.mark.parametrize("is_file", [True, False])
async def test_state_directory_that_cannot_be(url: str, tmp_path: Path, is_file: bool) -> None:
    """If the users cannot be kept, the error names the directory and both ways out."""
    with pytest.MonkeyPatch.context() as patch:
        (tmp_path / "file").write_text("")
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "file") if is_file else "relative")
        if not is_file:
            patch.setenv("HOME", str(tmp_path / "file"))
        with pytest.raises(ConfigError, match=f"{tmp_path}/file/.*XDG_STATE_HOME, or --nats-open"):
            async with embedded_server(NatsOptions(), url):
                pass


@pytest.mark.parametrize(
    ("host", "own_host", "is_here"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.8.8.8", "127.0.0.1", True),
        ("::1", "::1", True),
        ("10.0.0.5", "10.0.0.5", True),
        ("10.0.0.5", "10.0.0.6", False),
        ("fe80::1%eth0", "fe80::2%eth0", False),
        ("somewhere", "10.0.0.6", False),
    ],
)
def test_only_on_this_machine(host: str, own_host: str, is_here: bool) -> None:
    """The files are for a connection that does not leave the machine."""
    assert is_here == local_users.is_here(host, own_host)
