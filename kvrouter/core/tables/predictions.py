"""What was foretold of requests, held against what their engines then reported.

    booking ──> Prediction ──┐
    usage in the answer ─────┴─> observe ──> tallies (metrics) and alarms (core/audit/problems.py)

    good answer ──> expect: its first block must be in the index now, or soon ──> look

Two questions are asked of a worker. Does its engine report the cached tokens, and count the prompt tokens,
that were foretold? That needs answers that carry usage. And do the blocks of requests that it has served
turn up in its events? That needs nothing from the answer, so a worker whose hashes differ is found out
even where no client asks for usage.

Requests that may differ for good reasons (see `Prediction.is_firm`) are tallied and alarm nobody.
Everything is bounded: windows of 16 outcomes, and 12 kinds of request a worker.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec import Struct

from kvrouter.core.wire.ids import Target, WorkerId

WINDOW = 16
LEAST = 8
"""Fewer outcomes than this alarm nobody: chance, or one odd client."""
ANNOUNCE_S = 2.0
"""Events travel in some 20 ms. What has not come after this long does not come."""
MAX_EXPECTED = 256
"""Requests whose events are waited for; those beyond are passed over."""
SURE_BLOCKS = 4
"""So many blocks of an estimate are at least one of tokens, in any language."""
ERROR_BLOCKS = (-256, -64, -16, -4, -1, 0, 1, 4, 16, 64, 256)
"""Bucket bounds of the error of a prediction, in blocks; below 0 the engine had more than foretold."""


class Kind(NamedTuple):
    """What requests have in common that go wrong together: how their token ids come about, and the seed."""

    prompt: Literal["chat", "text", "tokens"]
    lora: bool = False
    salt: bool = False


class Usage(Struct, frozen=True, gc=False):
    """What an engine says of a request; None where it does not."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class Prediction(Struct, frozen=True, gc=False):
    """What was foretold of a request at the moment of its booking.

    `blocks` are those its target was taken to hold, over all tiers; `in_flight` says that some of them
    only by requests then in flight. `kind` is None for a request whose tokens are only approximately known
    (an image in a chat). `is_single`: one prompt, one answer; engines report cached tokens of one prompt.
    """

    target: Target
    kind: Kind | None
    isl: int
    block_size: int
    blocks: int
    in_flight: bool = False
    is_single: bool = True
    is_firm: bool = True
    """Whether nothing is known that might prove it wrong: the request did not wait behind others, whose
    prefill changes the cache, the feed of its target is whole and in step, and its engine reads its cache."""
    is_estimate: bool = False
    """The prompt was not tokenized, or not to its end: its length is a guess, the engine may have more of it
    than could be foretold, and a few blocks of text may be less than one of tokens."""


class Alarm:
    """Raised when nearly all of the last outcomes were bad, over when enough of them are good again."""

    __slots__ = ("_clear_at", "_raise_at", "_recent", "bad", "is_raised")

    def __init__(self, raise_at: float, clear_at: float) -> None:
        self._raise_at = raise_at
        self._clear_at = clear_at
        self._recent: deque[bool] = deque()
        self.bad = 0
        """Bad ones of the last outcomes."""
        self.is_raised = False

    @property
    def total(self) -> int:
        """The last outcomes."""
        return len(self._recent)

    @property
    def is_well(self) -> bool:
        """Whether there is evidence, and it speaks for the worker."""
        return self.bad < self.total and not self.is_raised

    def note(self, is_bad: bool) -> None:
        """One more outcome."""
        self._recent.append(is_bad)
        self.bad += is_bad
        if len(self._recent) > WINDOW:
            self.bad -= self._recent.popleft()
        share = self.bad / self.total
        if share >= self._raise_at and self.total >= LEAST:
            self.is_raised = True
        elif share <= self._clear_at:
            self.is_raised = False


def _mostly() -> Alarm:
    return Alarm(0.5, 0.125)


def _nearly_always() -> Alarm:
    return Alarm(0.9, 0.5)


@dataclass(slots=True)
class KindEvidence:
    """Alarms about one kind of request on one worker."""

    lengths: Alarm = field(default_factory=_mostly)
    """Bad: the engine counts other prompt tokens than the frontend."""
    unannounced: Alarm = field(default_factory=_nearly_always)
    """Bad: no event has named the request's first block."""
    blind: Alarm = field(default_factory=_nearly_always)
    """Bad: nothing was foretold, and the engine had some of it."""


@dataclass(slots=True)
class Record:
    """All about one worker."""

    predictions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By `(exact|over|under, index|in_flight)`."""
    errors: list[int] = field(default_factory=lambda: [0] * (len(ERROR_BLOCKS) + 1))
    """Predictions by error, in the buckets of ERROR_BLOCKS and one above."""
    predicted_tokens: int = 0
    reported_tokens: int = 0
    lengths: Counter[str] = field(default_factory=Counter)
    """Answers by `same` or `different` number of prompt tokens."""
    announced: Counter[str] = field(default_factory=Counter)
    """Requests by whether events named their blocks: `found` or `missing`."""
    kinds: dict[Kind, KindEvidence] = field(default_factory=dict)
    uncached: Alarm = field(default_factory=_nearly_always)
    """Bad: blocks were foretold, and the engine had none."""
    uneven: Alarm = field(default_factory=_nearly_always)
    """Bad: the cached tokens are no multiple of the block size."""
    inexact: Alarm = field(default_factory=_nearly_always)
    """Bad: the prediction differs from what the engine had."""
    last_lengths: tuple[int, int] = (0, 0)
    """Prompt tokens where they last differed: the engine's, ours."""
    last_cached: tuple[int, int] = (0, 0)
    """Cached tokens where they last differed: the engine's, as foretold."""
    reports_cached: bool = False
    """Whether it has reported cached tokens; one that has not may lack the flag for it."""
    reports_zero: bool = False
    """Whether it has reported them when there were none."""

    def evidence(self, kind: Kind) -> KindEvidence:
        """The alarms about a kind of request."""
        found = self.kinds.get(kind)
        if found is None:
            found = self.kinds[kind] = KindEvidence()
        return found


class _Expected(NamedTuple):
    target: Target
    kind: Kind
    hash_: int
    until: float


class Truth:
    """The records of one pool's workers."""

    def __init__(self) -> None:
        self.records: dict[WorkerId, Record] = {}
        self._expected: dict[tuple[Target, int], _Expected] = {}

    def observe(self, prediction: Prediction, usage: Usage) -> None:
        """An answer has come, with what it says about its prompt."""
        record = self._record(prediction.target)
        if usage.prompt_tokens is not None and prediction.isl and not prediction.is_estimate:
            _note_length(record, prediction, usage.prompt_tokens)
        cached_tokens = _cached_tokens(record, usage)
        if cached_tokens is not None and prediction.is_single and prediction.isl:
            _tally(record, prediction, cached_tokens)
            if prediction.is_firm and not prediction.in_flight:
                _note_cached(record, prediction, cached_tokens)

    def expect(self, target: Target, kind: Kind, hashes: Sequence[int], now: float) -> None:
        """A request of these blocks was served: the target's events must name the first of them.

        Equal requests at the same time are one piece of evidence.
        """
        if hashes and len(self._expected) < MAX_EXPECTED:
            expected = _Expected(target, kind, hashes[0], now + ANNOUNCE_S)
            self._expected.setdefault((target, hashes[-1]), expected)

    @property
    def is_waiting(self) -> bool:
        """Whether there are blocks that events should soon name."""
        return bool(self._expected)

    def look(self, now: float, holds: Callable[[Target, int], bool | None]) -> None:
        """Which of the expected blocks have come; `holds` says None where that cannot be known now."""
        waiting, self._expected = self._expected, {}
        for key, expected in waiting.items():
            is_held = holds(expected.target, expected.hash_)
            if is_held is False and now < expected.until:
                self._expected[key] = expected
            elif is_held is not None:
                self._note_announced(expected, is_held)

    def _note_announced(self, expected: _Expected, is_held: bool) -> None:
        record = self._record(expected.target)
        record.announced["found" if is_held else "missing"] += 1
        record.evidence(expected.kind).unannounced.note(not is_held)

    def keep(self, worker_ids: Iterable[WorkerId]) -> None:
        """Forget all workers but these."""
        kept = set(worker_ids)
        for worker_id in [worker_id for worker_id in self.records if worker_id not in kept]:
            del self.records[worker_id]

    def _record(self, target: Target) -> Record:
        record = self.records.get(target.worker_id)
        if record is None:
            record = self.records[target.worker_id] = Record()
        return record


def _cached_tokens(record: Record, usage: Usage) -> int | None:
    """What the engine had; None where that is not known.

    Some versions of vLLM leave the field out where it is 0. One that has once written a 0 does not, and
    means by a missing field that it does not know.
    """
    if usage.cached_tokens is not None:
        record.reports_cached = True
        record.reports_zero |= usage.cached_tokens == 0
        return usage.cached_tokens
    stands_for_zero = record.reports_cached and not record.reports_zero
    return 0 if stands_for_zero and usage.prompt_tokens is not None else None


def _note_length(record: Record, prediction: Prediction, prompt_tokens: int) -> None:
    if prediction.kind is None:
        return
    differs = prompt_tokens != prediction.isl
    record.lengths["different" if differs else "same"] += 1
    record.evidence(prediction.kind).lengths.note(differs)
    if differs:
        record.last_lengths = (prompt_tokens, prediction.isl)


def _tally(record: Record, prediction: Prediction, cached_tokens: int) -> None:
    predicted_tokens = prediction.blocks * prediction.block_size
    error = predicted_tokens - cached_tokens
    result = "exact" if error == 0 else "over" if error > 0 else "under"
    record.predictions[result, "in_flight" if prediction.in_flight else "index"] += 1
    blocks = error / prediction.block_size
    record.errors[bisect_left(ERROR_BLOCKS, blocks)] += 1
    record.predicted_tokens += predicted_tokens
    record.reported_tokens += cached_tokens
    if error:
        record.last_cached = (cached_tokens, predicted_tokens)


def _note_cached(record: Record, prediction: Prediction, cached_tokens: int) -> None:
    """Where neither side has anything, nothing is learnt; nor from more than an estimate could foretell."""
    if not prediction.blocks and not cached_tokens:
        return
    error = prediction.blocks * prediction.block_size - cached_tokens
    has_more = prediction.is_estimate and error < 0
    if not has_more:
        record.inexact.note(error != 0)
    if prediction.blocks >= (SURE_BLOCKS if prediction.is_estimate else 1):
        record.uncached.note(not cached_tokens)
    if cached_tokens:
        record.uneven.note(cached_tokens % prediction.block_size != 0)
        if prediction.kind is not None and not has_more:
            record.evidence(prediction.kind).blind.note(not prediction.blocks)
