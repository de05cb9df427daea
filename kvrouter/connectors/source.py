"""Where a decode engine finds what a prefill engine has computed."""

from __future__ import annotations

import secrets
from urllib.parse import urlsplit

from msgspec import Struct

from kvrouter.core.wire.heartbeats import Card


class Source(Struct, frozen=True):
    """One hand-over at its prefill worker. `address`: HOST:PORT of the connector there."""

    url: str
    engine_id: str = ""
    address: str = ""
    transfer_id: str = ""
    room: int = 0
    rank: int = 0


def source_at(url: str, card: Card | None, rank: int) -> Source:
    """A new hand-over of the worker at this URL. `card`: None if it is gone."""
    if card is None:
        return Source(url)
    ids = card.kv_engine_ids
    return Source(
        url,
        ids[rank] if rank < len(ids) else "",
        card.kv_address or address_of(url, card.bootstrap_port),
        f"xfer-{secrets.token_hex(16)}",
        secrets.randbits(63),
        rank,
    )


def address_of(url: str, port: int) -> str:
    """HOST:PORT of another port of the host of a URL."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
