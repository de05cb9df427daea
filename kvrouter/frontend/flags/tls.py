"""The flags of TLS: the certificate for clients, and the authorities of workers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from kvrouter.errors import ConfigError
from kvrouter.tls import CertificateFiles, server_context, trusting


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Files that have been read once, so that errors are reported at the start."""

    files: CertificateFiles | None = None
    """None: plain HTTP."""
    worker_ca: Path | None = None
    """Trusted in addition to the system's authorities."""


def add_tls_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="serve HTTPS with this certificate: PEM, followed by the intermediate certificates",
    )
    add("--tls-key", type=Path, metavar="FILE", help="key of --tls-cert: PEM, without a password")
    add(
        "--worker-tls-ca",
        type=Path,
        metavar="FILE",
        help="authorities of the workers' certificates (https:// URLs), in addition to the system's",
    )


def tls_options(flags: argparse.Namespace) -> TlsOptions:
    """Raises ConfigError for files that cannot be used."""
    if (flags.tls_cert is None) != (flags.tls_key is None):
        given, missing = ("cert", "key") if flags.tls_key is None else ("key", "cert")
        raise ConfigError(f"--tls-{given} without --tls-{missing}: give both, or none for plain HTTP")
    files = CertificateFiles(flags.tls_cert, flags.tls_key) if flags.tls_cert is not None else None
    # Loaded once here: a broken file ends the start, not the first handshake.
    if files is not None:
        server_context(files)
    if flags.worker_tls_ca is not None:
        trusting(flags.worker_tls_ca)
    return TlsOptions(files, flags.worker_tls_ca)
