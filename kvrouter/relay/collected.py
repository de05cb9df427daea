"""Takes an answer in place of a client, where the router itself needs it: that of a prefill worker."""

from __future__ import annotations

from collections.abc import Callable

from kvrouter.relay.begun import Begun
from kvrouter.relay.engine_answers import seconds_until

# The hand-over parameters of a prompt of 1 M tokens in blocks of 16 take 0.5 MB.
MOST_BYTES = 1024 * 1024


class Collected:
    """The ClientSide (exchange.py) of an attempt whose answer is read here."""

    is_http_10 = True  # so it comes without chunks
    has_begun = False
    address = ""
    is_slow = False

    def __init__(self) -> None:
        self.begun: Begun | None = None
        self._data = bytearray()
        self._is_much = False

    def write(self, data: bytes) -> None:
        self._is_much = self._is_much or len(self._data) + len(data) > MOST_BYTES
        if not self._is_much:
            self._data += data

    def when_drained(self, call: Callable[[], None]) -> None:
        """Never slow."""

    def lend(self, _begin: object) -> None:
        """It is no socket."""

    @property
    def body(self) -> bytes:
        """Empty if it is too long."""
        return b"" if self._is_much else bytes(self._data).partition(b"\r\n\r\n")[2]

    def age_s(self, now: float) -> float:
        """Since the worker answered, by its own `date`; without one infinite. `now`: seconds since 1970."""
        date = bytes(self._data).partition(b"\r\ndate: ")[2].partition(b"\r\n")[0]
        return -seconds_until(date, now) or float("inf")
