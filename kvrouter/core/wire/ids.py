"""The identities as types. A plain value is never passed where a name belongs.

See docs/concepts/design.md#identities.
"""

from __future__ import annotations

import re
from typing import NamedTuple, NewType

WorkerId = NewType("WorkerId", str)
RouterId = NewType("RouterId", str)
PoolId = NewType("PoolId", str)
"""The name of a base model; its workers share one index and one active table."""

BlockHash = NewType("BlockHash", int)
SequenceHash = NewType("SequenceHash", int)
"""Unsigned 64-bit: names a block and everything before it."""

_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Target(NamedTuple):
    """What a request is sent to: one data-parallel rank of one worker."""

    worker_id: WorkerId
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.rank}"


class BookingKey(NamedTuple):
    """One request placed on one target by one replica. Never the client's request id."""

    router_id: RouterId
    number: int


def is_identifier(name: str) -> bool:
    """Whether `name` may stand in a NATS subject: 1 to 64 of A-Z a-z 0-9 _ -."""
    return _IDENTIFIER.fullmatch(name) is not None
