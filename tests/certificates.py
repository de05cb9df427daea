"""Certificates of authorities that a test makes."""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import trustme

from kvrouter.tls import CertificateFiles, server_context

NAMES = ("localhost", "127.0.0.1")


@dataclass
class Authority:
    """An authority that no system trusts, and the certificates it signs, as files in `directory`."""

    directory: Path
    ca: trustme.CA = field(default_factory=trustme.CA)

    @property
    def file(self) -> Path:
        """The file with the authority's certificate."""
        path = self.directory / "ca.pem"
        self.ca.cert_pem.write_to_path(str(path))
        return path

    def sign(
        self, *names: str, stem: str = "listener", is_expired: bool = False, rsa: bool = False
    ) -> CertificateFiles:
        """A certificate and its key, in files; existing files of the same stem are replaced."""
        until = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC) if is_expired else None
        kind = trustme.KeyType.RSA if rsa else trustme.KeyType.ECDSA
        leaf = self.ca.issue_cert(*(names or NAMES), not_after=until, key_type=kind)
        cert, key = self.directory / f"{stem}.pem", self.directory / f"{stem}.key"
        cert.unlink(missing_ok=True)
        cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        key.write_bytes(leaf.private_key_pem.bytes())
        return CertificateFiles(cert, key)

    def server(self, *names: str, is_expired: bool = False) -> ssl.SSLContext:
        """A context for a server of the test."""
        return server_context(self.sign(*names, stem="server", is_expired=is_expired))

    def trusted(self) -> ssl.SSLContext:
        """A context for a client that trusts only this authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.ca.configure_trust(context)
        return context
