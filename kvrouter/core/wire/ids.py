"""Identities as types, so that mypy notices a worker id in place of a pool.

See docs/concepts/design.md#identities.
"""

from __future__ import annotations

import re
from typing import NamedTuple, NewType

from kvrouter.errors import ConfigError

WorkerId = NewType("WorkerId", str)
RouterId = NewType("RouterId", str)
# of the workers of one base model, which share one block index and one table of bookings
PoolId = NewType("PoolId", str)

# of a whole prompt with its options, 16 bytes (frontend/bodies/prompt_hash.py)
PromptHash = NewType("PromptHash", bytes)

# both unsigned 64-bit; only a sequence hash names a block and everything before it
BlockHash = NewType("BlockHash", int)
SequenceHash = NewType("SequenceHash", int)

# One token of a NATS subject: neither ".", "*", ">" nor a space.
IDENTIFIER_PATTERN = "[A-Za-z0-9_-]{1,64}"
IDENTIFIER_RULE = "use 1 to 64 of A-Z a-z 0-9 _ -"
# `NAME`, or `GROUP.NAME`: the group is then a token of its own in each subject, so that one NATS user may be
# that of all workers of a group (kvrouter/bus/rights.py).
WORKER_ID_PATTERN = rf"(?:{IDENTIFIER_PATTERN}\.)?{IDENTIFIER_PATTERN}"
WORKER_ID_RULE = f"{IDENTIFIER_RULE}, or two such names: GROUP.NAME"
MOST_WORKER_ID_CHARACTERS = 129
_IDENTIFIER = re.compile(IDENTIFIER_PATTERN)
_WORKER_ID = re.compile(WORKER_ID_PATTERN)


class Target(NamedTuple):
    """The destination of a request: one data-parallel rank of one worker."""

    worker_id: WorkerId
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.rank}"


class BookingKey(NamedTuple):
    """One booking. It does not contain the client's request id: clients may reuse theirs."""

    router_id: RouterId
    number: int


def is_identifier(name: str) -> bool:
    """Whether `name` may be a part of a NATS subject: 1 to 64 of A-Z a-z 0-9 _ -."""
    return _IDENTIFIER.fullmatch(name) is not None


def check_identifier(what: str, name: str) -> None:
    """Raise ConfigError, naming `what`, unless `name` is an identifier."""
    if not is_identifier(name):
        raise ConfigError(f"{what} {name!r}: {IDENTIFIER_RULE}")


def is_worker_id(name: str) -> bool:
    """Whether `name` is an identifier, or two with a dot between: GROUP.NAME."""
    return _WORKER_ID.fullmatch(name) is not None


def is_in_group(worker_id: WorkerId) -> bool:
    return "." in worker_id


def check_worker_id(what: str, name: str) -> None:
    """Raise ConfigError, naming `what`, unless `name` is a worker id."""
    if not is_worker_id(name):
        raise ConfigError(f"{what} {name!r}: {WORKER_ID_RULE}")
