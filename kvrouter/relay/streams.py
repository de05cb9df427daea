"""The streams of an event loop that C passes on; where that is not built, Python passes on all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

try:
    from kvrouter.relay.native import streams as native
except ImportError:  # no C compiler, or not Linux
    native = None  # type: ignore[assignment]


class Streams:
    """`is_native`: False leaves all streams to Python, as on a machine where C is not built."""

    def __init__(self, *, is_native: bool = True) -> None:
        self.is_native = is_native and native is not None
        self._native: native.StreamLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(
        self, worker: asyncio.Transport, client: int, returned: Callable[[], None], most: int = 0
    ) -> native.Stream:
        """Pause a worker that sends chunks, and pass on to the socket `client` until `returned` is called.

        Only if `is_native`. `most`: see `StreamLoop.add`.
        """
        if self._native is None:
            self._loop = asyncio.get_running_loop()
            self._native = native.StreamLoop(self._failed)
            self._loop.add_reader(self._native.fileno(), self._native.run)
        worker.pause_reading()
        return self._native.add(worker.get_extra_info("socket").fileno(), client, returned, most)

    def _failed(self, error: Exception) -> None:
        if self._loop is not None:
            self._loop.call_exception_handler({"message": "a stream came back from C", "exception": error})

    def close(self) -> None:
        """Stop all of them."""
        if self._native is not None and self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._native.fileno())
            self._native.close()
            self._native = None
