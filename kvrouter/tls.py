"""TLS for listeners and for calls to workers: version 1.2 or later, HTTP/1.1 only."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvrouter.errors import ConfigError

# ALPN: a client or worker that also offers HTTP/2 must not choose it.
_HTTP = ["http/1.1"]
# OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_EMAIL_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH.
_OTHER_NAME = {62, 63, 64}
_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: a certificate with its chain, and its key. `flags` begins the flags that name them."""

    cert: Path
    key: Path
    flags: str = "--tls"

    def load_into(self, context: ssl.SSLContext) -> None:
        """Use this certificate in `context`. Raises ConfigError."""
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
        """Raise ConfigError: without a password callback OpenSSL would ask on the terminal."""
        raise ConfigError(
            f"{self.flags}-key {self.key}: protected by a password; use one without, that only this user can "
            f"read: openssl pkey -in {self.key} -out NEW"
        )


def own_certificate(cert: Path | None, key: Path | None, flags: str) -> CertificateFiles | None:
    """Of two flags that are given both or not at all. Raises ConfigError."""
    if cert is not None and key is not None:
        return CertificateFiles(cert, key, flags)
    if cert is not None or key is not None:
        given, missing = ("cert", "key") if key is None else ("key", "cert")
        raise ConfigError(f"{flags}-{given} without {flags}-{missing}: give both, or none")
    return None


def server_context(files: CertificateFiles, client_ca: Path | None = None) -> ssl.SSLContext:
    """A context for listeners with this certificate. `client_ca`: who signs clients'. Raises ConfigError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client could otherwise make the server compute handshake after handshake on one connection (TLS 1.2).
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(_HTTP)
    files.load_into(context)
    if client_ca is not None:
        _trust(context, client_ca, "--tls-client-ca")
    return context


@lru_cache(maxsize=64)
def trusting(
    ca: Path | None, flag: str = "--worker-tls-ca", own: CertificateFiles | None = None
) -> ssl.SSLContext:
    """A context for calls to servers that the system's authorities, or those in `ca`, have signed.

    `own`: shown to servers that ask for one. Raises ConfigError. All callers share it: reading the system's
    authorities takes 50 ms.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_HTTP)
    if ca is not None:
        _trust(context, ca, flag)
    if own is not None:
        own.load_into(context)
    return context


def _trust(context: ssl.SSLContext, ca: Path, flag: str) -> None:
    _check(flag, ca, b"CERTIFICATE-----", "certificate")
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{flag} {ca}: {error}") from None


def tls_trouble(error: BaseException | None) -> str:
    """What went wrong with TLS in a call to a worker, and what to do; empty for other errors."""
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
    """Check that the file has a PEM part of this kind. Raises ConfigError: OpenSSL's errors name no file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    if mark not in content:
        raise ConfigError(f"{flag} {path}: the file has no {what} in PEM form")
