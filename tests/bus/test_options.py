"""NATS credentials: real servers that ask for them, and the errors for wrong ones."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvrouter.bus import Bus, NatsOptions
from kvrouter.bus.embedded import server_binary
from kvrouter.errors import ConfigError

# A self-signed certificate for 127.0.0.1 and its key, for tests only.
TLS = Path(__file__).parents[1] / "data" / "tls"


@pytest.fixture
def start(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Callable[..., str]]:
    """A function that starts a nats-server with these arguments and returns its address."""
    running: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str) -> str:
        port = free_port()
        command = [str(server_binary()), "--addr", "127.0.0.1", "--port", str(port), *arguments]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return f"127.0.0.1:{port}"

    yield run
    for process in running:
        process.kill()
        process.wait()


def write(path: Path, text: str) -> Path:
    """A file with this text."""
    path.write_text(text)
    return path


async def connects(options: NatsOptions) -> bool:
    """Whether a bus with these options connects, within the test's time."""
    connected = asyncio.Event()
    async with Bus.open(options, name="test") as bus:
        bus.on_connect(connected.set)
        async with asyncio.timeout(20):
            await connected.wait()
    return True


async def test_user_and_password(start: Callable[..., str], tmp_path: Path) -> None:
    """The password comes from a file, or is in the URL."""
    address = start("--user", "router", "--pass", "secret")
    password = write(tmp_path / "password", "secret\n")

    assert await connects(NatsOptions((f"nats://{address}",), user="router", password_file=password))
    assert await connects(NatsOptions((f"nats://router:secret@{address}",)))


async def test_token(start: Callable[..., str], tmp_path: Path) -> None:
    """A token comes from a file."""
    address = start("--auth", "t0ken")

    assert await connects(NatsOptions((f"nats://{address}",), token_file=write(tmp_path / "token", "t0ken")))


async def test_nkey(start: Callable[..., str], tmp_path: Path) -> None:
    """An nkey seed proves the identity."""
    import nkeys  # type: ignore[import-untyped]

    raw = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER)
    public = nkeys.from_seed(bytearray(raw)).public_key.decode()
    config = write(tmp_path / "nats.conf", f"authorization: {{ users: [ {{ nkey: {public} }} ] }}")
    address = start("--config", str(config))
    seed = write(tmp_path / "seed.nk", raw.decode())

    assert await connects(NatsOptions((f"nats://{address}",), nkey_file=seed))


async def test_tls(start: Callable[..., str]) -> None:
    """A server with a private authority that asks for the client's certificate."""
    cert, key = TLS / "cert.pem", TLS / "key.pem"
    address = start("--tls", f"--tlscert={cert}", f"--tlskey={key}", "--tlsverify", f"--tlscacert={cert}")

    options = NatsOptions((f"tls://{address}",), tls_ca=cert, tls_cert=cert, tls_key=key)
    assert await connects(options)


async def test_rejected_password(start: Callable[..., str], tmp_path: Path) -> None:
    """After a wrong password the bus retries; the log has the remedy, not the password."""
    address = start("--user", "router", "--pass", "secret")
    password = write(tmp_path / "password", "wrong")
    rejected = asyncio.Event()

    def watch(_logger: object, _name: str, facts: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if "credentials" in str(facts.get("remedy")):
            rejected.set()
        assert "wrong" not in str(facts)
        return facts

    with structlog.testing.capture_logs(processors=[watch]):
        options = NatsOptions((f"nats://{address}",), user="router", password_file=password)
        async with Bus.open(options, name="test") as bus, asyncio.timeout(20):
            await rejected.wait()
            assert not bus.connected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (NatsOptions(("http://x:4222",)), "nats://HOST:PORT"),
        (NatsOptions(("x",)), "nats://HOST:PORT"),
        (NatsOptions(("nats://:4222",)), "nats://HOST:PORT"),
        (NatsOptions(("nats://[::1",)), "nats://HOST:PORT"),
        (NatsOptions(("nats://x:99999",)), "1 to 65535"),
        (NatsOptions(("nats://x:abc",)), "1 to 65535"),
        (NatsOptions(("127.0.0.1:99999",)), "1 to 65535"),
        (NatsOptions(("nats://x:0",)), "1 to 65535"),
        (NatsOptions(()), "at least one"),
        (NatsOptions(user="a"), "belong together"),
        (NatsOptions(tls_cert=Path("a")), "belong together"),
        (NatsOptions(user="a", password_file=Path("/nowhere")), "--nats-password-file /nowhere"),
        (NatsOptions(token_file=Path("/dev/null")), "empty"),
        (NatsOptions(creds_file=Path("/nowhere")), "no such file"),
        (NatsOptions(nkey_file=Path("/nowhere")), "no such file"),
        (NatsOptions(tls_ca=Path("/nowhere")), "--nats-tls-ca"),
    ],
)
def test_errors_name_the_flag(options: NatsOptions, message: str) -> None:
    """Each mistake is reported with its flag."""
    with pytest.raises(ConfigError, match=message):
        options.connect_arguments()


def test_passwords_are_not_shown() -> None:
    """A logged URL has no password."""
    options = NatsOptions(("nats://router:secret@10.0.0.1:4222", "nats://10.0.0.2:4222"))

    assert "nats://10.0.0.1:4222, nats://10.0.0.2:4222" == options.shown()
