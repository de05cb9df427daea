"""How to reach NATS: servers, TLS and credentials, which are read from files."""

from __future__ import annotations

import base64
import contextlib
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

from kvrouter.errors import ConfigError
from kvrouter.settings.declare import Settings, setting, without_password
from kvrouter.tls import CertificateFiles

_JWT = re.compile(rb"BEGIN NATS USER JWT-+\s+(\S+)")
_SEED = re.compile(rb"BEGIN USER NKEY SEED-+\s+(\S+)")


class CredsFile:
    """A .creds file (a user's JWT and the seed that proves it), for the callbacks of nats-py.

    It is read again for every connection, so that it can be renewed while the process runs. If it is half
    written or missing at that moment, the content read before is used.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file is not a .creds file."""
        self._path = path
        self._jwt, self._seed = self._read()

    def sign(self, nonce: str) -> bytes:
        """The signed nonce, which proves the identity in the JWT. nats-py calls this before `jwt`."""
        import nkeys  # type: ignore[import-untyped]

        with contextlib.suppress(ConfigError):
            self._jwt, self._seed = self._read()
        signature: bytes = nkeys.from_seed(bytearray(self._seed)).sign(nonce.encode())
        return base64.b64encode(signature)

    def jwt(self) -> bytearray:
        return bytearray(self._jwt)

    def _read(self) -> tuple[bytes, bytes]:
        try:
            text = self._path.read_bytes()
        except OSError as error:
            raise ConfigError(f"--nats-creds {self._path}: {error.strerror}") from None
        jwt, seed = _JWT.search(text), _SEED.search(text)
        if jwt is None or seed is None or not _is_seed(seed[1]):
            lacks = "USER JWT" if jwt is None else "USER NKEY SEED"
            raise ConfigError(
                f"--nats-creds {self._path}: it has no {lacks}; give a file written by `nsc generate creds`"
            )
        return jwt[1], seed[1]


def check_seed_file(path: Path) -> None:
    """Raise ConfigError unless it holds an nkey seed."""
    try:
        text = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--nats-nkey {path}: {error.strerror}") from None
    if not _is_seed(text):
        raise ConfigError(f"--nats-nkey {path}: it has no nkey seed (one line that begins with SU)")


def _is_seed(text: bytes) -> bool:
    import nkeys

    try:
        nkeys.from_seed(bytearray(text))
    except Exception:  # nkeys raises many kinds
        return False
    return True


EMBEDDED = "embedded"


def _read_servers(text: str) -> tuple[str, ...]:
    return tuple(url.strip() for url in text.split(",") if url.strip())


@dataclass(frozen=True, slots=True)
class NatsOptions(Settings):
    """Servers and credentials. The URLs may contain user and password instead.

    Secrets are in files, so that the list of processes does not show them. A server with a private CA needs
    `tls_ca`; one that asks for the client's certificate needs certificate and key, too.
    """

    heading = "NATS"

    servers: tuple[str, ...] = setting(
        ("nats://127.0.0.1:4222",),
        f"NATS servers, separated by commas; {EMBEDDED}: start one on this machine unless one runs there",
        name="nats",
        metavar=f"URL[,URL…]|{EMBEDDED}",
        read=_read_servers,
        text=",".join,
        variable="NATS_URL",
        is_top=True,
    )
    user: str | None = setting(
        None, "user name; needs --nats-password-file", name="nats-user", metavar="NAME"
    )
    password_file: Path | None = setting(None, "the password of --nats-user", name="nats-password-file")
    token_file: Path | None = setting(None, "a token", name="nats-token-file")
    creds_file: Path | None = setting(None, "a .creds file (JWT and seed)", name="nats-creds")
    nkey_file: Path | None = setting(None, "an nkey seed file", name="nats-nkey")
    tls_ca: Path | None = setting(
        None, "the authority that signed the servers' certificates", name="nats-tls-ca"
    )
    tls_cert: Path | None = setting(None, "this client's certificate", name="nats-tls-cert")
    tls_key: Path | None = setting(None, "its key", name="nats-tls-key")
    is_open: bool = setting(
        False, f"{EMBEDDED}: without users: whoever reaches the port may publish everything", name="nats-open"
    )

    def checked(self) -> Self:
        """Raise ConfigError for wrong values before any part of the process starts."""
        if not self.is_embedded:
            self.connect_arguments()
        return self

    @property
    def is_embedded(self) -> bool:
        """Whether to start a server on this machine if none answers."""
        return self.servers == (EMBEDDED,)

    @property
    def has_credentials(self) -> bool:
        """Whether flags or URLs say who this client is: then no user of this machine's files is taken."""
        files = (self.password_file, self.token_file, self.creds_file, self.nkey_file, self.tls_cert)
        return any(files) or self.user is not None or any("@" in server for server in self.servers)

    def connect_arguments(self) -> dict[str, Any]:
        """The arguments of nats-py's `connect`. Raises ConfigError for files that cannot be read."""
        self._check()
        arguments: dict[str, Any] = {"servers": list(self.servers)}
        if self.user is not None:
            arguments["user"] = self.user
        if self.password_file is not None:
            arguments["password"] = _read_secret("--nats-password-file", self.password_file)
        if self.token_file is not None:
            arguments["token"] = _read_secret("--nats-token-file", self.token_file)
        if self.creds_file is not None:
            creds = CredsFile(_existing("--nats-creds", self.creds_file))
            arguments |= {"user_jwt_cb": creds.jwt, "signature_cb": creds.sign}
        if self.nkey_file is not None:
            check_seed_file(_existing("--nats-nkey", self.nkey_file))
            arguments["nkeys_seed"] = str(self.nkey_file)
        if self._wants_tls():
            arguments["tls"] = self._tls()
        return arguments

    def shown(self) -> str:
        """The servers without their passwords, for logs."""
        return ", ".join(without_password(server) for server in self.servers)

    def _check(self) -> None:
        if not self.servers:
            raise ConfigError("--nats is empty: give at least one server")
        for server in self.servers:
            _check_server(server)
        if (self.user is None) != (self.password_file is None):
            raise ConfigError("--nats-user and --nats-password-file belong together: give both")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--nats-tls-cert and --nats-tls-key belong together: give both")

    def _wants_tls(self) -> bool:
        named = self.tls_ca is not None or self.tls_cert is not None
        return named or any(server.startswith(("tls://", "wss://")) for server in self.servers)

    def _tls(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--nats-tls-ca {self.tls_ca}: {error}") from error
        if self.tls_cert is not None and self.tls_key is not None:
            CertificateFiles(self.tls_cert, self.tls_key, "--nats-tls").load_into(context)
        return context


def _check_server(server: str) -> None:
    scheme, _, rest = server.rpartition("://")
    flag = f"--nats {without_password(server)!r}"
    try:
        address = urlsplit(f"nats://{rest}")  # without a scheme no host is found
    except ValueError:  # brackets without an IPv6 address
        raise ConfigError(f"{flag}: use nats://HOST:PORT or {EMBEDDED}") from None
    if not _is_port(address):
        raise ConfigError(f"{flag}: give a port from 1 to 65535")
    if scheme not in {"nats", "tls", "ws", "wss"} or not address.hostname:
        raise ConfigError(f"{flag}: use nats://HOST:PORT or {EMBEDDED}")


def _is_port(address: SplitResult) -> bool:
    try:
        return address.port is None or address.port > 0
    except ValueError:  # not a number, or above 65535
        return False


def _existing(flag: str, path: Path) -> Path:
    if not path.is_file():
        raise ConfigError(f"{flag} {path}: no such file")
    return path


def _read_secret(flag: str, path: Path) -> str:
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error
    if not secret:
        raise ConfigError(f"{flag} {path}: the file is empty")
    return secret
