"""Prompts that workers were lost with: which are suspected, and which are refused.

    lost ──> suspected ──lost again, elsewhere, and it alone can be to blame──> deadly ──TTL──> forgotten
                └──answered, or TTL──> forgotten <──pardon, which rules out peers' words───┘

A worker dies with many requests in hand, and at most one of them is to blame. The *rank* of a prompt at a
death is the number of earlier deaths of other workers at which it was in hand. The rule:

    A prompt is deadly if it alone has the highest rank at a death, and that rank is at least 1.

So the first death proves nothing, and ordinary requests that were in hand at the second one do not matter:
their rank is 0. If several prompts share the highest rank, nothing is proven, and from then on they are kept
apart: no two prompts with two deaths or more are tried at one worker at the same time. The next death then
has one of them. A deadly prompt explains the deaths at which it was in hand: they count for no other one.

A death counts only for prompts that were sent after the death before it: what was in hand at several workers
of a node when it failed was lost once. For that to be known, nothing is sent for SETTLE_S after a loss:
neither the lost request, nor another one with its prompt. Until then workers that die together have died,
and peers' losses at this death are known. A prompt whose answer is complete is no longer suspected.

Each replica keeps apart what it sends itself. Two replicas can still send two such prompts to one worker;
then its death proves nothing, and the one after it is needed. An answer at one replica counts at all.

Invariants (`check`): a prompt is suspected or deadly, not both; each table is within its bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrouter.core.wire.ids import PoolId, PromptHash, WorkerId

DEADLY_TTL_S = 600.0
# Engines of a node that fails end within tenths of a second of each other. NATS delivers within ms.
SETTLE_S = 0.5
# Losses at one worker within this are of one death: an engine takes longer to start and take requests again.
DEATH_S = 5.0
# How long a request that was lost avoids other lost workers: until their agents have reported it, or they are
# back. An agent reports `down` after three probes, a second apart.
AVOID_S = 5.0
# How long a broken connection can be in doubt: longer than a probe of its worker takes.
DOUBT_S = 10.0
# How long a death is kept: until those of its prompts that were in doubt have been judged, too.
KEPT_S = 2 * DOUBT_S
MOST_DEADLY = 1000
# More than the requests of a large engine; beyond it the oldest are forgotten.
MOST_SUSPECTED = 4096
MOST_DEATHS = 1024
# Names of workers kept of one prompt.
MOST_WORKERS = 8


class Deadly(NamedTuple):
    """A prompt that is refused. `ends_at`: when it is forgotten."""

    prompt: PromptHash
    pool: PoolId
    workers: tuple[WorkerId, ...]
    """Those that were lost with it."""
    ends_at: float


@dataclass(slots=True)
class _Suspect:
    """`workers`: those whose deaths count, in order; none while its only loss is in doubt."""

    pool: PoolId
    held_at: float
    """When it was last lost, or in doubt: it is not sent for SETTLE_S."""
    lost_at: float = 0.0
    is_in_doubt: bool = False
    workers: list[WorkerId] = field(default_factory=list)


@dataclass(slots=True)
class _Death:
    """`ranks`: of the prompts in hand whose rank is at least 1."""

    began_at: float
    last_at: float
    ranks: dict[PromptHash, int] = field(default_factory=dict)


class DeadlyPrompts:
    """Of one replica, over all pools: a pool may end with its last worker, and come back."""

    def __init__(self, ttl_s: float = DEADLY_TTL_S) -> None:
        self.ttl_s = ttl_s
        """How long a prompt is refused, or suspected without another loss; 0: never."""
        self.ignored = 0
        """Words of peers for which there was no room, or that a pardon ruled out."""
        # Attributes: every request and frame asks whether they are empty. Only methods here change them.
        self.suspected: dict[PromptHash, _Suspect] = {}  # oldest loss first
        self.condemned: dict[PromptHash, Deadly] = {}
        self.pardoned: dict[PromptHash, tuple[PoolId, float]] = {}
        self._deaths: dict[WorkerId, _Death] = {}
        self._tried: dict[PromptHash, WorkerId] = {}

    @property
    def is_empty(self) -> bool:
        """Whether every prompt may be sent."""
        return not self.suspected and not self.condemned

    # Losses

    def doubt(self, prompt: PromptHash, pool: PoolId, now: float) -> None:
        """A connection broke with the prompt in hand; whether its worker is lost is not known yet."""
        if self.ttl_s and prompt not in self.condemned:
            known = self.suspected.get(prompt) or _Suspect(pool, now)
            known.is_in_doubt = True
            self._put(prompt, known, now)

    def end_doubt(self, prompt: PromptHash) -> None:
        """The worker lives: only the connection broke."""
        known = self.suspected.get(prompt)
        if known is not None:
            known.is_in_doubt = False
            if not known.workers:
                self._acquit(prompt)

    def lost(
        self,
        prompt: PromptHash,
        pool: PoolId,
        worker: WorkerId,
        *,
        sent_at: float,
        lost_at: float,
        now: float,
    ) -> None:
        """A worker was lost with the prompt in hand, here or at a peer; known `now`."""
        death = self._death(worker, lost_at)
        if not self.ttl_s or prompt in self.condemned:
            return
        known = self.suspected.get(prompt) or _Suspect(pool, now)
        if not known.workers:
            known.workers.append(worker)
        # half of it: the clocks of replicas differ by as long as messages take
        elif worker not in known.workers and sent_at >= known.lost_at + SETTLE_S / 2:
            death.ranks[prompt] = len(known.workers)
            known.workers.append(worker)
        known.is_in_doubt = False
        known.lost_at = max(known.lost_at, lost_at)
        self._put(prompt, known, now)

    def _put(self, prompt: PromptHash, suspect: _Suspect, at: float) -> None:
        suspect.held_at = max(suspect.held_at, at)
        self.suspected.pop(prompt, None)
        self.suspected[prompt] = suspect
        while len(self.suspected) > MOST_SUSPECTED:
            self._acquit(next(iter(self.suspected)))

    def _death(self, worker: WorkerId, at: float) -> _Death:
        """The death of the worker at this time: one that goes on, or a new one."""
        death = self._deaths.get(worker)
        if death is None or at - death.began_at > DEATH_S:
            death = _Death(at, at)
        self._deaths.pop(worker, None)
        self._deaths[worker] = death
        death.last_at = max(death.last_at, at)
        while len(self._deaths) > MOST_DEATHS:
            del self._deaths[next(iter(self._deaths))]
        return death

    def lost_workers(self, now: float) -> Iterator[WorkerId]:
        """The workers that were lost a moment ago: their agents may not have reported it."""
        return (worker for worker, death in self._deaths.items() if now - death.last_at < AVOID_S)

    # Verdicts

    def judge(self, prompt: PromptHash, worker: WorkerId, now: float) -> Deadly | None:
        """Whether the prompt is to blame for the worker's last death. Ask SETTLE_S after the loss."""
        if not self.is_to_blame(prompt, worker):
            return None
        known = self.suspected[prompt]
        found = Deadly(prompt, known.pool, tuple(known.workers[:MOST_WORKERS]), now + self.ttl_s)
        while len(self.condemned) >= MOST_DEADLY:  # what was seen here goes before what peers say
            del self.condemned[next(iter(self.condemned))]
        self._condemn(found)
        self.pardoned.pop(prompt, None)
        return found

    def is_to_blame(self, prompt: PromptHash, worker: WorkerId) -> bool:
        """Whether the prompt alone has the highest rank at the worker's last death."""
        death = self._deaths.get(worker)
        rank = death.ranks.get(prompt, 0) if death is not None else 0
        if death is None or not rank or prompt not in self.suspected:
            return False
        return all(other < rank for name, other in death.ranks.items() if name != prompt)

    def is_shared(self, prompt: PromptHash, worker: WorkerId) -> bool:
        """Whether the death counts for the prompt and for others as much, so that it proves nothing."""
        death = self._deaths.get(worker)
        return death is not None and prompt in death.ranks and not self.is_to_blame(prompt, worker)

    def _condemn(self, found: Deadly) -> None:
        self.condemned[found.prompt] = found
        self._acquit(found.prompt)
        for worker in found.workers:
            if (death := self._deaths.get(worker)) is not None:
                death.ranks.clear()
        explained = set(found.workers)
        for prompt, suspect in list(self.suspected.items()):
            if not explained.isdisjoint(suspect.workers):
                suspect.workers = [worker for worker in suspect.workers if worker not in explained]
                if not suspect.workers:
                    del self.suspected[prompt]

    def answered(self, prompt: PromptHash) -> None:
        """A worker has answered the prompt to its end."""
        self._acquit(prompt)

    def _acquit(self, prompt: PromptHash) -> None:
        if self.suspected.pop(prompt, None) is not None:
            for death in self._deaths.values():
                death.ranks.pop(prompt, None)

    def learn(
        self, prompt: PromptHash, pool: PoolId, workers: Sequence[WorkerId], ttl_s: float, now: float
    ) -> None:
        """A peer refuses the prompt for `ttl_s`. A pardon, and what is known here, go before."""
        if not self.ttl_s or prompt in self.condemned:
            return
        known = self.suspected.get(prompt)
        is_pardoned = prompt in self.pardoned and (known is None or len(known.workers) < 2)
        if is_pardoned or len(self.condemned) >= MOST_DEADLY:
            self.ignored += 1
            return
        self.pardoned.pop(prompt, None)  # lost again since then
        ends_at = now + min(ttl_s, self.ttl_s)
        self._condemn(Deadly(prompt, pool, tuple(workers[:MOST_WORKERS]), ends_at))

    def pardon(self, prompt: PromptHash, pool: PoolId, ttl_s: float, now: float) -> None:
        """An operator lets the prompt pass. New losses count; what peers said of it before does not."""
        self.condemned.pop(prompt, None)
        self._acquit(prompt)
        ttl_s = min(ttl_s, self.ttl_s)
        if ttl_s:
            self.pardoned.pop(prompt, None)
            self.pardoned[prompt] = (pool, now + ttl_s)
            while len(self.pardoned) > MOST_DEADLY:
                del self.pardoned[next(iter(self.pardoned))]

    # Questions

    def refused(self, prompt: PromptHash, now: float) -> Deadly | None:
        """Why the prompt is refused; None: it is not."""
        found = self.condemned.get(prompt)
        return found if found is not None and now < found.ends_at else None

    def entries(self, pool: PoolId | None = None) -> list[Deadly]:
        """The refused prompts, of one pool or of all."""
        return [one for one in self.condemned.values() if pool is None or one.pool == pool]

    def pardons(self, pool: PoolId, now: float) -> list[tuple[PromptHash, float]]:
        """The pardons of a pool, with the seconds that are left."""
        found = self.pardoned.items()
        return [(prompt, ends_at - now) for prompt, (of, ends_at) in found if of == pool and ends_at > now]

    def suspects(self) -> list[tuple[PromptHash, PoolId]]:
        """Every suspected prompt."""
        return [(prompt, suspect.pool) for prompt, suspect in self.suspected.items()]

    # Trials: a suspected prompt is tried by one request at a time

    def must_wait(self, prompt: PromptHash, now: float) -> bool:
        """Whether the prompt must not be sent now: it was just lost, is in doubt, or is being tried."""
        suspect = self.suspected.get(prompt)
        if suspect is None:
            return False
        held_s = DOUBT_S if suspect.is_in_doubt else SETTLE_S
        return now < suspect.held_at + held_s or prompt in self._tried

    def is_apart(self, prompt: PromptHash) -> bool:
        """Whether the prompt may only be tried at a worker without another such prompt."""
        suspect = self.suspected.get(prompt)
        return suspect is not None and len(suspect.workers) > 1

    def taken(self) -> list[WorkerId]:
        """The workers at which a prompt is tried that is to be kept apart from others."""
        return [worker for prompt, worker in self._tried.items() if self.is_apart(prompt)]

    def begin(self, prompt: PromptHash, worker: WorkerId) -> bool:
        """A request with the prompt is sent; returns whether this is a trial, which `end` must end."""
        if prompt not in self.suspected or prompt in self._tried:
            return False
        self._tried[prompt] = worker
        return True

    def end(self, prompt: PromptHash) -> None:
        """The trial of the prompt is over."""
        self._tried.pop(prompt, None)

    def expire(self, now: float) -> None:
        """Forget what is over. Call once a second or so."""
        for prompt in [one.prompt for one in self.condemned.values() if one.ends_at <= now]:
            del self.condemned[prompt]
        for prompt in [name for name, (_, ends_at) in self.pardoned.items() if ends_at <= now]:
            del self.pardoned[prompt]
        for prompt, suspect in list(self.suspected.items()):
            if now - suspect.held_at >= (self.ttl_s if suspect.workers else DOUBT_S):
                self._acquit(prompt)
        for worker in [name for name, death in self._deaths.items() if now - death.last_at > KEPT_S]:
            del self._deaths[worker]

    def check(self) -> None:
        """Raise if an invariant is broken. Tests call this after every step."""
        assert self.suspected.keys().isdisjoint(self.condemned)
        assert len(self.suspected) <= MOST_SUSPECTED
        assert len(self.condemned) <= MOST_DEADLY
        assert len(self.pardoned) <= MOST_DEADLY
        assert len(self._deaths) <= MOST_DEATHS
