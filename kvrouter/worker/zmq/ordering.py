"""Puts an engine's batches in order: live ones, replayed ones, gaps, restarts.

See docs/concepts/design.md#agent-state.

    begin ────ask 0────> recovering ──replayed──> live ──gap: ask next-1──> recovering …
    resume ──ask last──┘     │  live batches are held, in order of arrival
                             └─ failed too often ──> lost, go on with what comes

Engines number batches from 0 and start again when they restart, so a number alone proves nothing.
A replay asks from the last batch applied, inclusive: if the engine returns that one unchanged,
what follows is its continuation; if it returns another one, or none, the engine has restarted; if
it no longer reaches back that far, history is lost. A live batch with an old number is a repeat if
its bytes are known, else a restart. (An engine that restarts and happens to be heard again exactly at
`next_seq` is not seen here: the agent compares the start of its process.) `resume` asks in the same
way for the last batch that a former agent applied: nothing is gone on from before it has come back.

Invariants: all batches before `next_seq` since the last Restarted or Lost are applied, each
once; digests are kept of the newest of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from xxhash import xxh3_128_digest

REMEMBERED_BATCHES = 10_000
"""vLLM's own replay buffer: what is older cannot come again."""
HELD_BATCHES = 20_000
HELD_BYTES = 64 * 1024 * 1024
"""Live batches that wait for a replay; beyond either the oldest go, and are a gap."""
MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Apply:
    """The next batch of the engine's history."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Restarted:
    """What follows is the engine's history from its start: begin with an empty table."""


@dataclass(frozen=True, slots=True)
class Continued:
    """What follows continues what a former agent has applied: begin with its table."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Batches are missing for good: what is in the table may no longer be there."""


Action: TypeAlias = Apply | Restarted | Continued | Lost
Numbered: TypeAlias = tuple[int, bytes]
"""A batch with its sequence number."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do, in this order; then ask the engine for a replay from a number, unless None."""

    actions: Sequence[Action] = ()
    replay_from: int | None = None


class EngineStream:
    """The order of one rank's batches. Every method returns what follows from it."""

    def __init__(self, *, can_replay: bool) -> None:
        self.is_complete = False
        self.next_seq: int | None = None
        self._can_replay = can_replay
        self._asked: int | None = None
        self._heard_before = 0
        self._attempts = 0
        self._held: deque[Numbered] = deque()
        self._held_bytes = 0
        self._digests: dict[int, bytes] = {}
        self._is_unproven = False
        self._was_complete = False

    @property
    def is_recovering(self) -> bool:
        """Whether a replay has been asked for and not answered."""
        return self._asked is not None

    @property
    def is_beginning(self) -> bool:
        """Whether it is not known yet from where the engine's history can be had."""
        return self.is_recovering and (self._is_unproven or self.next_seq == 0)

    def begin(self) -> Step:
        """Start, or start over with an empty table, at the engine's first batch."""
        self._start_over()
        self._drop_held()
        self.next_seq = 0 if self._can_replay else None
        self._ask(self.next_seq)
        return Step([Restarted()], self._asked)

    def resume(self, seq: int, digest: bytes, *, was_complete: bool) -> Step:
        """Go on behind batch `seq` that a former agent applied, if the engine returns that very batch."""
        if not self._can_replay:
            return self.begin()  # nothing can be proven
        self._start_over()
        self._drop_held()
        self.next_seq = seq + 1
        self._digests[seq] = digest
        self._is_unproven, self._was_complete = True, was_complete
        self._ask(seq)
        return Step((), seq)

    def verify(self) -> Step:
        """Ask whether the engine still is the one that sent the last batch; for quiet times."""
        if not self._can_replay or self.is_recovering or self.next_seq is None:
            return Step()
        self._ask(max(0, self.next_seq - 1))
        return Step((), self._asked)

    def receive(self, seq: int, payload: bytes) -> Step:
        """A live batch."""
        if self.is_recovering:
            self._hold(seq, payload)
            return Step()
        return self._advance([], [(seq, payload)])

    def replayed(self, asked: int, batches: Sequence[Numbered]) -> Step:
        """Everything the engine returned for the number `asked`."""
        if asked != self._asked:
            return Step()  # we have started over meanwhile
        held = self._take_held()[self._heard_before :]
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
        """No answer for `asked`. Ask again, a few times; then go on with what arrives."""
        if asked != self._asked:
            return Step()
        self._attempts += 1
        if self._attempts < MAX_ATTEMPTS:
            self._ask(asked)
            return Step((), asked)
        self._ask(None)
        actions: list[Action] = [self._lose(None)] if self._is_unproven else []
        self._attempts = MAX_ATTEMPTS  # a gap is now given up
        self.next_seq = self.next_seq or None
        return self._advance(actions, self._take_held())

    def _continues(self, asked: int, batches: Sequence[Numbered]) -> bool:
        """False if the answer shows that the engine is not the one that sent batch `asked`."""
        if not batches:
            return False
        seq, payload = batches[0]
        return seq > asked or self._digests.get(seq) in {None, digest_of(payload)}

    def _ask(self, seq: int | None) -> None:
        """Ask for a replay from `seq`, or for none.

        What was heard before the question is in the answer, or of another life of the engine:
        an engine remembers a batch before it answers anything else.
        """
        self._asked = seq
        self._heard_before = len(self._held)

    def _advance(self, actions: list[Action], batches: Iterable[Numbered]) -> Step:
        """Go through batches in order of arrival; from a gap on they are held."""
        for seq, payload in batches:
            if not self.is_recovering and self._is_repeat(seq, payload):
                continue  # both live and replayed
            if self._is_due(seq, actions):
                actions.append(self._apply(seq, payload))
            else:
                self._hold(seq, payload)
        self._ask(self._asked)  # now, after all that was heard before
        return Step(actions, self._asked)

    def _is_repeat(self, seq: int, payload: bytes) -> bool:
        is_old = self.next_seq is not None and seq < self.next_seq
        return is_old and self._digests.get(seq) == digest_of(payload)

    def _is_due(self, seq: int, actions: list[Action]) -> bool:
        """Whether a batch can be applied now; if some before it are missing, sees to that."""
        if self.is_recovering:
            return False
        if self.next_seq is not None and seq < self.next_seq:
            actions.append(self._restart())
        if self.next_seq is None:
            self.next_seq = seq  # the first batch heard, and nothing before it to be had
            self.is_complete = seq == 0
        elif seq > self.next_seq:
            self._handle_gap(seq, self.next_seq, actions)
        return self._asked is None

    def _handle_gap(self, seq: int, next_seq: int, actions: list[Action]) -> None:
        """Ask for what is missing before `seq`, or give it up."""
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
        return Lost()

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
            self._heard_before = max(0, self._heard_before - 1)

    def _take_held(self) -> list[Numbered]:
        held = list(self._held)
        self._drop_held()
        return held

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0


def digest_of(payload: bytes) -> bytes:
    """What is kept of a batch to know it again."""
    return xxh3_128_digest(payload)
