"""The settings of `kvrouter nats`."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouter.bus.embedded import DEFAULT_URL
from kvrouter.settings.declare import Command, Settings, setting


def _read_url(text: str) -> str:
    if not text.startswith("nats://"):
        raise ValueError("must be nats://HOST:PORT")
    return text


@dataclass(frozen=True, slots=True)
class EmbeddedOptions(Settings):
    url: str = setting(
        DEFAULT_URL,
        "where the server listens",
        metavar="URL",
        read=_read_url,
        is_top=True,
        is_positional=True,
    )
    is_open: bool = setting(
        False, "without users: whoever reaches the port may publish everything", name="nats-open", is_top=True
    )


COMMAND = Command(
    "nats",
    EmbeddedOptions,
    "The embedded NATS server on this machine, until stopped. Processes of the same Unix user on this\n"
    "machine find its users by themselves.",
)
