"""An estimate of the bookings of other replicas that a decision cannot know of yet.

    booking here ─W──┐   bookings of peers that arrive in this time were decided at about
         peers: │ │  │ │  the same moment, by replicas that had not seen ours either

Replicas that decide in one instant see the same fleet and would all choose the same idle worker. The estimate
is the number of peers' bookings that arrive within W after a booking made here, averaged over the bookings
made here. It is near 0 under steady traffic and grows with bursts.
"""

from __future__ import annotations

from collections import deque

# About the time from a booking until the peers know of it (docs/benchmarks.md, sync).
WINDOW_S = 0.002

# Weight of the newest sample in the moving average: a burst of a few dozen requests is enough to raise it.
WEIGHT = 0.1


class UnseenBookings:
    def __init__(self) -> None:
        self.expected = 0.0
        self._elsewhere = 0
        self._open: deque[tuple[float, int]] = deque()

    def booked_here(self, now: float) -> None:
        """A booking made here: opens a sample that counts the peers' bookings from now on."""
        if self._open and now - self._open[0][0] > WINDOW_S:
            self._close(now)
        self._open.append((now, self._elsewhere))

    def booked_elsewhere(self, now: float) -> None:
        """A peer's booking has arrived."""
        self._close(now)
        self._elsewhere += 1

    def _close(self, now: float) -> None:
        """Add the samples whose window has passed to the average."""
        while self._open and now - self._open[0][0] > WINDOW_S:
            _, before = self._open.popleft()
            self.expected += WEIGHT * (self._elsewhere - before - self.expected)
