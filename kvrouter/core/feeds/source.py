"""The owner's side of a feed: it numbers frames, keeps the last ones and answers replay requests.

    append(ops) ──> frames n+1, n+2 …      to be published, in this order
         │
       ring: … n-1, n                      4,096 frames or 8 MiB: replay, for short gaps
         │
       snapshot "as of n"                  for longer ones: encoded once, shared by all readers

Invariant: the ring holds consecutive frames and ends with `seq`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvrouter.core.wire.ops import (
    MAX_FRAME_BYTES,
    VERSION,
    Frame,
    Op,
    ReplayFrames,
    ReplayRequest,
    SnapshotChunk,
    encode,
)

RING_FRAMES = 4096
RING_BYTES = 8 * 1024 * 1024
# Long enough for replicas that start together to share one snapshot: its encoding is the owner's cost.
SNAPSHOT_KEPT_S = 10.0
# Room for the arrays and numbers around a list of ops.
_ENVELOPE_BYTES = 64
# msgpack's header of a byte string: one frame in an answer
_FRAME_HEADER_BYTES = 5


@dataclass(frozen=True, slots=True)
class _Snapshot:
    id: int
    as_of_seq: int
    taken_at: float
    chunks: list[bytes]


class FeedSource:
    """One feed as its owner writes it.

    `state_ops(now)` returns ops that build the owner's present state from nothing. It is called in the same
    plain call that reads `seq`, without an await between, so a snapshot is exact as of that frame.
    """

    def __init__(
        self,
        incarnation: int,
        state_ops: Callable[[float], Iterable[Op]],
        *,
        ring_frames: int = RING_FRAMES,
        ring_bytes: int = RING_BYTES,
        shared_s: float = SNAPSHOT_KEPT_S,
    ) -> None:
        """`shared_s`: how long a snapshot is used for further readers.

        Keep it short if `state_ops` has more than the frames show: such changes are in no frame after it.
        """
        self.incarnation = incarnation
        self.seq = 0
        self._state_ops = state_ops
        self._ring: deque[bytes] = deque()
        self._ring_frames = ring_frames
        self._ring_room = ring_bytes
        self._snapshots: dict[int, _Snapshot] = {}
        self._last_snapshot_id = 0
        self._shared_s = shared_s

    def append(self, ops: Sequence[Op]) -> list[bytes]:
        """Number the ops as a frame, or several if they exceed a frame's size; returns what to publish."""
        if not ops:
            return []
        frames = [self._frame(1, ops)]
        if len(frames[0]) > MAX_FRAME_BYTES:  # rare, so sizes are looked at op by op only here
            parts = _split(ops, MAX_FRAME_BYTES - _ENVELOPE_BYTES)
            frames = [self._frame(number, part) for number, part in enumerate(parts, 1)]
        self.seq += len(frames)
        for data in frames:
            self._remember(data)
        return frames

    def skip_first(self) -> None:
        """Count a first frame that is never sent: the state is not empty, so readers need a snapshot."""
        self.seq = max(self.seq, 1)

    def _frame(self, number: int, ops: Sequence[Op]) -> bytes:
        """The `number`th frame after the last one."""
        return encode(Frame(VERSION, self.incarnation, self.seq + number, list(ops)))

    def _remember(self, data: bytes) -> None:
        self._ring.append(data)
        self._ring_room -= len(data)
        # the last frame stays at any size: a reader that lost only this one needs no snapshot
        while len(self._ring) > self._ring_frames or (self._ring_room < 0 and len(self._ring) > 1):
            self._ring_room += len(self._ring.popleft())

    def answer(self, request: ReplayRequest, max_bytes: int, now: float) -> bytes:
        """Frames if the ring has the requested one, else a chunk of a snapshot.

        The answer is shorter than `max_bytes`, the most that one message may carry.
        """
        self._forget_snapshots(now)
        room = max_bytes - _ENVELOPE_BYTES
        if request.snapshot_id:
            snapshot = self._snapshots.get(request.snapshot_id)
            if snapshot is not None and 0 <= request.chunk < len(snapshot.chunks):
                return snapshot.chunks[request.chunk]
        elif self._has_from(request):
            return encode(ReplayFrames(self._frames_from(request.from_seq, room), self.seq))
        return self._shared_snapshot(room, now).chunks[0]

    def _has_from(self, request: ReplayRequest) -> bool:
        oldest = self.seq - len(self._ring) + 1
        return request.incarnation == self.incarnation and oldest <= request.from_seq <= self.seq + 1

    def _frames_from(self, from_seq: int, room: int) -> list[bytes]:
        frames: list[bytes] = []
        for index in range(len(self._ring) - (self.seq - from_seq + 1), len(self._ring)):
            room -= len(self._ring[index]) + _FRAME_HEADER_BYTES
            if frames and room < 0:
                break
            frames.append(self._ring[index])
        return frames

    def _shared_snapshot(self, room: int, now: float) -> _Snapshot:
        """A kept snapshot whose next frame is still in the ring, else a new one."""
        for kept in self._snapshots.values():
            is_recent = now - kept.taken_at <= self._shared_s
            if is_recent and kept.as_of_seq >= self.seq - len(self._ring):
                return kept
        self._last_snapshot_id += 1
        snapshot = self._take_snapshot(self._last_snapshot_id, min(room, MAX_FRAME_BYTES), now)
        self._snapshots[snapshot.id] = snapshot
        return snapshot

    def _take_snapshot(self, snapshot_id: int, room: int, now: float) -> _Snapshot:
        parts = list(_split(list(self._state_ops(now)), room)) or [[]]
        chunks = [
            encode(
                SnapshotChunk(
                    snapshot_id=snapshot_id,
                    as_of_seq=self.seq,
                    chunk=number,
                    chunks=len(parts),
                    ops=ops,
                    incarnation=self.incarnation,
                )
            )
            for number, ops in enumerate(parts)
        ]
        return _Snapshot(snapshot_id, self.seq, now, chunks)

    def _forget_snapshots(self, now: float) -> None:
        for kept in list(self._snapshots.values()):
            if now - kept.taken_at > SNAPSHOT_KEPT_S:
                del self._snapshots[kept.id]


def _split(ops: Sequence[Op], room: int) -> Iterable[list[Op]]:
    """Cut a list of ops into lists that encode to at most `room` bytes (one op may exceed it)."""
    part: list[Op] = []
    size = 0
    for op in ops:
        op_bytes = len(encode(op))
        if part and size + op_bytes > room:
            yield part
            part, size = [], 0
        part.append(op)
        size += op_bytes
    if part:
        yield part
