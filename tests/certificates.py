"""Certificates of authorities that a test makes for itself."""

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
    """An authority that nobody trusts who is not told to, and what it signs; files go to `directory`."""

    directory: Path
    ca: trustme.CA = field(default_factory=trustme.CA)

    @property
    def file(self) -> Path:
        """Its own certificate."""
        path = self.directory / "ca.pem"
        self.ca.cert_pem.write_to_path(str(path))
        return path

    def sign(
        self, *names: str, stem: str = "door", is_expired: bool = False, rsa: bool = False
    ) -> CertificateFiles:
        """A certificate and its key, in files; those of the same stem are replaced."""
        until = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC) if is_expired else None
        kind = trustme.KeyType.RSA if rsa else trustme.KeyType.ECDSA
        leaf = self.ca.issue_cert(*(names or NAMES), not_after=until, key_type=kind)
        cert, key = self.directory / f"{stem}.pem", self.directory / f"{stem}.key"
        cert.unlink(missing_ok=True)
        cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        key.write_bytes(leaf.private_key_pem.bytes())
        return CertificateFiles(cert, key)

    def door(self, *names: str, is_expired: bool = False) -> ssl.SSLContext:
        """For a server of the test."""
        return server_context(self.sign(*names, stem="server", is_expired=is_expired))

    def trusted(self) -> ssl.SSLContext:
        """For a client that trusts this authority and no other."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.ca.configure_trust(context)
        return context
