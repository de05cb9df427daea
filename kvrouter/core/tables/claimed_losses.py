"""What peers say of prompts and lost workers, held against what this replica has seen itself.

    peer's LostWith ─────> the worker has ended, as seen here? ──yes──> DeadlyPrompts.lost
                              └──no──> claimed ──the shell probes it, its agent reports, its lease ends──┘
                                          └──DOUBT_S──> forgotten
    peer's DeadlyPrompt ──> was it lost at two of its workers, as counted here? ──yes──> DeadlyPrompts.learn
                              └──no──> claimed until it was, or until its time is over

A message is no proof: whoever may publish as a replica could have any prompt refused. A worker has ended, as
seen here, if a request was lost at it, its engine does not answer, its agent reports another engine or none,
or its lease has ended. A replica that has just begun has seen nothing, and believes its peers for JOIN_S.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from kvrouter.core.tables.deadly_prompts import (
    DEATH_S,
    DOUBT_S,
    KEPT_S,
    MOST_DEADLY,
    MOST_DEATHS,
    DeadlyPrompts,
)
from kvrouter.core.wire.ids import PoolId, PromptHash, WorkerId
from kvrouter.core.wire.ops import DeadlyPrompt, LostWith, Pardon

# Losses that are claimed of one worker, and workers of which any are; beyond it the oldest are forgotten.
MOST_CLAIMED = 512
MOST_WORKERS = 64
# By then the snapshots of all peers have come.
JOIN_S = 30.0


class ClaimedLoss(NamedTuple):
    """A peer says that a worker of the pool was lost with the prompt in hand."""

    prompt: PromptHash
    pool: PoolId
    sent_at: float
    lost_at: float


class _ClaimedVerdict(NamedTuple):
    pool: PoolId
    workers: tuple[WorkerId, ...]
    ends_at: float


class ClaimedLosses:
    """Peers' words about `prompts`, over all pools."""

    def __init__(self, prompts: DeadlyPrompts) -> None:
        self.prompts = prompts
        self.on_claim: Callable[[], None] = lambda: None
        """Called when there is another worker to probe."""
        self._began_at: float | None = None
        self._ended: dict[WorkerId, float] = {}  # the earliest first
        self._losses: dict[WorkerId, list[ClaimedLoss]] = {}
        self._verdicts: dict[PromptHash, _ClaimedVerdict] = {}

    def began(self, now: float) -> None:
        """The replica has asked who is there."""
        self._began_at = now if self._began_at is None else self._began_at

    def worker_ended(self, worker: WorkerId, now: float) -> None:
        """The replica has seen that the worker's engine has ended."""
        self._ended.pop(worker, None)
        self._ended[worker] = now
        while len(self._ended) > MOST_DEATHS:
            del self._ended[next(iter(self._ended))]
        for loss in self._losses.pop(worker, ()):
            self._count(loss, worker, now)
        for prompt, verdict in list(self._verdicts.items()):
            if worker in verdict.workers and self._is_proven(prompt, verdict.workers):
                del self._verdicts[prompt]
                self.prompts.learn(prompt, verdict.pool, verdict.workers, verdict.ends_at - now, now)

    def _count(self, loss: ClaimedLoss, worker: WorkerId, now: float) -> None:
        prompt, pool, sent_at, lost_at = loss
        known = self.prompts.suspected.get(prompt)
        if known is not None and worker in known.workers:
            return  # a second loss at a worker proves nothing, and would hold the prompt again
        self.prompts.lost(prompt, pool, worker, sent_at=sent_at, lost_at=lost_at, now=now)

    def hear(self, op: LostWith | DeadlyPrompt | Pardon, pool: PoolId, known: Set[str], now: float) -> None:
        """Take what a peer says of a prompt. `known`: the workers of the pool."""
        prompt = PromptHash(op.prompt)
        match op:
            # a worker that is not known here cannot be lost; an old loss proves nothing any more
            case LostWith(_, worker_id, sent_ms, lost_ms):
                if worker_id in known and lost_ms < KEPT_S * 1000:
                    loss = ClaimedLoss(prompt, pool, now - sent_ms / 1000, now - lost_ms / 1000)
                    self.lost(WorkerId(worker_id), loss, now)
            case DeadlyPrompt(_, worker_ids, ttl_ms):
                self.deadly(prompt, pool, [*map(WorkerId, worker_ids)], ttl_ms / 1000, now)
            case Pardon(_, 0):
                self._forget(prompt)
                self.prompts.answered(prompt)
            case Pardon(_, ttl_ms):
                self._forget(prompt)
                self.prompts.pardon(prompt, pool, ttl_ms / 1000, now)

    def lost(self, worker: WorkerId, loss: ClaimedLoss, now: float) -> None:
        """A peer has lost a worker that is known here."""
        if not self.prompts.ttl_s:
            return
        if self._ended.get(worker, float("-inf")) >= loss.lost_at - DEATH_S:
            self._count(loss, worker, now)
            return
        is_new = worker not in self._losses
        claimed = self._losses.setdefault(worker, [])
        claimed.append(loss)
        del claimed[:-MOST_CLAIMED]
        while len(self._losses) > MOST_WORKERS:
            del self._losses[next(iter(self._losses))]
        if is_new:
            self.on_claim()

    def deadly(
        self, prompt: PromptHash, pool: PoolId, workers: Sequence[WorkerId], ttl_s: float, now: float
    ) -> None:
        """A peer refuses a prompt for another `ttl_s`."""
        has_just_begun = self._began_at is None or now < self._began_at + JOIN_S
        if self._is_proven(prompt, workers) or (has_just_begun and len(set(workers)) > 1):
            self.prompts.learn(prompt, pool, workers, ttl_s, now)
            return
        ttl_s = min(ttl_s, self.prompts.ttl_s)
        self._verdicts.pop(prompt, None)
        self._verdicts[prompt] = _ClaimedVerdict(pool, tuple(workers), now + ttl_s)
        while len(self._verdicts) > MOST_DEADLY:
            del self._verdicts[next(iter(self._verdicts))]

    def _is_proven(self, prompt: PromptHash, workers: Sequence[WorkerId]) -> bool:
        known = self.prompts.suspected.get(prompt)
        return known is not None and len(set(known.workers) & set(workers)) > 1

    def _forget(self, prompt: PromptHash) -> None:
        self._verdicts.pop(prompt, None)
        for worker, losses in list(self._losses.items()):
            self._losses[worker] = [loss for loss in losses if loss.prompt != prompt]

    @property
    def has_unproven(self) -> bool:
        """Whether there is a worker to probe."""
        return bool(self._losses)

    def unproven(self, most: int) -> dict[WorkerId, PoolId]:
        """The workers to probe, and their pools: those first that were not named for longest."""
        named = list(itertools.islice(self._losses.items(), most))
        for worker, losses in named:  # to the end of the queue
            del self._losses[worker]
            self._losses[worker] = losses
        return {worker: losses[-1].pool for worker, losses in named if losses}

    def expire(self, now: float) -> None:
        """Forget what is over. Call once a second or so."""
        for worker, losses in list(self._losses.items()):
            losses[:] = [loss for loss in losses if now - loss.lost_at < DOUBT_S]
            if not losses:
                del self._losses[worker]
        for prompt in [name for name, verdict in self._verdicts.items() if verdict.ends_at <= now]:
            del self._verdicts[prompt]
        for worker in [name for name, at in self._ended.items() if now - at >= KEPT_S + DEATH_S]:
            del self._ended[worker]
