"""Puts an engine's batches in order: live batches, replays, gaps and restarts. No sockets, no clock.

    begin ────ask 0────> recovering ──replayed──> live ──gap: ask next-1──> recovering …
    resume ──ask last──┘     │  live batches are held, in order of arrival
                             └─ failed MAX_ATTEMPTS times ──> lost; continue with live batches

Engines number batches from 0 and start again when they restart, so a number alone proves nothing. A replay
is therefore requested from the last applied batch, inclusive:

- the engine returns that batch unchanged: the rest of the answer continues the known history;
- it returns a different batch under that number, or nothing: it has restarted;
- its buffer no longer reaches back that far: history is lost.

A live batch with an old number is a repeat if its bytes are known, otherwise a restart. One restart is not
visible here: an engine that restarts and is received again exactly at `next_seq`. The agent finds it by the
start time of the process. `resume` requests the last batch that a former agent applied; its table is used
only after that batch has come back unchanged.

Invariants: all batches before `next_seq` since the last Restarted or Lost are applied, each once; digests
are kept of the newest of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from xxhash import xxh3_128_digest

# The size of vLLM's replay buffer: an older batch cannot be sent again.
REMEMBERED_BATCHES = 10_000
# Live batches that wait for a replay. Beyond either limit the oldest are dropped, which makes a gap.
HELD_BATCHES = 20_000
HELD_BYTES = 64 * 1024 * 1024
# Replays without an answer, or gaps without progress, until missing batches are given up.
MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Apply:
    """The next batch of the engine's history."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Restarted:
    """The next batches are the engine's history from its start: begin with an empty table."""


@dataclass(frozen=True, slots=True)
class Continued:
    """The next batches continue what a former agent has applied: begin with its table."""


@dataclass(frozen=True, slots=True)
class LostBatches:
    """Batches are missing and cannot be had: blocks in the table may no longer exist."""


Action: TypeAlias = Apply | Restarted | Continued | LostBatches
Numbered: TypeAlias = tuple[int, bytes]
# A batch with its sequence number.


@dataclass(frozen=True, slots=True)
class Step:
    """Actions to perform in order; then a replay to request from this number, unless it is None."""

    actions: Sequence[Action] = ()
    replay_from: int | None = None


class EngineStream:
    """The order of one rank's batches. Every method that takes an input returns the resulting Step."""

    def __init__(self, *, can_replay: bool) -> None:
        self.is_complete = False
        self.next_seq: int | None = None
        self._can_replay = can_replay
        self._asked: int | None = None
        self._held_before_asking = 0
        self._attempts = 0
        self._held: deque[Numbered] = deque()
        self._held_bytes = 0
        self._digests: dict[int, bytes] = {}
        self._is_unproven = False
        self._was_complete = False

    @property
    def is_recovering(self) -> bool:
        """Whether a replay has been requested and not answered."""
        return self._asked is not None

    @property
    def is_beginning(self) -> bool:
        """Whether it is not known yet where the available history begins."""
        return self.is_recovering and (self._is_unproven or self.next_seq == 0)

    def begin(self) -> Step:
        """Start at the engine's first batch, with an empty table."""
        self._start_over()
        self._drop_held()
        self.next_seq = 0 if self._can_replay else None
        self._ask(self.next_seq)
        return Step([Restarted()], self._asked)

    def resume(self, seq: int, digest: bytes, *, was_complete: bool) -> Step:
        """Continue after batch `seq` of a former agent, if the engine returns that very batch."""
        if not self._can_replay:
            return self.begin()  # without a replay nothing proves that the engine is the same
        self._start_over()
        self._drop_held()
        self.next_seq = seq + 1
        self._digests[seq] = digest
        self._is_unproven, self._was_complete = True, was_complete
        self._ask(seq)
        return Step((), seq)

    def verify(self) -> Step:
        """In quiet times: ask whether the engine is still the process that sent the last batch."""
        if not self._can_replay or self.is_recovering or self.next_seq is None:
            return Step()
        self._ask(max(0, self.next_seq - 1))
        return Step((), self._asked)

    def receive(self, seq: int, payload: bytes) -> Step:
        """Take a live batch."""
        if self.is_recovering:
            self._hold(seq, payload)
            return Step()
        return self._advance([], [(seq, payload)])

    def replayed(self, asked: int, batches: Sequence[Numbered]) -> Step:
        """Take everything that the engine returned for the request from number `asked`."""
        if asked != self._asked:
            return Step()  # the stream has started over since: the answer is stale
        held = self._take_held()[self._held_before_asking :]
        self._ask(None)
        if self.next_seq and not self._continues(asked, batches):
            actions: list[Action] = [self._restart()]
            self._ask(0)
            return self._advance(actions, held)
        actions = []
        if batches and batches[0][0] > asked:
            actions.append(self._lose(batches[0][0]))
        elif self._is_unproven:
            actions.append(self._continue())
        elif self.next_seq == 0:
            self.is_complete = True
        return self._advance(actions, [*batches, *held])

    def replay_failed(self, asked: int) -> Step:
        """Take the failure of a replay: request it again or, after MAX_ATTEMPTS, do without."""
        if asked != self._asked:
            return Step()
        self._attempts += 1
        if self._attempts < MAX_ATTEMPTS:
            self._ask(asked)
            return Step((), asked)
        self._ask(None)
        actions: list[Action] = [self._lose(None)] if self._is_unproven else []
        self._attempts = MAX_ATTEMPTS  # so that `_handle_gap` gives up the next gap without a replay
        self.next_seq = self.next_seq or None
        return self._advance(actions, self._take_held())

    def _continues(self, asked: int, batches: Sequence[Numbered]) -> bool:
        """False if the answer shows that another process sent batch `asked`."""
        if not batches:
            return False
        seq, payload = batches[0]
        return seq > asked or self._digests.get(seq) in {None, digest_of(payload)}

    def _ask(self, seq: int | None) -> None:
        """Note that a replay from `seq` is requested, or none.

        Batches held at this moment need not be applied after the answer: an engine stores a batch in its
        replay buffer before it answers, so they are in the answer, or from a former life of the engine.
        """
        self._asked = seq
        self._held_before_asking = len(self._held)

    def _advance(self, actions: list[Action], batches: Iterable[Numbered]) -> Step:
        """Apply batches in order of arrival; from a gap on, hold them."""
        for seq, payload in batches:
            if not self.is_recovering and self._is_repeat(seq, payload):
                continue  # both live and replayed
            if self._is_due(seq, actions):
                actions.append(self._apply(seq, payload))
            else:
                self._hold(seq, payload)
        self._ask(self._asked)  # again: the loop may have held batches that arrived before this request
        return Step(actions, self._asked)

    def _is_repeat(self, seq: int, payload: bytes) -> bool:
        is_old = self.next_seq is not None and seq < self.next_seq
        return is_old and self._digests.get(seq) == digest_of(payload)

    def _is_due(self, seq: int, actions: list[Action]) -> bool:
        """Whether a batch can be applied now. A gap before it starts a replay, a lower number a new life."""
        if self.is_recovering:
            return False
        if self.next_seq is not None and seq < self.next_seq:
            actions.append(self._restart())
        if self.next_seq is None:
            self.next_seq = seq  # the first batch received, and no replay can bring earlier ones
            self.is_complete = seq == 0
        elif seq > self.next_seq:
            self._handle_gap(seq, self.next_seq, actions)
        return self._asked is None

    def _handle_gap(self, seq: int, next_seq: int, actions: list[Action]) -> None:
        """Request the batches that are missing before `seq`, or give them up."""
        if self._can_replay and self._attempts < MAX_ATTEMPTS:
            self._attempts += 1
            self._asked = max(0, next_seq - 1)
        else:
            actions.append(self._lose(seq))

    def _apply(self, seq: int, payload: bytes) -> Action:
        self._attempts = 0
        self._digests[seq] = digest_of(payload)
        self._digests.pop(seq - REMEMBERED_BATCHES, None)
        self.next_seq = seq + 1
        return Apply(seq, payload)

    def _continue(self) -> Action:
        self._is_unproven = False
        self.is_complete = self._was_complete
        return Continued()

    def _restart(self) -> Action:
        self._start_over()
        self.next_seq = 0
        self.is_complete = True
        return Restarted()

    def _lose(self, next_seq: int | None) -> Action:
        self._start_over()
        self.next_seq = next_seq
        return LostBatches()

    def _start_over(self) -> None:
        self.is_complete = False
        self._is_unproven = False
        self._attempts = 0
        self._digests.clear()

    def _hold(self, seq: int, payload: bytes) -> None:
        self._held.append((seq, payload))
        self._held_bytes += len(payload)
        while len(self._held) > HELD_BATCHES or self._held_bytes > HELD_BYTES:
            self._held_bytes -= len(self._held.popleft()[1])
            self._held_before_asking = max(0, self._held_before_asking - 1)

    def _take_held(self) -> list[Numbered]:
        held = list(self._held)
        self._drop_held()
        return held

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0


def digest_of(payload: bytes) -> bytes:
    """16 bytes by which a batch is recognised when it is sent again."""
    return xxh3_128_digest(payload)
