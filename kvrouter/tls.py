"""TLS for listeners and for calls to workers: version 1.2 or later, HTTP/1.1 only."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self, TypeAlias

import structlog

from kvrouter.errors import ConfigError

# ALPN: a client or worker that also offers HTTP/2 must not choose it.
_HTTP = ["http/1.1"]
# OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_EMAIL_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH.
_OTHER_NAME = {62, 63, 64}
_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED

# A renewed certificate is in use after this long at most. Each look costs two calls of stat.
LOOK_EVERY_S = 10.0

Marks: TypeAlias = tuple[tuple[int, int, int] | None, ...]

log = structlog.get_logger()


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
    ca: Path | None,
    flag: str = "--worker-tls-ca",
    own: CertificateFiles | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ssl.SSLContext:
    """A context for calls to servers that the system's authorities, or those in `ca`, have signed.

    `own`: shown to servers that ask for one. Files that change are read again. Raises ConfigError. All
    callers share it: reading the system's authorities takes 50 ms.
    """
    files = ([ca] if ca is not None else []) + ([own.cert, own.key] if own is not None else [])
    read = partial(_trusting, ca, flag, own)
    return _Renewed(read, files, clock) if files else read()


def _trusting(ca: Path | None, flag: str, own: CertificateFiles | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_HTTP)
    if ca is not None:
        _trust(context, ca, flag)
    if own is not None:
        own.load_into(context)
    return context


class _Renewed(ssl.SSLContext):
    """For calls to servers: each handshake uses what the files had when they could be read last.

    A renewal makes a new context, and passes handshakes on to it: OpenSSL forgets no authority, and keeps one
    certificate per kind of key.
    """

    def __new__(cls, *_given: object) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(
        self, read: Callable[[], ssl.SSLContext], files: Sequence[Path], clock: Callable[[], float]
    ) -> None:
        """`read()` makes a context of the files. Raises ConfigError."""
        self._read, self._files, self._clock = read, files, clock
        self._marks, self._looks_at, self._last_error = self._look(), clock() + LOOK_EVERY_S, ""
        self._newest = read()

    def wrap_bio(self, *given: Any, **named: Any) -> ssl.SSLObject:
        return self._now().wrap_bio(*given, **named)

    def wrap_socket(self, *given: Any, **named: Any) -> ssl.SSLSocket:
        return self._now().wrap_socket(*given, **named)

    def _now(self) -> ssl.SSLContext:
        if self._clock() < self._looks_at:
            return self._newest
        self._looks_at = self._clock() + LOOK_EVERY_S
        if (found := self._look()) == self._marks:
            return self._newest
        try:
            self._newest = self._read()
        except ConfigError as error:
            if str(error) != self._last_error:  # once per cause
                log.warning("worker_tls.not_renewed", error=str(error))
            self._last_error = str(error)
        else:
            self._marks, self._last_error = found, ""
            log.info("worker_tls.renewed", files=[str(file) for file in self._files])
        return self._newest

    def _look(self) -> Marks:
        return tuple(map(marks, self._files))


def marks(path: Path) -> tuple[int, int, int] | None:
    """What changes with a file's content or with the file that a link points to; None: no such file.

    Kubernetes and certbot replace certificates by changing a symbolic link, hence the inode.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


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
