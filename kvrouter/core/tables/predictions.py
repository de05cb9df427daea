"""Predictions of cached tokens, compared with what the engines then report.

    booking ──> Prediction ──┐
    usage in the answer ─────┴─> observe ──> counts (metrics) and alarms (core/audit/problems.py)

    good answer ──> expect: its first block must be in the index now, or soon ──> look

Two comparisons are made. Do the prompt tokens and cached tokens that an engine reports equal the prediction?
That needs answers that carry usage. Do the blocks of served requests appear in the worker's events? That
needs nothing from the answer, so it finds a worker whose hashes differ even if no client asks for usage.

A request that may differ for a good reason (see `Prediction.is_firm`) is counted and raises no alarm.
Everything is bounded: windows of 16 outcomes, and 20 kinds of request for each worker.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec import Struct

from kvrouter.core.wire.ids import Target, WorkerId

# An alarm looks at the last 16 outcomes. With fewer than 8 it stays off: chance, or one unusual client.
WINDOW = 16
LEAST = 8
# Events arrive within some 20 ms. A block that has not appeared after 2 s will not appear.
ANNOUNCE_S = 2.0
# Requests whose events are awaited at the same time; more are not checked, which loses only evidence.
MAX_EXPECTED = 64
# An estimated prediction of 4 blocks of text is at least one block of tokens, in any language.
SURE_BLOCKS = 4
# Bucket bounds of the error of a prediction, in blocks; below 0 the engine had more than predicted.
ERROR_BLOCKS = (-256, -64, -16, -4, -1, 0, 1, 4, 16, 64, 256)


class PredictionKind(NamedTuple):
    """Requests that fail together: their token ids are made the same way, with the same kind of seed."""

    prompt: Literal["chat", "messages", "responses", "text", "tokens"]
    lora: bool = False
    salt: bool = False


class Usage(Struct, frozen=True, gc=False):
    """The token counts that an engine reports for a request; None: not reported."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class Prediction(Struct, frozen=True, gc=False):
    """The prediction for one request, as of its booking.

    `blocks`: cached blocks that its target should have, over all tiers. `in_flight`: some of them are known
    only from requests in flight. `kind`: None if the token ids are known only in part (an image in a chat).
    `is_single`: one prompt and one answer; engines report the cached tokens of one prompt only.
    """

    target: Target
    kind: PredictionKind | None
    isl: int
    block_size: int
    blocks: int
    in_flight: bool = False
    is_single: bool = True
    # Nothing is known that may prove the prediction wrong: the request did not wait behind others, whose
    # prefill changes the cache; the feed of its target is live and complete; its engine uses its cache.
    is_firm: bool = True
    # The prompt was tokenized in part or not at all: its length is a guess, the engine may have more of it
    # than can be predicted, and a few blocks of text may be less than one block of tokens.
    is_estimate: bool = False
    # Its engine is taken for one that reuses one block less than it could: `blocks` has that taken off.
    is_one_less: bool = False


class Alarm:
    """Raised when the bad share of the last outcomes reaches `raise_at`, cleared when it falls to `clear_at`.

    Two bounds, so that a share near one of them does not switch the alarm on and off.
    """

    __slots__ = ("_clear_at", "_raise_at", "_recent", "bad", "is_raised")

    def __init__(self, raise_at: float, clear_at: float) -> None:
        self._raise_at = raise_at
        self._clear_at = clear_at
        self._recent: deque[bool] = deque()
        self.bad = 0  # of the last outcomes
        self.is_raised = False

    @property
    def total(self) -> int:
        return len(self._recent)

    @property
    def is_well(self) -> bool:
        """Whether there are outcomes, at least one of them good, and the alarm is not raised."""
        return self.bad < self.total and not self.is_raised

    def note(self, is_bad: bool) -> None:
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
    """Alarms about one kind of request on one worker; the comment states the bad outcome."""

    # the engine counts another number of prompt tokens than the frontend
    lengths: Alarm = field(default_factory=_mostly)
    # no event has named the request's first block
    unannounced: Alarm = field(default_factory=_nearly_always)
    # no block was predicted, and the engine had cached tokens
    blind: Alarm = field(default_factory=_nearly_always)


@dataclass(slots=True)
class WorkerRecord:
    """The outcomes of one worker's requests. The comment above an Alarm states the bad outcome."""

    # by `(exact|over|under, index|in_flight|doubtful)`
    predictions: Counter[tuple[str, str]] = field(default_factory=Counter)
    # predictions by error: the buckets of ERROR_BLOCKS, and one above
    errors: list[int] = field(default_factory=lambda: [0] * (len(ERROR_BLOCKS) + 1))
    predicted_tokens: int = 0
    reported_tokens: int = 0
    # answers by `same` or `different` number of prompt tokens
    lengths: Counter[str] = field(default_factory=Counter)
    # requests by `found` or `missing`: whether events named their blocks
    announced: Counter[str] = field(default_factory=Counter)
    kinds: dict[PredictionKind, KindEvidence] = field(default_factory=dict)
    # blocks were predicted, and the engine had no cached token
    uncached: Alarm = field(default_factory=_nearly_always)
    # the cached tokens are not a multiple of the block size
    uneven: Alarm = field(default_factory=_nearly_always)
    # the prediction differs from what the engine had
    inexact: Alarm = field(default_factory=_nearly_always)
    # by how many tokens each of the last predictions was too high; below 0 too low
    misses: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    # the engine had exactly one block less than it could reuse: no problem, but EAGLE or MTP
    one_less: Alarm = field(default_factory=_nearly_always)
    # (engine's, frontend's) prompt tokens, and (engine's, predicted) cached tokens, when they last differed
    last_lengths: tuple[int, int] = (0, 0)
    last_cached: tuple[int, int] = (0, 0)
    # an engine that has never reported cached tokens may be started without the flag for it
    reports_cached: bool = False
    reports_zero: bool = False

    def evidence(self, kind: PredictionKind) -> KindEvidence:
        found = self.kinds.get(kind)
        if found is None:
            found = self.kinds[kind] = KindEvidence()
        return found


class _Expected(NamedTuple):
    target: Target
    kind: PredictionKind
    hash_: int
    until: float


class PredictionTable:
    """One pool's workers: what was predicted for their requests, and what their engines reported."""

    def __init__(self) -> None:
        self.records: dict[WorkerId, WorkerRecord] = {}
        self._expected: dict[tuple[Target, int], _Expected] = {}

    def observe(self, prediction: Prediction, usage: Usage) -> None:
        """Compare a prediction with the usage in its answer."""
        record = self._record(prediction.target)
        if usage.prompt_tokens is not None and prediction.isl and not prediction.is_estimate:
            _note_length(record, prediction, usage.prompt_tokens)
        cached_tokens = _cached_tokens(record, usage)
        if cached_tokens is not None and prediction.is_single and prediction.isl:
            _count(record, prediction, cached_tokens)
            if prediction.is_firm and not prediction.in_flight:
                _note_cached(record, prediction, cached_tokens)

    def reuses_one_less(self, worker_id: WorkerId) -> bool | None:
        """Whether a worker's engine reuses one block less than it could; None: too few answers to know."""
        record = self.records.get(worker_id)
        if record is None or record.one_less.total < LEAST:
            return None
        return record.one_less.is_raised

    def expect(self, target: Target, kind: PredictionKind, hashes: Sequence[int], now: float) -> None:
        """A request with these blocks was served: the target's events must name the first of them.

        Equal requests at the same time count once: the engine announces their blocks once.
        """
        if hashes and len(self._expected) < MAX_EXPECTED:
            expected = _Expected(target, kind, hashes[0], now + ANNOUNCE_S)
            self._expected.setdefault((target, hashes[-1]), expected)

    @property
    def is_waiting(self) -> bool:
        """Whether blocks are expected to appear in events."""
        return bool(self._expected)

    def look(self, now: float, holds: Callable[[Target, int], bool | None]) -> None:
        """Record which of the expected blocks have appeared; `holds` returns None where it cannot know."""
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
        """Forget all workers except these."""
        kept = set(worker_ids)
        for worker_id in [worker_id for worker_id in self.records if worker_id not in kept]:
            del self.records[worker_id]

    def _record(self, target: Target) -> WorkerRecord:
        record = self.records.get(target.worker_id)
        if record is None:
            record = self.records[target.worker_id] = WorkerRecord()
        return record


def _cached_tokens(record: WorkerRecord, usage: Usage) -> int | None:
    """Cached tokens that the engine had; None if that is not known.

    Some versions of vLLM omit the field when it is 0, so a missing field is read as 0. An engine that has
    reported a 0 does not omit it: from it, a missing field means that it does not know.
    """
    if usage.cached_tokens is not None:
        record.reports_cached = True
        record.reports_zero |= usage.cached_tokens == 0
        return usage.cached_tokens
    stands_for_zero = record.reports_cached and not record.reports_zero
    return 0 if stands_for_zero and usage.prompt_tokens is not None else None


def _note_length(record: WorkerRecord, prediction: Prediction, prompt_tokens: int) -> None:
    if prediction.kind is None:
        return
    differs = prompt_tokens != prediction.isl
    record.lengths["different" if differs else "same"] += 1
    record.evidence(prediction.kind).lengths.note(differs)
    if differs:
        record.last_lengths = (prompt_tokens, prediction.isl)


def _count(record: WorkerRecord, prediction: Prediction, cached_tokens: int) -> None:
    predicted_tokens = prediction.blocks * prediction.block_size
    error = predicted_tokens - cached_tokens
    result = "exact" if error == 0 else "over" if error > 0 else "under"
    record.predictions[result, _source(prediction)] += 1
    blocks = error / prediction.block_size
    record.errors[bisect_left(ERROR_BLOCKS, blocks)] += 1
    record.predicted_tokens += predicted_tokens
    record.reported_tokens += cached_tokens
    if error:
        record.last_cached = (cached_tokens, predicted_tokens)


def _source(prediction: Prediction) -> str:
    if prediction.in_flight:
        return "in_flight"
    return "index" if prediction.is_firm else "doubtful"


def _note_cached(record: WorkerRecord, prediction: Prediction, cached_tokens: int) -> None:
    if not prediction.blocks and not cached_tokens:
        return  # both sides have nothing: no evidence
    error = prediction.blocks * prediction.block_size - cached_tokens
    # an estimate may be lower than the truth for a good reason, so a higher report proves nothing
    has_more = prediction.is_estimate and error < 0
    # the rule of the engine is learnt from these; a wrong guess of it is no wrong prediction
    other_rule = -prediction.block_size if prediction.is_one_less else prediction.block_size
    if prediction.blocks + prediction.is_one_less > 1 and not prediction.is_estimate:
        record.one_less.note(error == (0 if prediction.is_one_less else prediction.block_size))
    if not has_more and error != other_rule:
        record.inexact.note(error != 0)
        record.misses.append(error)
    if prediction.blocks >= (SURE_BLOCKS if prediction.is_estimate else 1):
        record.uncached.note(not cached_tokens)
    if cached_tokens:
        record.uneven.note(cached_tokens % prediction.block_size != 0)
        if prediction.kind is not None and not has_more:
            record.evidence(prediction.kind).blind.note(not prediction.blocks)
