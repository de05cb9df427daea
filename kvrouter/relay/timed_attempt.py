"""An attempt that measures the time it takes of this process, for `kvrouter_relay_seconds`.

Two readings of the clock for each event of a stream would cost more than 1 % of it, so few requests get one
(RELAY_TIMED_EVERY of frontend/completions.py).
"""

from __future__ import annotations

import time

from kvrouter.relay.exchange import Attempt
from kvrouter.relay.framing import Body, ResponseHead


class TimedAttempt(Attempt):
    """`spent_s`: seconds in sending the request and in passing on what arrived, without any wait."""

    __slots__ = ("_is_inside", "spent_s")

    spent_s: float
    _is_inside: bool

    def send(self, request: bytes) -> None:
        began = time.perf_counter()
        self._is_inside, self.spent_s = False, 0.0
        super().send(request)
        self.spent_s += time.perf_counter() - began

    def answered(self, head: ResponseHead, data: bytes) -> None:
        began = time.perf_counter()
        super().answered(head, data)
        self.spent_s += time.perf_counter() - began

    def opened(self, head: ResponseHead, body: Body) -> None:
        began = time.perf_counter()
        super().opened(head, body)
        self.spent_s += time.perf_counter() - began

    def received(self, data: bytes) -> None:
        if self._is_inside:
            super().received(data)  # from `received_chunk`, which measures it
            return
        began = time.perf_counter()
        super().received(data)
        self.spent_s += time.perf_counter() - began

    def received_chunk(self, data: bytes) -> None:
        began = time.perf_counter()
        self._is_inside = True
        super().received_chunk(data)
        self._is_inside = False
        self.spent_s += time.perf_counter() - began

    def ended(self) -> None:
        began = time.perf_counter()
        super().ended()
        self.spent_s += time.perf_counter() - began
