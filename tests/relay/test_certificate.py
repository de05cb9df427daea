"""A certificate that is renewed while its door is open."""

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
    """Signs all of them."""
    return Authority(tmp_path)


class Door:
    """A door without a socket, and its clients."""

    def __init__(self, authority: Authority, files: CertificateFiles) -> None:
        self.certificate = ServerCertificate(files)
        self._authority = authority

    def shown(self, ciphers: str = "DEFAULT") -> set[str]:
        """The names in the certificate that the next client is shown; it asks for `a`, if for anything."""
        tls = self._authority.trusted()
        tls.check_hostname = False
        tls.maximum_version = ssl.TLSVersion.TLSv1_2
        tls.set_ciphers(ciphers)
        to_door, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        door = self.certificate.context.wrap_bio(to_door, to_client, server_side=True)
        client = tls.wrap_bio(to_client, to_door, server_hostname=None)
        for _ in range(6):
            for side in (client, door):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        found: Any = client.getpeercert()
        return {name for _, name in found["subjectAltName"]}


@pytest.fixture
def logs() -> Iterator[list[structlog.typing.EventDict]]:
    """What is said meanwhile."""
    with structlog.testing.capture_logs() as said:
        yield said


def test_renewed(authority: Authority) -> None:
    """After a look at the files the next client is shown the new certificate."""
    door = Door(authority, authority.sign("a"))
    before = door.shown()
    authority.sign("b")
    unlooked = door.shown()
    door.certificate.renew()

    assert ({"a"}, {"a"}, {"b"}) == (before, unlooked, door.shown())


def test_link_is_turned(authority: Authority) -> None:
    """A mounted secret changes by a link that leads elsewhere: seen, too, whatever the times of the files."""
    links = CertificateFiles(authority.directory / "cert", authority.directory / "key")
    both = [authority.sign(name, stem=name) for name in ("old", "new")]
    for files in both:
        for path, link in ((files.cert, links.cert), (files.key, links.key)):
            os.utime(path, (1, 1))
            link.unlink(missing_ok=True)
            link.symlink_to(path)
        if files is both[0]:
            door = Door(authority, links)
    door.certificate.renew()

    assert {"new"} == door.shown()


def test_other_kind(authority: Authority) -> None:
    """After an ECDSA certificate in place of an RSA one nobody is shown the RSA one, whatever it prefers."""
    door = Door(authority, authority.sign("rsa", rsa=True))
    authority.sign("ecdsa")
    door.certificate.renew()

    assert {"ecdsa"} == door.shown("ECDHE+AESGCM")
    with pytest.raises(ssl.SSLError):
        door.shown("ECDHE-RSA-AES128-GCM-SHA256")


def test_broken_renewal(authority: Authority, logs: list[structlog.typing.EventDict]) -> None:
    """One that cannot be used is said once, the former stays; it is taken as soon as it is whole."""
    files = authority.sign("a")
    door = Door(authority, files)
    key = authority.sign("b").key.read_bytes()
    files.key.write_bytes(b"")
    for _ in range(3):
        door.certificate.renew()
    while_broken = door.shown()
    files.key.write_bytes(key)
    for _ in range(3):
        door.certificate.renew()

    assert ({"a"}, {"b"}) == (while_broken, door.shown())
    assert ["frontend.certificate_not_renewed", "frontend.certificate_renewed"] == [
        each["event"] for each in logs
    ]
    assert f"--tls-key {files.key}: the file has no private key" in logs[0]["error"]


def test_files_vanish(authority: Authority, logs: list[structlog.typing.EventDict]) -> None:
    """Without its files a door goes on with what it has."""
    files = authority.sign("a")
    door = Door(authority, files)
    files.cert.unlink()
    door.certificate.renew()

    assert {"a"} == door.shown()
    assert [f"--tls-cert {files.cert}: No such file or directory"] == [each["error"] for each in logs]


def test_unusable_at_first(authority: Authority) -> None:
    """A door is not opened without a certificate."""
    files = authority.sign("a")
    files.cert.unlink()

    with pytest.raises(ConfigError, match="No such file"):
        ServerCertificate(files)


async def test_renewed_while_serving(
    fleet_of: FleetOf, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running frontend takes a renewed certificate, of another authority even; who is connected stays."""
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
        await until(lambda: fleet.logged("frontend.certificate_renewed"), "it is renewed")
        async with connected(fleet.url, successor.trusted()) as late:
            answers = [first, await early.ask(BODY), await late.ask(BODY)]

    assert [200] * 3 == [each.status for each in answers]
