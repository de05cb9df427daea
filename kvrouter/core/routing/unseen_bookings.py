"""How many bookings of other replicas a decision cannot know of yet.

    own booking ──W──┐   bookings of peers that arrive in this time were decided at about
         peers: │ │  │ │  the same moment, by replicas that had not seen ours either

Several replicas that decide in one instant see the same fleet and would all choose the same idle
worker. The number of peers' bookings that arrive within W of an own one, averaged over own ones, is
what a decision has to reckon with. It is near 0 under steady traffic and grows with bursts.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 0.002
"""About the time from a booking until the peers know of it (docs/benchmarks.md, sync)."""
WEIGHT = 0.1
"""Of the newest sample in the moving average: bursts of a few dozen requests are noticed."""


class UnseenBookings:
    """A moving average over own bookings."""

    def __init__(self) -> None:
        self.expected = 0.0
        self._elsewhere = 0
        self._open: deque[tuple[float, int]] = deque()

    def booked_here(self, now: float) -> None:
        """An own booking: what arrives from now on is counted against it."""
        if self._open and now - self._open[0][0] > WINDOW_S:
            self._close(now)
        self._open.append((now, self._elsewhere))

    def booked_elsewhere(self, now: float) -> None:
        """A peer's booking has arrived."""
        self._close(now)
        self._elsewhere += 1

    def _close(self, now: float) -> None:
        """Take the samples whose time is over."""
        while self._open and now - self._open[0][0] > WINDOW_S:
            _, before = self._open.popleft()
            self.expected += WEIGHT * (self._elsewhere - before - self.expected)
