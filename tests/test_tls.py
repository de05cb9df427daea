"""What certificate files must contain, with errors that name the file and the remedy; TLS versions."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from kvrouter.bus import NatsOptions
from kvrouter.errors import ConfigError
from kvrouter.tls import LOOK_EVERY_S, CertificateFiles, server_context, tls_trouble, trusting
from tests.certificates import Authority

Spoil = Callable[[Authority, CertificateFiles], CertificateFiles]


def encrypted(_authority: Authority, files: CertificateFiles) -> CertificateFiles:
    """A key with a password."""
    key = load_pem_private_key(files.key.read_bytes(), None)
    form = (Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    files.key.write_bytes(key.private_bytes(*form))
    return files


def other_key(authority: Authority, files: CertificateFiles) -> CertificateFiles:
    """The key of another certificate."""
    return CertificateFiles(files.cert, authority.sign(stem="other").key)


def no_certificate(_authority: Authority, files: CertificateFiles) -> CertificateFiles:
    """The two files, exchanged."""
    return CertificateFiles(files.key, files.cert)


def broken(_authority: Authority, files: CertificateFiles) -> CertificateFiles:
    """A certificate with its middle cut out."""
    text = files.cert.read_text()
    files.cert.write_text(text[:200] + text[300:])
    return files


def missing(_authority: Authority, files: CertificateFiles) -> CertificateFiles:
    """A key file that does not exist."""
    return CertificateFiles(files.cert, Path("/nowhere/key.pem"))


UNUSABLE = [
    (encrypted, r"--tls-key .*listener\.key: protected by a password; .* openssl pkey"),
    (other_key, r"--tls-key .*other\.key: not the key of the certificate in .*listener\.pem"),
    (no_certificate, r"--tls-cert .*listener\.key: the file has no certificate in PEM form"),
    (broken, r"--tls-cert .*listener\.pem with --tls-key"),
    (missing, r"--tls-key /nowhere/key\.pem: No such file"),
]


@pytest.mark.parametrize(("spoil", "message"), UNUSABLE)
def test_unusable(tmp_path: Path, spoil: Spoil, message: str) -> None:
    """The error names flag and file, and no password prompt appears."""
    authority = Authority(tmp_path)
    files = spoil(authority, authority.sign())

    with pytest.raises(ConfigError, match=message):
        server_context(files)


def test_nats_certificate(tmp_path: Path) -> None:
    """The client certificate for NATS is checked in the same way."""
    files = encrypted(Authority(tmp_path), Authority(tmp_path).sign())

    with pytest.raises(ConfigError, match=r"--nats-tls-key .* protected by a password"):
        NatsOptions(tls_cert=files.cert, tls_key=files.key).connect_arguments()


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_unusable_authority(tmp_path: Path, content: str | None) -> None:
    """A file of authorities that does not exist, or has no certificate, is rejected."""
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)

    with pytest.raises(ConfigError, match=f"--worker-tls-ca {path}: "):
        trusting(path)


def test_minimum_version(tmp_path: Path) -> None:
    """Listeners and callers use TLS 1.2 or later; callers check certificate and name."""
    listening, caller = server_context(Authority(tmp_path).sign()), trusting(None)

    assert [ssl.TLSVersion.TLSv1_2] * 2 == [listening.minimum_version, caller.minimum_version]
    assert (ssl.CERT_REQUIRED, True) == (caller.verify_mode, caller.check_hostname)


def test_authorities_are_added(tmp_path: Path) -> None:
    """The authorities of the file are added to the system's, and the context is made once."""
    path = Authority(tmp_path).file
    system, more = trusting(None), trusting(path)

    used = more.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="localhost").context
    assert system.cert_store_stats()["x509_ca"] + 1 == used.cert_store_stats()["x509_ca"]
    assert trusting(path) is more


def test_other_errors() -> None:
    """Errors without TLS have no TLS text."""
    assert ["", ""] == [tls_trouble(ConnectionRefusedError(111, "refused")), tls_trouble(None)]


def shake(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """A handshake without sockets. Raises SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    calling = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    asked = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (calling, asked, calling, asked):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    assert calling.version()
    calling.write(b"x")
    assert b"x" == asked.read()


def test_files_for_engines_change(tmp_path: Path) -> None:
    """New authorities and certificates count from the next look on; unusable files change nothing."""
    authorities = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        authorities.append(Authority(tmp_path / name))
    servers = [server_context(one.sign(stem="server"), one.file) for one in authorities]
    for server in servers:
        server.verify_mode = ssl.CERT_REQUIRED
    now, ca, own = [0.0], tmp_path / "ca.pem", CertificateFiles(tmp_path / "own.pem", tmp_path / "own.key")

    def write(number: int) -> None:
        signed = authorities[number].sign(stem="own", rsa=number == 1)
        for new, old in ((authorities[number].file, ca), (signed.cert, own.cert), (signed.key, own.key)):
            new.replace(old)

    write(0)
    context = trusting(ca, own=own, clock=lambda: now[0])
    shake(context, servers[0])

    write(1)
    shake(context, servers[0])
    now[0] += LOOK_EVERY_S
    shake(context, servers[1])
    with pytest.raises(ssl.SSLError):
        shake(context, servers[0])

    own.key.write_text("nothing")
    now[0] += LOOK_EVERY_S
    shake(context, servers[1])
    write(0)
    now[0] += LOOK_EVERY_S
    shake(context, servers[0])
