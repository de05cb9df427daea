"""What goes into a simulated engine, and what it reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `hashes` are the sequence hashes of the prompt's full blocks.

    `leaves_after_s`: the client leaves then, if the answer is not complete. `after`: the numbers of requests
    that must have ended; `at` are then the seconds since the last of these ends.
    """

    at: float
    hashes: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    text: str = ""
    leaves_after_s: float = math.inf
    after: tuple[int, ...] = ()
    session: str = ""


class BlockListener(Protocol):
    """Receives what happens in an engine, at the moment it happens."""

    def began(self, number: int, cached_tokens: int, now: float) -> None:
        """The first token of a request."""

    def ended(self, number: int, now: float) -> None:
        """The last token of a request."""

    def stored(self, hashes: Sequence[int]) -> None:
        """Blocks became reusable, parents first."""

    def removed(self, hashes: Sequence[int]) -> None:
        """Blocks were evicted."""

    def reads(self, number: int, tokens: int) -> None:
        """A decode engine has reserved the blocks of a request, and reads these tokens of its prompt."""

    def pulls(self, number: int, cached_tokens: int) -> int:
        """An engine has reserved the blocks of a request. How many tokens it reads now from a peer."""
