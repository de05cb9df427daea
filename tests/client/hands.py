"""Publishers whose frames a test carries by hand, and a clock that it sets."""

from __future__ import annotations

from kvrouter import KvPublisher


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Hand:
    """One rank of a worker, and its frames that were not taken yet."""

    def __init__(self, worker_id: str = "w1", rank: int = 0, block_size: int = 4) -> None:
        self._frames: list[bytes] = []
        self.publisher = KvPublisher(self, worker_id, block_size, rank, model="m", incarnation=7)

    def publish(self, _subject: str, payload: bytes) -> bool:
        """Take a frame, in place of a bus."""
        self._frames.append(payload)
        return True

    def stores(self, first: int, tokens: list[int], **more: object) -> list[bytes]:
        """Store a chain whose blocks are called first, first + 1, …; returns the frames."""
        names = list(range(first, first + len(tokens) // self.publisher.block_size))
        self.publisher.stored(names, tokens, **more)  # type: ignore[arg-type]  # stored's own
        return self.frames()

    def frames(self) -> list[bytes]:
        """Take the frames."""
        self.publisher.flush(0.0)
        frames, self._frames = self._frames, []
        return frames
