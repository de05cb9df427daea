"""The certificate of a replica's listeners, renewed while they are open."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import structlog

from kvrouter.errors import ConfigError
from kvrouter.tls import LOOK_EVERY_S, CertificateFiles, Marks, marks, server_context

log = structlog.get_logger()


class ServerCertificate:
    """Each handshake presents the newest certificate that could be read; open connections continue.

    A renewal makes a new SSLContext and never changes the old one. OpenSSL keeps one certificate per kind of
    key, so next to a new ECDSA certificate it would still present the old RSA one. And a key that does not
    fit would leave the context with half of a pair.
    """

    def __init__(self, files: CertificateFiles, client_ca: Path | None = None) -> None:
        """`client_ca`: clients need a certificate that it has signed. Raises ConfigError."""
        self._files = files
        self._client_ca = client_ca
        self._marks = self._look_at_files()
        self._last_error = ""
        # Servers are opened with these two, which pass each handshake on to the newest context. Whether a
        # certificate is asked for is decided here, by which ones it is checked by the newest.
        self._newest = server_context(files, client_ca)
        self.context, self.for_clients = server_context(files), server_context(files, client_ca)
        self.context.sni_callback = self.for_clients.sni_callback = self._show_newest
        if client_ca is not None:
            self.for_clients.verify_mode = ssl.CERT_REQUIRED

    async def run(self) -> None:
        """Renew the certificate whenever its files have changed."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.renew()

    def renew(self, files: CertificateFiles | None = None) -> bool:
        """Read the files, or from now on these, if they have changed; returns whether it is another one.

        If they cannot be used, the previous certificate stays.
        """
        if files is not None and files != self._files:
            self._files, self._marks = files, ()
        found = self._look_at_files()
        if found == self._marks:
            return False
        try:
            self._newest = server_context(self._files, self._client_ca)
        except ConfigError as error:
            if str(error) != self._last_error:  # once per cause, not every 10 s
                effect = (
                    "the previous certificate stays in use; the files are read again until they can be used"
                )
                log.warning("frontend.certificate_not_renewed", error=str(error), effect=effect)
            self._last_error = str(error)
            return False
        self._marks, self._last_error = found, ""
        log.info("frontend.certificate_renewed", cert=str(self._files.cert))
        return True

    def _show_newest(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        handshake.context = self._newest

    def _look_at_files(self) -> Marks:
        files = (self._files.cert, self._files.key, *filter(None, [self._client_ca]))
        return tuple(map(marks, files))
