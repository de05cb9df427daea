"""Requests whose worker was lost with them in hand: whether they are tried again, and which are refused.

    attempt ──the worker is lost──> LostWith to the peers ──SETTLE_S──> judged ──deadly──> 502, everywhere
       │                                   ^                               └──> again, --retries-after-death
       └──a stream breaks off──> in doubt ─┘ its worker does not answer probes
                                    └──it does──> forgotten

A worker is lost with a request if the connection breaks before any output, or if the engine says that it has
died. If output had arrived, only the connection may have broken: then it is a loss if the worker does not
answer a probe, or if its agent reports it. A refused connection is no loss, and a worker that was draining
ends requests on purpose.

The rule by which a prompt is to blame is in core/tables/deadly_prompts.py, and which words of peers count is
in core/tables/claimed_losses.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeAlias

import structlog
from msgspec import Struct

from kvrouter.bodies.prompt_hash import prompt_hash
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.fleet.router import Placement, Router
from kvrouter.core.tables.deadly_prompts import MOST_SUSPECTED, SETTLE_S, Deadly
from kvrouter.core.wire.ids import PromptHash, Target, WorkerId
from kvrouter.errors import NoWorkersError, RequestEndsWorkersError, WorkerDiedError
from kvrouter.frontend.records.record import AttemptRecord, Work
from kvrouter.frontend.requests.hung_engines import Probe
from kvrouter.relay.outcomes import Done, Lost, Outcome, Rejected
from kvrouter.replica.publishing import Publishing

log = structlog.get_logger()

# How long a request waits until its prompt may be tried again: longer than most prefills take.
TURN_S = 10.0
LOOK_EVERY_S = 0.5
_POLL_S = 0.05
# Workers that are probed at one time because peers say that they are lost.
_PROBES_MOST = 16
# Workers that may be lost with one request in hand.
_WORKERS_MOST = 2
# What vLLM answers when its engine process has died, just before the server ends.
_ENGINE_DIED = re.compile(
    r"EngineCore encountered an issue|EngineDeadError|Engine loop is not running|Background loop has errored"
)

Place: TypeAlias = Callable[[frozenset[Target]], AttemptRecord]
"""Chooses and books, except at these targets. Raises NoWorkersError."""


class Case(Struct):
    """A request whose prompt is known. `prompt`: None if prompts are not refused, or it has none."""

    work: Work
    prompt: PromptHash | None
    lost: list[WorkerId] = []
    """The workers that were lost with this request in hand."""
    charged: int = 0
    """The losses of which nothing shows that another request is to blame."""
    is_trial: bool = False


class _Loss(NamedTuple):
    """A request at a worker that is lost, or in doubt. `at`: when its connection broke."""

    router: Router
    placement: Placement
    prompt: PromptHash
    request_id: str
    sent_at: float
    at: float


class LostRequests:
    """`now` is the clock of decisions."""

    def __init__(
        self,
        replica: Replica,
        publishing: Publishing,
        probe: Probe,
        *,
        now: Callable[[], float],
    ) -> None:
        self.prompts = replica.deadly
        self._claimed = replica.claimed_losses
        self._replica = replica
        self._is_claimed = asyncio.Event()
        self._claimed.on_claim = self._is_claimed.set
        self._publishing = publishing
        self._probe = probe
        self._now = now
        self._doubts: deque[_Loss] = deque(maxlen=MOST_SUSPECTED)
        self._unjudged: deque[tuple[float, _Loss]] = deque(maxlen=MOST_SUSPECTED)

    async def case(self, work: Work) -> Case:
        """The case of a request: its prompt is hashed. Of a stream that has moved, that of its client."""
        work = work.origin or work
        if not self.prompts.ttl_s:
            return Case(work, None)
        return Case(work, await prompt_hash(work.router.pool.id, work.request.head.route, work.body))

    # Before an attempt

    async def place(self, case: Case, place: Place) -> AttemptRecord:
        """Place a request when and where its prompt may be tried.

        Raises RequestEndsWorkersError, or NoWorkersError if it has waited for TURN_S.
        """
        give_up_at = self._now() + TURN_S
        while True:
            self._judge_settled()  # before the prompt of a broken stream is sent again
            self._check(case)
            is_late = self._now() >= give_up_at
            if case.prompt is None or is_late or not self.prompts.must_wait(case.prompt, self._now()):
                running = self._place_apart(case, place)
                if running is not None:
                    return self._begin(case, running)
            if is_late:
                raise NoWorkersError(
                    "workers were lost with this request and others, so each of them is tried at a worker of "
                    "its own, and none was free; send it again"
                )
            await asyncio.sleep(_POLL_S)

    def _place_apart(self, case: Case, place: Place) -> AttemptRecord | None:
        """Place a request away from lost workers, and from prompts that are suspected like its own.

        None: no worker is free of these.
        """
        prompt, pool = case.prompt, case.work.router.pool
        taken: set[Target] = set()
        if prompt is not None and self.prompts.is_apart(prompt):
            taken = {target for worker in self.prompts.taken() for target in pool.targets_of(worker)}
        lost = {
            target for worker in self.prompts.lost_workers(self._now()) for target in pool.targets_of(worker)
        }
        for avoided in (taken | lost, taken) if lost else (taken,):
            try:
                return place(frozenset(avoided))
            except NoWorkersError:
                if not avoided:
                    raise
        return None

    def _begin(self, case: Case, running: AttemptRecord) -> AttemptRecord:
        if case.prompt is not None:
            case.is_trial = self.prompts.begin(case.prompt, running.placement.target.worker_id)
        return running

    def _check(self, case: Case) -> None:
        """Raise RequestEndsWorkersError if the prompt is refused."""
        found = self.prompts.refused(case.prompt, self._now()) if case.prompt is not None else None
        if found is not None:
            raise _refusal(found, self._now())

    # After an attempt

    async def ended(self, case: Case | None, running: AttemptRecord, outcome: Outcome) -> Case | None:
        """Record how an attempt ended; `running.is_lost` if its worker is lost. Returns the case, if any."""
        is_good = isinstance(outcome, Done) and outcome.status < 300 and not outcome.failure
        if is_good:
            if self.prompts.suspected:
                case = case or await self.case(running.work)
                if case.prompt is not None:
                    running.work.router.feed.acquit(case.prompt)
                    self._publishing.flush_soon()
            return case
        is_sure = _is_sure(outcome)
        if not is_sure and not (isinstance(outcome, (Done, Lost)) and outcome.is_cut):
            return case
        lost_at = self._now()
        case = case or await self.case(running.work)
        await self._lose(case, running, lost_at, is_sure=is_sure, is_over=isinstance(outcome, Done))
        return case

    def end_trial(self, case: Case) -> None:
        """The attempt is over, however it ended: others with its prompt need not wait for it."""
        if case.is_trial and case.prompt is not None:
            self.prompts.end(case.prompt)
            case.is_trial = False

    async def _lose(
        self, case: Case, running: AttemptRecord, lost_at: float, *, is_sure: bool, is_over: bool
    ) -> None:
        """A connection broke. `is_over`: its client has the answer so far, and no other attempt follows."""
        router, placement = running.work.router, running.placement
        worker = router.pool.workers.get(placement.target.worker_id)
        if worker is None or worker.state == "draining":
            return  # it ended on purpose
        loss = None
        if case.prompt is not None:
            sent_at, request_id = running.sent_at, running.work.id
            loss = _Loss(router, placement, case.prompt, request_id, sent_at, lost_at)
        if is_over and not is_sure:
            if loss is not None:
                self.prompts.doubt(loss.prompt, router.pool.id, lost_at)
                self._doubts.append(loss)
            return
        if not is_sure and not await self._is_gone(router, placement.target.worker_id):
            return
        running.is_lost = True
        case.lost.append(placement.target.worker_id)
        if loss is not None:
            self._count(loss)
            # in any case: a client that leaves cancels what `settle` would do
            self._unjudged.append((self._now() + SETTLE_S, loss))

    def _count(self, loss: _Loss) -> None:
        worker_id, now = loss.placement.target.worker_id, self._now()
        loss.router.feed.lost_with(loss.prompt, worker_id, sent_at=loss.sent_at, lost_at=loss.at, now=now)
        self._publishing.flush_soon()

    async def settle(self, case: Case, running: AttemptRecord, reason: str, retries: int) -> None:
        """Wait until it is known what else was lost. Raises KvRouterError if the request is not tried again.

        That is so after losses at two workers, whoever is to blame. `retries`: the losses after which it is
        tried again, not counting a death that fits other prompts as well.
        """
        await asyncio.sleep(SETTLE_S)
        worker_id, prompt = running.placement.target.worker_id, case.prompt
        self._confirm({worker_id})  # the streams that broke off when this request was lost
        if prompt is not None:
            self._judge(running.work.router, prompt, worker_id, running.work.id)
            self._check(case)
        if prompt is None or not self.prompts.is_shared(prompt, worker_id):
            case.charged += 1
        count = len(set(case.lost))
        if count >= _WORKERS_MOST:
            raise RequestEndsWorkersError(
                f"{count} workers were lost with this request in hand, so it is not tried again: look at the "
                "engines' logs; if they blame it, change the prompt or its options (request_ends_workers)"
            )
        if case.charged > retries:
            raise WorkerDiedError(
                f"the worker was lost with this request in hand ({reason}), so it is not tried again: see "
                "--retries-after-death"
            )

    def _judge(self, router: Router, prompt: PromptHash, worker_id: WorkerId, request_id: str) -> None:
        found = router.feed.judge(prompt, worker_id, self._now())
        if found is not None:
            self._publishing.flush_soon()
            log.warning(
                "prompt.deadly",
                prompt=prompt.hex(),
                model=router.pool.model,
                request=request_id,
                workers=list(found.workers),
                refused_s=self.prompts.ttl_s,
            )

    # What no request waits for: broken streams, requests whose clients have left, and what peers claim

    async def run(self) -> None:
        """Look at what is in doubt until cancelled."""
        await asyncio.gather(self._look_again(), self._probe_again())

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def _probe_again(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                timeout_s = LOOK_EVERY_S if self._claimed.has_unproven else None
                await asyncio.wait_for(self._is_claimed.wait(), timeout_s)
            self._is_claimed.clear()
            await self._probe_claimed()
            await asyncio.sleep(_POLL_S)  # peers may claim without end

    async def _probe_claimed(self) -> None:
        """Find out whether the workers that peers say to have lost answer."""
        claimed = self._claimed.unproven(_PROBES_MOST).items()
        found = [(router, worker) for worker, pool in claimed if (router := self._replica.routers.get(pool))]
        gone = await asyncio.gather(*[self._is_gone(router, worker) for router, worker in found])
        for (_, worker), is_gone in zip(found, gone, strict=True):
            if is_gone:
                self._claimed.worker_ended(worker, self._now())

    async def look(self) -> None:
        """Find out what is in doubt, and judge the losses that have settled."""
        if self._doubts:
            await self._resolve()
        self._judge_settled()

    def _judge_settled(self) -> None:
        while self._unjudged and self._unjudged[0][0] <= self._now():
            _, loss = self._unjudged.popleft()
            self._judge(loss.router, loss.prompt, loss.placement.target.worker_id, loss.request_id)

    async def _resolve(self) -> None:
        by_worker = {loss.placement.target.worker_id: loss.router for loss in self._doubts}
        gone = await asyncio.gather(*[self._is_gone(router, worker) for worker, router in by_worker.items()])
        self._confirm([worker for worker, is_gone in zip(by_worker, gone, strict=True) if is_gone])
        settled = self._now() - SETTLE_S  # an engine that ends may answer for a moment
        for loss in [one for one in self._doubts if one.placement.target.worker_id in by_worker]:
            if loss.at <= settled:
                self._doubts.remove(loss)
                self.prompts.end_doubt(loss.prompt)

    def _confirm(self, lost: Collection[WorkerId]) -> None:
        """What is in doubt at these workers is lost."""
        judged_at = self._now() + SETTLE_S
        for loss in [one for one in self._doubts if one.placement.target.worker_id in lost]:
            self._doubts.remove(loss)
            self._count(loss)
            self._unjudged.append((judged_at, loss))

    async def _is_gone(self, router: Router, worker_id: WorkerId) -> bool:
        """Whether the agent reports the worker as down, or it does not answer a probe."""
        worker = router.pool.workers.get(worker_id)
        if worker is None or worker.silent or worker.state == "down":
            return True
        return not await self._probe(worker.card.url)


def _is_sure(outcome: Outcome) -> bool:
    """Whether an attempt that failed shows by itself that its worker is lost."""
    match outcome:
        case Lost(is_cut=True, had_begun=had_begun):
            return not had_begun
        case Rejected(status, body=body) if status >= 500:
            return _ENGINE_DIED.search(body[:4096].decode("utf-8", "replace")) is not None
        case Done(failure=failure) if failure:
            return _ENGINE_DIED.search(failure) is not None
    return False


def _refusal(found: Deadly, now: float) -> RequestEndsWorkersError:
    return RequestEndsWorkersError(
        f"{len(found.workers)} workers were lost with this request in hand, so every replica refuses it for "
        f"another {max(1, round(found.ends_at - now))} s: change the prompt or its options; an operator can "
        f"let it pass with DELETE /deadly_prompts/{found.prompt.hex()} on the admin listener "
        "(request_ends_workers)"
    )
