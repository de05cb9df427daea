"""A certificate that is renewed while its listener is open."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvrouter.errors import ConfigError
from kvrouter.relay.certificate import ServerCertificate
from kvrouter.tls import CertificateFiles
from tests.certificates import Authority
from tests.frontend.clients import connected
from tests.frontend.fleet import BODY, FleetOf
from tests.frontend.workers import until


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Signs all certificates of a test."""
    return Authority(tmp_path)


class Server:
    """A server without a socket, and its clients."""

    def __init__(self, authority: Authority, files: CertificateFiles) -> None:
        self.certificate = ServerCertificate(files)
        self._authority = authority

    def presented(self, ciphers: str = "DEFAULT") -> set[str]:
        """The names in the certificate that the next client gets."""
        tls = self._authority.trusted()
        tls.check_hostname = False
        tls.maximum_version = ssl.TLSVersion.TLSv1_2
        tls.set_ciphers(ciphers)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = self.certificate.context.wrap_bio(to_server, to_client, server_side=True)
        client = tls.wrap_bio(to_client, to_server, server_hostname=None)
        for _ in range(6):
            for side in (client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        found: Any = client.getpeercert()
        return {name for _, name in found["subjectAltName"]}


@pytest.fixture
def logs() -> Iterator[list[structlog.typing.EventDict]]:
    """The log of the test."""
    with structlog.testing.capture_logs() as entries:
        yield entries


def test_renewed(authority: Authority) -> None:
    """After `renew` the next client gets the new certificate, not before."""
    server = Server(authority, authority.sign("a"))
    before = server.presented()
    authority.sign("b")
    unnoticed = server.presented()
    server.certificate.renew()

    assert ({"a"}, {"a"}, {"b"}) == (before, unnoticed, server.presented())


def test_link_changes(authority: Authority) -> None:
    """A mounted secret changes when its link points elsewhere, noticed even with equal file times."""
    links = CertificateFiles(authority.directory / "cert", authority.directory / "key")
    both = [authority.sign(name, stem=name) for name in ("old", "new")]
    for files in both:
        for path, link in ((files.cert, links.cert), (files.key, links.key)):
            os.utime(path, (1, 1))
            link.unlink(missing_ok=True)
            link.symlink_to(path)
        if files is both[0]:
            server = Server(authority, links)
    server.certificate.renew()

    assert {"new"} == server.presented()


def test_other_kind(authority: Authority) -> None:
    """After an ECDSA certificate has replaced an RSA one, no client gets the RSA one."""
    server = Server(authority, authority.sign("rsa", rsa=True))
    authority.sign("ecdsa")
    server.certificate.renew()

    assert {"ecdsa"} == server.presented("ECDHE+AESGCM")
    with pytest.raises(ssl.SSLError):
        server.presented("ECDHE-RSA-AES128-GCM-SHA256")


def test_broken_renewal(authority: Authority, logs: list[structlog.typing.EventDict]) -> None:
    """An unusable one is logged once, and the previous one stays, until the files are complete."""
    files = authority.sign("a")
    server = Server(authority, files)
    key = authority.sign("b").key.read_bytes()
    files.key.write_bytes(b"")
    for _ in range(3):
        server.certificate.renew()
    while_broken = server.presented()
    files.key.write_bytes(key)
    for _ in range(3):
        server.certificate.renew()

    assert ({"a"}, {"b"}) == (while_broken, server.presented())
    assert ["frontend.certificate_not_renewed", "frontend.certificate_renewed"] == [
        each["event"] for each in logs
    ]
    assert f"--tls-key {files.key}: the file has no private key" in logs[0]["error"]


def test_files_vanish(authority: Authority, logs: list[structlog.typing.EventDict]) -> None:
    """If the files vanish, the certificate stays in use."""
    files = authority.sign("a")
    server = Server(authority, files)
    files.cert.unlink()
    server.certificate.renew()

    assert {"a"} == server.presented()
    assert [f"--tls-cert {files.cert}: No such file or directory"] == [each["error"] for each in logs]


def test_unusable_at_first(authority: Authority) -> None:
    """A listener is not opened without a usable certificate."""
    files = authority.sign("a")
    files.cert.unlink()

    with pytest.raises(ConfigError, match="No such file"):
        ServerCertificate(files)


async def test_renewed_while_serving(
    fleet_of: FleetOf, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running frontend uses a renewed certificate, even of another authority; open connections stay."""
    monkeypatch.setattr("kvrouter.relay.certificate.LOOK_EVERY_S", 0.01)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    files, successor = authority.sign(), Authority(elsewhere)
    async with (
        fleet_of(f"--tls-cert={files.cert}", f"--tls-key={files.key}") as fleet,
        connected(fleet.url, authority.trusted()) as early,
    ):
        first = await early.ask(BODY)
        renewed = successor.sign()
        for path, new in ((files.key, renewed.key), (files.cert, renewed.cert)):
            path.write_bytes(new.read_bytes())
        await until(lambda: fleet.logged("frontend.certificate_renewed"), "the certificate is renewed")
        async with connected(fleet.url, successor.trusted()) as late:
            answers = [first, await early.ask(BODY), await late.ask(BODY)]

    assert [200] * 3 == [each.status for each in answers]
