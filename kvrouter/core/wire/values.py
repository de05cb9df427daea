"""Types for every value that arrives over NATS: ranges, lengths and forms.

Any client that may publish on NATS can send any bytes. The structs of ops.py and heartbeats.py declare their
fields with the types below, so msgspec rejects a value out of range while it decodes, in C. What a type
cannot express is checked after decoding: a URL's port by `url_error`, a header that is not free by
`rank_header_error`, whole hashes in ops.py.

The ranges leave room: a frame number plus one, and any sum of 2^14 amounts, still fit into 64 bits.
"""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from kvrouter.core.wire.ids import IDENTIFIER_PATTERN, MOST_WORKER_ID_CHARACTERS, WORKER_ID_PATTERN

MOST_NUMBER = 1 << 62
MOST_AMOUNT = 1 << 48
MOST_RANKS = 1024
MOST_SHARE = 16
# far below the largest float, 1.8e308: a sum over all workers stays finite
MOST_FINITE = 1e300
# models, adapters or notes in one message
MOST_NAMES = 4096
MOST_TEXT_CHARACTERS = 4096
# A request's id on the wire is only displayed, so the sender cuts a longer one.
MOST_ID_CHARACTERS = 256
# The largest block in use is that of Mamba layers in vLLM's hybrid models: some thousands of tokens.
MOST_BLOCK_SIZE = 1 << 20

# A hash or a digest. No upper bound: MessagePack carries at most 64 bits.
U64 = Annotated[int, Meta(ge=0)]
# Block hashes are computed over token ids of 32 bits.
TokenId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
# A frame's seq, an incarnation, a booking's number, a round.
Number = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
# Tokens, blocks, requests or milliseconds.
Amount = Annotated[int, Meta(ge=0, le=MOST_AMOUNT)]
# The difference of two amounts.
Difference = Annotated[int, Meta(ge=-MOST_AMOUNT, le=MOST_AMOUNT)]
# What is counted for people: exact in JavaScript, too.
Total = Annotated[int, Meta(ge=0, le=1 << 53)]
Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
Ranks = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
BlockSize = Annotated[int, Meta(ge=1, le=MOST_BLOCK_SIZE)]
# Tokens behind a block: a draft model of vLLM proposes far fewer.
MOST_LOOKAHEAD = 256
Lookahead = Annotated[int, Meta(ge=0, le=MOST_LOOKAHEAD)]
Tier = Annotated[int, Meta(ge=0, le=2)]
# A fraction 0..1 of the KV blocks. Engines that also count swapped blocks report more than 1.
Share = Annotated[float, Meta(ge=0, le=MOST_SHARE)]
Finite = Annotated[float, Meta(ge=-MOST_FINITE, le=MOST_FINITE)]
Seconds = Annotated[float, Meta(ge=0, le=MOST_FINITE)]

# Router ids and pools: they are parts of NATS subjects, where a dot or a space has a meaning.
Identifier = Annotated[str, Meta(pattern=rf"\A{IDENTIFIER_PATTERN}\Z")]
WorkerName = Annotated[str, Meta(pattern=rf"\A{WORKER_ID_PATTERN}\Z")]
# A worker id in bookings, which are ignored if no worker has it: without a pattern it is read faster.
BookedWorker = Annotated[str, Meta(max_length=MOST_WORKER_ID_CHARACTERS)]
ShortText = Annotated[str, Meta(max_length=64)]
# A setting, its value, who changed it, or why: logged, so without control characters.
SettingText = Annotated[str, Meta(max_length=256, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
# A name that clients use and logs quote: without control characters it cannot forge a log line.
Line = Annotated[str, Meta(max_length=1024, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
# For operators; displayed only where it is escaped.
Text = Annotated[str, Meta(max_length=MOST_TEXT_CHARACTERS)]
# Of a whole prompt, by which replicas refuse it.
PROMPT_HASH_BYTES = 16
WholePrompt = Annotated[bytes, Meta(min_length=PROMPT_HASH_BYTES, max_length=PROMPT_HASH_BYTES)]
RequestId = Annotated[str, Meta(max_length=MOST_ID_CHARACTERS)]
Session = Annotated[str, Meta(max_length=1024)]
# Added to every request to the worker: only X- headers, so that a card cannot set Host or Content-Length.
# Checked further by `rank_header_error`.
RankHeader = Annotated[str, Meta(pattern=r"\A(?:[Xx]-[A-Za-z0-9-]{1,62})?\Z")]
# Headers that the router writes, or that proxies, clients and engines read as something else than a rank.
_TAKEN_HEADERS = frozenset({
    "x-request-id", "x-correlation-id", "x-session-id", "x-real-ip", "x-client-ip", "x-api-key",
    "x-http-method-override",
})  # fmt: skip
_TAKEN_STARTS = (
    "x-kvrouter-", "x-forwarded-", "x-override-", "x-original-", "x-envoy-", "x-b3-", "x-accel-", "x-amzn-",
)  # fmt: skip
# Empty, or checked further by `url_error`.
MOST_URL_CHARACTERS = 512
Url = Annotated[
    str,
    Meta(
        max_length=MOST_URL_CHARACTERS,
        pattern=r"\A(?:https?://[A-Za-z0-9._~!$&'()*+,;=:@\[\]/%-]+)?\Z",
    ),
]

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})?|\[[0-9A-Fa-f:.]+\]")
# What a path has of other characters, or of `%` without two hex digits (RFC 3986).
_NOT_OF_A_PATH = re.compile(r"%(?![0-9A-Fa-f]{2})|[^A-Za-z0-9._~!$&'()*+,;=:@/%-]")
_UNREADABLE = "a url with @ that cannot be read: use http://HOST:PORT, without a user and password"
_DOTS = re.compile(r"(?:\.|%2[Ee]){1,2}")


def url_error(url: str) -> str:
    """Why this is not the address of an HTTP server, perhaps below a path; empty if it is.

    A user, a query or a fragment is an error: requests to the worker would be sent without it. The path is
    sent as it is before that of each request, so it must need no change.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        # what is wrong may be a part of a password
        return f"url {url!r}: {error}" if "@" not in url else _UNREADABLE
    if "@" in parts.netloc:  # not quoted: it may be a password
        return f"the url of {parts.hostname}: without a user and password"
    host = parts.netloc if port is None else parts.netloc.rpartition(":")[0]
    # as text: urlsplit takes HTTP:// and blanks, too
    starts = url.startswith(("http://", "https://"))
    if not starts or not _HOST.fullmatch(host) or port == 0:
        return f"url {url!r}: use http://HOST:PORT or https://HOST:PORT"
    if "?" in url or "#" in url:  # also an empty one, which urlsplit does not show
        return f"url {url!r}: without a query or fragment"
    if len(url) > MOST_URL_CHARACTERS:
        return f"url {url[:64]!r}…: at most {MOST_URL_CHARACTERS} characters, not {len(url)}"
    return _path_error(url)


def _path_error(url: str) -> str:
    path = url.partition("//")[2].partition("/")[2]
    if wrong := _NOT_OF_A_PATH.search(path):
        return f"url {url!r}: {wrong[0]!r} in its path: write it as %XX"
    if any(_DOTS.fullmatch(part) for part in path.split("/")):
        return f"url {url!r}: without '.' and '..' in its path"
    return ""


def rank_header_error(name: str) -> str:
    """Why a card may not have this rank header; empty if it may."""
    lower = name.lower()
    if lower in _TAKEN_HEADERS or lower.startswith(_TAKEN_STARTS):
        return f"rank_header {name!r}: routers, proxies or clients use it for something else"
    return ""


def valid_unicode(text: str) -> str:
    """`text` with "?" for each lone surrogate: JSON can put one in a str, and UTF-8 cannot hold it."""
    return text.encode("utf-8", "replace").decode("utf-8")
