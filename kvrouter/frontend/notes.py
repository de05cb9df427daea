"""What is noted of a request while it is served: for its line in the access log.

begun ──accepted──> ──queued──> ──decided──> ──first byte──> … ended
          tokens      queue       │     ^
                                  └─────┘ another worker
"""

from __future__ import annotations

import time

from msgspec import Struct

from kvrouter.core.tables.predictions import Usage


class Notes(Struct):
    """Of one request. The clock is not the event loop's, which has whole ms under uvloop (0.23)."""

    begun: float
    """A reading of `clock`, as `mark`."""
    mark: float
    """When the last step ended."""
    accept_s: float | None = None
    """Body, tokens and hashes."""
    queue_s: float | None = None
    """None: there is no queue, or it did not get so far."""
    decide_s: float | None = None
    """Of all attempts."""
    first_byte_s: float | None = None
    """From the arrival, as `duration_s`."""
    duration_s: float | None = None
    usage: Usage | None = None
    output_tokens: int | None = None

    def accepted(self) -> None:
        self.accept_s = self._step()

    def queued(self) -> None:
        self.queue_s = self._step()

    def deciding(self) -> None:
        self._step()

    def decided(self) -> None:
        self.decide_s = (self.decide_s or 0.0) + self._step()

    def got_first_byte(self) -> None:
        self.first_byte_s = clock() - self.begun

    def ended(self) -> None:
        self.duration_s = clock() - self.begun

    def _step(self) -> float:
        """Seconds since the last step."""
        before, self.mark = self.mark, clock()
        return self.mark - before


clock = time.perf_counter


def new_notes() -> Notes:
    now = clock()
    return Notes(now, now)
