"""TLS, 1.2 at least and for HTTP/1.1 only: what a door shows, and whom a caller of workers trusts."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvrouter.errors import ConfigError

_HTTP = ["http/1.1"]
_OTHER_NAME = {62, 63, 64}
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and its siblings for e-mail and IP addresses."""
_EXPIRED = 10


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: a certificate, with those that lead to its authority, and its key."""

    cert: Path
    key: Path
    flags: str = "--tls"
    """What the flags that name the two begin with."""

    def load_into(self, context: ssl.SSLContext) -> None:
        """Show this certificate. Raises ConfigError."""
        _check(f"{self.flags}-cert", self.cert, b"CERTIFICATE-----", "certificate")
        _check(f"{self.flags}-key", self.key, b"PRIVATE KEY-----", "private key")
        try:
            context.load_cert_chain(self.cert, self.key, self._refuse_password)
        except (OSError, ssl.SSLError) as error:
            if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
                raise ConfigError(
                    f"{self.flags}-key {self.key}: not the key of the certificate in {self.cert}"
                ) from None
            raise ConfigError(
                f"{self.flags}-cert {self.cert} with {self.flags}-key {self.key}: {error}"
            ) from None

    def _refuse_password(self) -> str:
        """OpenSSL would ask for it on the terminal."""
        raise ConfigError(
            f"{self.flags}-key {self.key}: protected by a password; give a key without one, that only this "
            f"user can read: openssl pkey -in {self.key} -out NEW"
        )


def server_context(files: CertificateFiles) -> ssl.SSLContext:
    """For doors that show this certificate. Raises ConfigError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(_HTTP)
    files.load_into(context)
    return context


@lru_cache(maxsize=64)
def trusting(ca: Path | None, flag: str = "--worker-tls-ca") -> ssl.SSLContext:
    """For calls to whom the system's authorities, or those in `ca`, vouch for. Raises ConfigError.

    Shared by all callers: reading the system's authorities takes 50 ms.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_HTTP)
    if ca is not None:
        _check(flag, ca, b"CERTIFICATE-----", "certificate")
        try:
            context.load_verify_locations(ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{flag} {ca}: {error}") from None
    return context


def tls_trouble(error: BaseException | None) -> str:
    """What went wrong in a call to a worker, and what to do; empty if it has nothing to do with TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message.rstrip('.')}; {_remedy(error)}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection: {error.reason or error}; if it speaks plain HTTP, announce it as http://"
    return ""


def _remedy(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _OTHER_NAME:
        return "announce it with a name that its certificate has"
    if error.verify_code == _EXPIRED:
        return "renew it"
    return "give --worker-tls-ca FILE, the authority that signed it"


def _check(flag: str, path: Path, mark: bytes, what: str) -> None:
    """OpenSSL's own errors name no file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    if mark not in content:
        raise ConfigError(f"{flag} {path}: there is no {what} in PEM form in it")
