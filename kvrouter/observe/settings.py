"""The settings that commands about replicas share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrouter.errors import ConfigError
from kvrouter.settings.declare import Settings, setting


def read_url(text: str) -> str:
    return (text if "://" in text else f"http://{text}").rstrip("/")


def replicas(help: str, default: tuple[str, ...] = (), *, is_positional: bool = False) -> Any:  # noqa: A002
    """The URLs of replicas: positional, or a flag that may be repeated."""
    return setting(
        default,
        help,
        metavar="REPLICA_URL …" if is_positional else "URL",
        read=read_url,
        is_repeated=True,
        is_positional=is_positional,
        is_top=True,
    )


def check_given_once(urls: Collection[str], remedy: str = "") -> None:
    """Raise ConfigError."""
    if len(set(urls)) < len(urls):
        raise ConfigError(f"a replica's URL is given twice{remedy}")


@dataclass(frozen=True, slots=True)
class ReplicaAccess(Settings):
    """How replicas are asked."""

    heading = "Replicas"

    admin_key_file: Path | None = setting(
        None,
        "operators' key: for replicas that are not on this machine's loopback, or at their clients' ports",
        is_top=True,
    )
    tls_ca: Path | None = setting(
        None, "trusted authorities for https://, added to the system's", is_top=True
    )
    tls_name: str | None = setting(
        None, "name in the certificates, if it differs from the URLs'", metavar="NAME"
    )
