"""What a value that arrives may be: ranges, lengths and forms, for everything that travels on NATS.

Whoever may publish on NATS can send any bytes. The structs of events.py and beats.py declare their fields
with the types below, so msgspec refuses what is out of range while it decodes, in C. What a type cannot say
(a port) a function here checks; ops.py checks that hashes are whole.

The ranges leave room: a frame number plus one, and any sum of 2^14 amounts, still fit into 64 bits.
"""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

MOST_NUMBER = 1 << 62
MOST_AMOUNT = 1 << 48
MOST_RANKS = 1024
MOST_SHARE = 16
MOST_FINITE = 1e300
MOST_NAMES = 4096
"""Of models, adapters or notes in one message."""
MOST_TEXT_CHARACTERS = 4096
MOST_ID_CHARACTERS = 256
"""Of a request's id on the wire: it is only shown, so a longer one is cut by the sender."""
MOST_BLOCK_SIZE = 1 << 20
"""Tokens. The largest block in use is that of Mamba layers in vLLM's hybrid models, some thousands."""

U64 = Annotated[int, Meta(ge=0)]
"""A hash or a digest; MessagePack carries no more than 64 bits."""
TokenId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""Block hashes take token ids as 32 bits."""
Number = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
"""A frame's seq, an incarnation, a booking's number, a round."""
Amount = Annotated[int, Meta(ge=0, le=MOST_AMOUNT)]
"""Tokens, blocks, requests or milliseconds."""
Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
Ranks = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
BlockSize = Annotated[int, Meta(ge=1, le=MOST_BLOCK_SIZE)]
Tier = Annotated[int, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=MOST_SHARE)]
"""A fraction 0..1 of KV blocks; engines that count what they swap out report more."""
Finite = Annotated[float, Meta(ge=-MOST_FINITE, le=MOST_FINITE)]

Identifier = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
"""May stand in a NATS subject: worker ids, router ids, pools."""
ShortText = Annotated[str, Meta(max_length=64)]
Line = Annotated[str, Meta(max_length=1024, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
"""A name that clients use, and logs quote: no control characters, so it cannot forge a log line."""
Text = Annotated[str, Meta(max_length=MOST_TEXT_CHARACTERS)]
"""For people, and shown only where it is escaped."""
RequestId = Annotated[str, Meta(max_length=MOST_ID_CHARACTERS)]
Session = Annotated[str, Meta(max_length=1024)]
RankHeader = Annotated[str, Meta(pattern=r"\A(?:[Xx]-[A-Za-z0-9-]{1,62})?\Z")]
"""Goes into every request to the worker, so it must not be a header with a meaning of its own."""
Url = Annotated[str, Meta(max_length=512, pattern=r"\A(?:https?://[A-Za-z0-9._~:@\[\]/%-]+)?\Z")]
"""Empty, or checked further by `url_error`."""

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})?|\[[0-9A-Fa-f:.]+\]")


def url_error(url: str) -> str:
    """Why this is not the address of an HTTP server; empty if it is.

    A user, a query or a fragment is refused: nothing here would send it.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"url {url!r}: {error}"
    host = parts.netloc if port is None else parts.netloc.rpartition(":")[0]
    if parts.scheme not in {"http", "https"} or not _HOST.fullmatch(host) or port == 0:
        return f"url {url!r}: use http://HOST:PORT or https://HOST:PORT"
    return f"url {url!r}: without a query or fragment" if parts.query or parts.fragment else ""
