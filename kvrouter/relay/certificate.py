"""The certificate that a replica's doors show, renewed while they are open."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path
from typing import TypeAlias

import structlog

from kvrouter.errors import ConfigError
from kvrouter.tls import CertificateFiles, server_context

log = structlog.get_logger()

LOOK_EVERY_S = 10.0
"""How long a renewed certificate waits at most. The look is two calls of stat."""

_Marks: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class DoorCertificate:
    """Each handshake shows the newest certificate that could be read; connections that are there go on.

    A context is never changed: beside a new certificate of another kind (ECDSA for RSA) OpenSSL would go on
    to show the old one, and a key that does not fit would leave it with half of a pair.
    """

    def __init__(self, files: CertificateFiles) -> None:
        """Raises ConfigError."""
        self._files = files
        self._marks = self._look_at_files()
        self._trouble = ""
        self.context = self._newest = server_context(files)
        """The one that servers are opened with; it passes each handshake on to the newest."""
        self.context.sni_callback = self._show_newest

    async def run(self) -> None:
        """Renew it whenever its files have changed."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.renew()

    def renew(self) -> None:
        """Take what is in the files, if it is new and whole; otherwise the former one stays."""
        marks = self._look_at_files()
        if marks == self._marks:
            return
        try:
            self._newest = server_context(self._files)
        except ConfigError as error:
            if str(error) != self._trouble:
                effect = "the former certificate stays in use; looked at again until it can be used"
                log.warning("frontend.certificate_not_renewed", error=str(error), effect=effect)
            self._trouble = str(error)
            return
        self._marks, self._trouble = marks, ""
        log.info("frontend.certificate_renewed", cert=str(self._files.cert))

    def _show_newest(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        handshake.context = self._newest

    def _look_at_files(self) -> _Marks:
        return _marks(self._files.cert), _marks(self._files.key)


def _marks(path: Path) -> tuple[int, int, int] | None:
    """What changes with a file's content, or with the file that a link leads to; None: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
