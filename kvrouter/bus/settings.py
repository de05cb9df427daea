"""The settings of `kvrouter nats`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from kvrouter.bus.embedded import DEFAULT_URL
from kvrouter.errors import ConfigError
from kvrouter.settings.declare import Command, Settings, setting


def _read_url(text: str) -> str:
    if not text.startswith("nats://"):
        raise ValueError("must be nats://HOST:PORT")
    return text


@dataclass(frozen=True, slots=True)
class EmbeddedOptions(Settings):
    url: str = setting(
        DEFAULT_URL,
        "where the server listens, also as --nats URL",
        metavar="URL",
        read=_read_url,
        is_top=True,
        is_positional=True,
        old=("--nats",),
    )
    nats_port: int | None = setting(
        None, "port on 127.0.0.1, also as --port", least=1, most=65535, old=("--port",), is_top=True
    )
    is_open: bool = setting(
        False, "without users: whoever reaches the port may publish everything", name="nats-open", is_top=True
    )

    def checked(self) -> Self:
        url = f"nats://127.0.0.1:{self.nats_port}" if self.nats_port else self.url
        if self.url not in {DEFAULT_URL, url}:
            raise ConfigError(f"url {self.url} and --nats-port {self.nats_port}: give one of the two")
        return replace(self, url=url)


COMMAND = Command(
    "nats",
    EmbeddedOptions,
    "The embedded NATS server on this machine, until stopped. Processes of the same Unix user on this\n"
    "machine find its users by themselves.",
)
