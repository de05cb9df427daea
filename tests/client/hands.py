"""Publishers whose frames are carried by hand, and a clock that is set."""

from __future__ import annotations

from kvrouter import KvPublisher


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Hand:
    """One rank of a worker, and the frames it has sent since they were last taken."""

    def __init__(self, worker_id: str = "w1", rank: int = 0, block_size: int = 4) -> None:
        self._frames: list[bytes] = []
        self.publisher = KvPublisher(self, worker_id, block_size, rank, model="m", incarnation=7)

    def publish(self, _subject: str, payload: bytes) -> bool:
        """As a bus would."""
        self._frames.append(payload)
        return True

    def stores(self, first: int, tokens: list[int], **more: object) -> list[bytes]:
        """Store a chain whose blocks are called first, first + 1, …; returns the frames."""
        names = list(range(first, first + len(tokens) // self.publisher.block_size))
        self.publisher.stored(names, tokens, **more)  # type: ignore[arg-type]  # stored's own
        return self.frames()

    def frames(self) -> list[bytes]:
        """What there is to carry."""
        self.publisher.flush(0.0)
        frames, self._frames = self._frames, []
        return frames
