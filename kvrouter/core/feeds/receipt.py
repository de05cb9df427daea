"""What became of a message: facts that its receiver acts on."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


class FrameVerdict(Enum):
    TAKEN = "taken"
    """It counts: applied, held until what is missing has come, or known already."""
    STALE = "stale"
    """Of an earlier life of its sender, or an answer that is no longer wanted."""
    OTHER_VERSION = "other version"
    MALFORMED = "malformed"
    """Not even its number can be read."""
    REFUSED = "refused"
    """Nothing of it is kept: it is of no use here, or there is no room for what it would begin."""
    UNKNOWN = "unknown"
    """Of a feed that is not followed, or on no subject of this version."""
    FAILED = "failed"
    """Applying it has raised: a bug of kvrouter, which broke its feed."""


class Receipt(Struct, frozen=True):
    """What became of one message. `trouble`: why all or a part of it cannot be read; empty if it can."""

    verdict: FrameVerdict
    trouble: str = ""


TAKEN = Receipt(FrameVerdict.TAKEN)
STALE = Receipt(FrameVerdict.STALE)
OTHER_VERSION = Receipt(FrameVerdict.OTHER_VERSION)
REFUSED = Receipt(FrameVerdict.REFUSED)
UNKNOWN = Receipt(FrameVerdict.UNKNOWN)
FAILED = Receipt(FrameVerdict.FAILED)


def malformed(error: Exception) -> Receipt:
    """The receipt of a message that cannot be read."""
    return Receipt(FrameVerdict.MALFORMED, str(error))
