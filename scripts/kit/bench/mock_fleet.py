"""A fleet of mock workers in one process, which publishes KV events at a given rate.

    python -m scripts.kit.bench.mock_fleet --nats URL --engine URL --workers 1000 --blocks-s 200000 …

Each worker behaves like its agent: card, heartbeats, a numbered KV feed, answers to replays. Frames are
encoded beforehand, and only their number is inserted when they are sent. It implements NATS's protocol on one
blocking socket: nats-py would use more CPU time than the frontend under test.

Every worker holds a base (one of a few prefixes shared by prompts) and a window of chains below it, half of
the blocks in chains of 8 and half in chains of 64. Once the window is full, each chain stored is
one removed: half of the blocks sent are stored, half removed.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvrouter.bus import Subjects
from kvrouter.core.wire.hashes import block_hashes, pack_hashes, sequence_hashes
from kvrouter.core.wire.heartbeats import Card, RankBeat, WorkerBeat
from kvrouter.core.wire.heartbeats import encode as encode_beat
from kvrouter.core.wire.ids import PoolId, WorkerId
from kvrouter.core.wire.ops import (
    DEVICE,
    VERSION,
    Check,
    Op,
    Removed,
    SnapshotChunk,
    Stored,
    decode_request,
    encode,
)

MODEL, POOL = "mock", PoolId("mock-bench")
BLOCK_SIZE = 16
# A prompt of 4,000 tokens shares its first half with the prompts of its group.
PREFIXES, PREFIX_BLOCKS = 32, 125
# Lengths of a worker's chains, in their order: equally many blocks in short and in long ones.
CHAINS = ((8,) * 8 + (64,)) * 2
# Chains that a worker holds.
WINDOW = 14
TICK_S = 0.01
BEAT_S, CARD_BEATS = 1.0, 10
_MASK64 = (1 << 64) - 1


def prefix_tokens(group: int) -> list[int]:
    """The tokens that the prompts of a group begin with."""
    rng = random.Random(group)
    return [rng.randrange(1, 30_000) for _ in range(PREFIX_BLOCKS * BLOCK_SIZE)]


def prefix_hashes(group: int) -> Sequence[int]:
    return sequence_hashes(block_hashes(prefix_tokens(group), BLOCK_SIZE))


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks that are stored and removed together: the encoded ops, and their part of the digest."""

    blocks: int
    digest: int
    stored: bytes
    removed: bytes
    op: Stored


class Worker:
    def __init__(self, number: int, engine_url: str, subjects: Subjects, rng: random.Random) -> None:
        self.id = WorkerId(f"w{number:04}")
        self.incarnation = time.time_ns() // 1000
        self.seq = 0
        # with a path of its own, as one address is one engine; the fake worker reads none
        url = f"{engine_url}/{self.id}"
        self._card = Card(
            worker_id=self.id, url=url, model=MODEL, block_size=BLOCK_SIZE, started_at_us=1 + number
        )
        base = prefix_hashes(number % PREFIXES)
        self._base = Stored(DEVICE, None, pack_hashes(base))
        self._count, self._digest = 0, 0
        self._base_digest = (len(base), sum(base) & _MASK64)
        self._chains = deque(_chain(length, base[-1], rng) for length in CHAINS)
        self._held: deque[Chain] = deque()
        self._live = subjects.live_kv(POOL, self.id, 0).encode()
        self._beat = subjects.live_worker(self.id).encode()
        self._head = b"\x94\x01" + struct.pack(">BQB", 0xCF, self.incarnation, 0xCF)
        self._beats = 0

    def first(self) -> bytes:
        """The frame that stores its base."""
        self._count, self._digest = self._base_digest
        return self._frame(b"\x91" + encode(self._base))

    def next(self) -> tuple[int, bytes]:
        """The next frame: number of blocks, and bytes to publish."""
        if len(self._held) == WINDOW:
            chain = self._held.popleft()
            self._chains.append(chain)
            self._count, self._digest = self._count - chain.blocks, self._digest - chain.digest
            return chain.blocks, self._frame(chain.removed)
        chain = self._chains.popleft()
        self._held.append(chain)
        self._count, self._digest = self._count + chain.blocks, self._digest + chain.digest
        return chain.blocks, self._frame(chain.stored)

    def beat(self) -> bytes:
        """A Check and a heartbeat, as sent by an agent once per second."""
        check = Check(self._count, self._digest & _MASK64)
        frame = self._frame(b"\x91" + encode(check)) if self.seq else b""
        return frame + self.heartbeat(with_card=self._beats % CARD_BEATS == 0)

    def heartbeat(self, *, with_card: bool) -> bytes:
        """The heartbeat alone."""
        self._beats += 1
        ranks = [RankBeat(0, self.incarnation, self.seq, False, 1, 0, 0.5)]
        card = self._card if with_card else None
        beat = WorkerBeat(VERSION, self.incarnation, "up", POOL, ranks, 1, card, round(BEAT_S * 1000))
        return _publish(self._beat, encode_beat(beat))

    def snapshot(self) -> bytes:
        """A snapshot, the answer to a replica that missed a frame."""
        ops: list[Op] = [self._base, *(chain.op for chain in self._held)] if self.seq else []
        return encode(SnapshotChunk(self.seq or 1, self.seq, 0, 1, ops, self.incarnation))

    def _frame(self, ops: bytes) -> bytes:
        self.seq += 1
        return _publish(self._live, self._head + self.seq.to_bytes(8, "big") + ops)


def _chain(length: int, parent: int, rng: random.Random) -> Chain:
    hashes = [rng.getrandbits(64) for _ in range(length)]
    op = Stored(DEVICE, parent, pack_hashes(hashes))
    removed = Removed(DEVICE, pack_hashes(hashes[::-1]))
    return Chain(length, sum(hashes), b"\x91" + encode(op), b"\x91" + encode(removed), op)


def _publish(subject: bytes, payload: bytes) -> bytes:
    return b"PUB %b %d\r\n%b\r\n" % (subject, len(payload), payload)


class Nats:
    """One blocking connection: one thread reads, and the holder of the lock writes."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self.lock = threading.Lock()
        self._socket = socket.create_connection((address.hostname or "127.0.0.1", address.port or 4222))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = self._socket.makefile("rb")
        self._read.readline()  # INFO
        self.write(b'CONNECT {"verbose":false,"pedantic":false}\r\n')

    def write(self, data: bytes) -> None:
        """Send bytes; blocks while the server does not read."""
        self._socket.sendall(data)

    def listen(self, mock: MockFleet) -> None:
        """Answer messages until the connection ends."""
        while line := self._read.readline():
            if line.startswith(b"PING"):
                with self.lock:
                    self.write(b"PONG\r\n")
            elif line.startswith(b"MSG"):
                _, subject, _sid, *reply, size = line.split()
                payload = self._read.read(int(size) + 2)[:-2]
                with self.lock:
                    self.write(mock.answer(subject.decode(), payload, reply[0] if reply else b""))


class MockFleet:
    """All workers, which publish in turn."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._by_id = {worker.id: worker for worker in workers}
        self._turn = self._beat_turn = 0

    def answer(self, subject: str, payload: bytes, reply: bytes) -> bytes:
        """The answer to a hello: all heartbeats; to a replay request: a snapshot."""
        if subject.endswith(".hello"):
            return b"".join(worker.heartbeat(with_card=True) for worker in self._workers)
        decode_request(payload)
        return _publish(reply, self._by_id[WorkerId(subject.rpartition(".")[2])].snapshot())

    def burst(self, blocks: float) -> tuple[int, int, bytes]:
        """Frames with about this many blocks, of workers in turn: blocks, frames, bytes to publish."""
        sent, parts = 0, []
        while sent < blocks:
            worker = self._workers[self._turn]
            self._turn = (self._turn + 1) % len(self._workers)
            size, frame = worker.next()
            sent += size
            parts.append(frame)
        return sent, len(parts), b"".join(parts)

    def beats(self, count: int) -> bytes:
        """The heartbeats of the next `count` workers."""
        parts = []
        for _ in range(count):
            parts.append(self._workers[self._beat_turn].beat())
            self._beat_turn = (self._beat_turn + 1) % len(self._workers)
        return b"".join(parts)

    def begin(self) -> bytes:
        """Cards first, so that feeds begin empty; then the base of every worker."""
        cards = [worker.heartbeat(with_card=True) for worker in self._workers]
        return b"".join([*cards, *(worker.first() for worker in self._workers)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish until the process is ended; prints the totals as one line of JSON per second."""
    flags = _parser().parse_args(arguments)
    subjects, rng = Subjects(flags.namespace), random.Random(1)
    fleet = MockFleet([Worker(number, flags.engine, subjects, rng) for number in range(flags.workers)])
    nats = Nats(flags.nats)
    with nats.lock:
        nats.write(f"SUB {subjects.hello} 1\r\nSUB {subjects.kv_replay(WorkerId('*'))} 2\r\n".encode())
    threading.Thread(target=nats.listen, args=(fleet,), daemon=True).start()
    with nats.lock:
        nats.write(fleet.begin())
    _send(nats, fleet, flags.blocks_s, flags.workers, flags.burst_ms / 1000)
    return 0


def _send(nats: Nats, fleet: MockFleet, blocks_s: float, workers: int, tick_s: float) -> None:
    blocks = frames = beats = 0
    worst = 0.0
    reported_at = start = time.perf_counter()
    while True:
        now = time.perf_counter()
        elapsed = now - start
        due_blocks, due_beats = elapsed * blocks_s, int(elapsed / BEAT_S * workers)
        with nats.lock:
            sent, count, data = fleet.burst(due_blocks - blocks)
            nats.write(data + fleet.beats(due_beats - beats))
        blocks, frames, beats = blocks + sent, frames + count, due_beats
        worst = max(worst, time.perf_counter() - now)
        if now - reported_at >= 1:
            reported_at = now
            print(
                json.dumps({"at": time.time(), "blocks": blocks, "frames": frames, "worst_s": worst}),
                flush=True,
            )
            worst = 0.0
        time.sleep(max(0.0, tick_s - (time.perf_counter() - now)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.kit.bench.mock_fleet")
    add = parser.add_argument
    add("--nats", required=True)
    add("--namespace", required=True)
    add("--engine", required=True, help="engine URL announced by all workers")
    add("--workers", type=int, default=1000)
    add("--blocks-s", type=float, default=200_000.0)
    add("--burst-ms", type=float, default=TICK_S * 1000)
    return parser


if __name__ == "__main__":
    sys.exit(main())
