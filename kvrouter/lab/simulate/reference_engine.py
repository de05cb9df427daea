"""An engine in virtual time that jumps over equal steps: about 100 µs a request instead of 20 µs a step.

    queue ──admit──> heads (in prefill) ──last chunk──> decoding ──last token──> gone
              │                               │                        │
        blocks reserved                  blocks stored          blocks idle, reusable

The steps between two changes of the batch differ only in the context, which grows by one token per decoding
sequence and step. So their total time is a quadratic polynomial, and a run of them is one event:

    _from                                    due
      ├────┬────┬─────┬─────┬──────┬──────────┤      a run: `_steps` steps, each with `_chunk` prompt tokens
      1    2    3     ^ a request that could enter the batch cuts the run at the end of the current step

Prefill and decode apart: a prefill engine generates one token, and keeps the blocks until they are read; a
decode engine reserves all blocks, reads what it lacks, and computes the prompt's last token. A whole engine
may read blocks from a peer in the same way, and computes the rest.

Rules: decodes first, then prompts in order; all blocks of a request, also those of its answer, are reserved
when it is admitted; idle blocks are evicted least recently used first, of one request the deepest first; a
prompt's last token is always computed. Times agree with a step-by-step version (tests/lab/simulate).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from kvrouter.core.wire.heartbeats import BOTH, DECODE, PREFILL
from kvrouter.errors import ConfigError
from kvrouter.lab.simulate.engines import Arrival, BlockListener
from kvrouter.lab.simulate.step_model import SHORTEST, StepModel


class _Job:
    """A request in the engine. `left`: prompt tokens to compute; `last_step`: the step of its last token."""

    __slots__ = (
        "cached",
        "hashes",
        "isl",
        "last_step",
        "left",
        "number",
        "output",
        "part",
        "private",
        "pulls",
        "queued",
    )

    def __init__(self, number: int, work: Arrival, block_size: int, part: str, pulls: bool) -> None:
        self.number = number
        self.pulls = pulls
        self.part = part
        self.isl = work.prompt_tokens
        self.output = 1 if part == PREFILL else max(1, work.output_tokens)
        self.hashes = work.hashes
        self.private = -(-(self.isl + self.output) // block_size) - len(self.hashes)
        self.cached = 0
        self.left = 0
        self.last_step = 0
        self.queued = (0, 0)


class ReferenceEngine:
    """One engine of `capacity_blocks` blocks. Call `advance` when `due` is reached; infinite: it is idle."""

    def __init__(self, model: StepModel, capacity_blocks: int, listener: BlockListener) -> None:
        self.model = model
        self.capacity_blocks = capacity_blocks
        self.due = math.inf
        self._listener = listener
        self._queue: deque[_Job] = deque()
        self._heads: list[_Job] = []
        self._completing: list[_Job] = []
        self._aborted: list[_Job] = []
        # apart: computed prompts that are not read yet; prompts that are being read, and those that have been
        self._kept: dict[int, _Job] = {}
        self._reading: dict[int, _Job] = {}
        self._read: deque[_Job] = deque()
        # (step of the last token, number, job) of the decoding requests; `_step` counts finished steps
        self._decoding: list[tuple[int, int, _Job]] = []
        self._step = 0
        self._context = 0
        self._from = 0.0
        self._steps = 0
        self._chunk = 0
        self._share = 0
        # blocks held by requests with their number of holders; idle ones, oldest first; computed ones
        self._held: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._computed: set[int] = set()
        self._private = 0
        # what waits, for predictions: uncached tokens, blocks, and the prompts' blocks that will be computed
        self._queued_tokens = 0
        self._queued_blocks = 0
        self._coming: Counter[int] = Counter()

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._decoding) + len(self._heads) + len(self._completing)

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the batch yet."""
        return len(self._queue) + len(self._reading) + len(self._read)

    @property
    def kv_usage(self) -> float:
        """The share of the blocks that requests hold."""
        return (len(self._held) + self._private) / self.capacity_blocks

    def add(self, number: int, work: Arrival, now: float, part: str = BOTH, *, pulls: bool = False) -> None:
        """Queue a request, or one half of it. Raises ConfigError if it needs more blocks than there are.

        `pulls`: blocks that are missing when it is admitted may come from a peer.
        """
        job = _Job(number, work, self.model.block_size, part, pulls)
        if len(job.hashes) + job.private > self.capacity_blocks:
            raise ConfigError(
                f"a request of {job.isl} + {job.output} tokens does not fit in {self.capacity_blocks} blocks"
            )
        depth = self.match(job.hashes, job.isl)
        job.queued = (job.isl - depth * self.model.block_size, len(job.hashes) + job.private - depth)
        self._queued_tokens += job.queued[0]
        self._queued_blocks += job.queued[1]
        self._coming.update(job.hashes)
        was_empty = not self._queue
        self._queue.append(job)
        if self.due == math.inf:
            self._plan(now)
        elif (was_empty or self.model.order == SHORTEST) and len(self._heads) < self.model.parallel:
            self._cut(now)  # it may enter the batch with the next step

    def abort(self, number: int, now: float) -> None:
        """The client has left: the request leaves the queue now, or the batch at the end of the step."""
        waiting = next((job for job in self._queue if job.number == number), None)
        if waiting is not None:
            self._queue.remove(waiting)
            self._leave_queue(waiting)
            self._no_longer_coming(waiting)
            self._cut(now)  # it may have kept the next one waiting
            return
        running = [*self._heads, *self._completing, *(job for _, _, job in self._decoding)]
        self._aborted += [job for job in running if job.number == number]
        if self._aborted:
            self._cut(now)

    def has_read(self, number: int, now: float) -> None:
        """A prompt's blocks have come: the request may enter the batch."""
        self._read.append(self._reading.pop(number))
        self._look(now)

    def let_go(self, number: int, now: float) -> None:
        """The blocks of a computed prompt have been read."""
        self._release(self._kept.pop(number))
        if self._queue:
            self._look(now)

    def _look(self, now: float) -> None:
        """Another request may enter the batch."""
        if self.due == math.inf:
            self._plan(now)
        elif len(self._heads) < self.model.parallel:
            self._cut(now)

    def advance(self, now: float) -> None:
        """End the run that is due, and plan the next one."""
        steps, self._steps = self._steps, 0
        self._step += steps
        self._context += steps * len(self._decoding)
        for job in self._heads:
            job.left -= self._share * steps
        completed, self._completing = self._completing, []
        for job in completed:
            self._begin(job, now)
        while self._decoding and self._decoding[0][0] == self._step:
            job = heapq.heappop(self._decoding)[2]
            self._context -= job.isl + job.output
            if job.part == PREFILL:
                self._kept[job.number] = job
            else:
                self._release(job)
            self._listener.ended(job.number, now)
        for job in self._aborted:
            self._drop(job)
        self._aborted.clear()
        self._plan(now)

    def _begin(self, job: _Job, now: float) -> None:
        self._listener.stored(job.hashes)
        job.last_step = self._step + job.output - 1
        self._context += job.isl + 1
        heapq.heappush(self._decoding, (job.last_step, job.number, job))
        self._listener.began(job.number, job.cached, now)

    def _drop(self, job: _Job) -> None:
        if job in self._heads:
            self._heads.remove(job)
            self._no_longer_coming(job)
        elif any(job is one for _, _, one in self._decoding):
            self._decoding = [entry for entry in self._decoding if entry[2] is not job]
            heapq.heapify(self._decoding)
            self._context -= job.isl + job.output - (job.last_step - self._step)
        else:
            return  # it ended in this step
        self._release(job)

    # --- runs of steps ---

    def _plan(self, now: float) -> None:
        """Admit what fits, and find the run of equal steps that begins now."""
        model, decoding = self.model, self._decoding
        self._from, self._chunk, self._share = now, 0, 0
        while len(self._heads) < model.parallel and (admitted := self._admit()) is not None:
            self._heads.append(admitted)
        steps = decoding[0][0] - self._step if decoding else 0
        if self._heads:
            budget = model.step_tokens - len(decoding)
            share, least = budget // len(self._heads), min(job.left for job in self._heads)
            if least <= share:
                self._plan_last_chunks(budget, share)
                steps = 1
            else:
                self._share, self._chunk = share, share * len(self._heads)
                whole = (least - 1) // share
                steps = min(steps, whole) if steps else whole
        self._steps = steps
        self.due = now + self._elapsed(steps) if steps else math.inf

    def _plan_last_chunks(self, budget: int, share: int) -> None:
        """One step in which prompts are completed; the rest of its budget goes to others in their order."""
        left = budget
        for most in (share, budget):
            for job in self._heads:
                left -= self._compute(job, min(most, left))
        self._sort_completing()
        while left and len(self._heads) < self.model.parallel and (entered := self._admit()) is not None:
            left -= self._compute(entered, left)
            self._heads.append(entered)
            self._sort_completing()
        self._chunk = budget - left

    def _compute(self, job: _Job, most: int) -> int:
        tokens = min(job.left, most)
        job.left -= tokens
        return tokens

    def _sort_completing(self) -> None:
        done = [job for job in self._heads if not job.left]
        if done:
            self._completing += done
            self._heads = [job for job in self._heads if job.left]
            for job in done:  # as in vLLM, blocks are reusable when they are scheduled
                self._computed.update(job.hashes)
                self._no_longer_coming(job)

    def _elapsed(self, steps: int) -> float:
        """The time that so many steps of the run take, in seconds."""
        model, sequences = self.model, len(self._decoding)
        context = self._context * steps + sequences * steps * (steps - 1) / 2
        one = model.base_s + model.prefill_token_s * self._chunk + model.decode_seq_s * sequences
        return (one * steps + model.context_token_s * context) / model.speed

    def _steps_until(self, now: float) -> int:
        """The step of the run in which `now` lies, from 1; at a step's end, that step."""
        if self._steps <= 1:
            return self._steps
        square = self.model.context_token_s * len(self._decoding) / 2
        linear = self._elapsed(1) * self.model.speed - square
        passed = max(0.0, now - self._from) * self.model.speed
        root = math.sqrt(linear * linear + 4 * square * passed)
        step = math.ceil(2 * passed / (linear + root))
        # rounding may miss by one
        while step > 1 and self._from + self._elapsed(step - 1) >= now:
            step -= 1
        while self._from + self._elapsed(step) < now and step < self._steps:
            step += 1
        return max(1, min(step, self._steps))

    def _cut(self, now: float) -> None:
        """End the run with the current step."""
        if self._steps > 1:
            self._steps = self._steps_until(now)
            self.due = self._from + self._elapsed(self._steps)

    # --- blocks ---

    def _admit(self) -> _Job | None:
        """The next request with its blocks, if there is room for it; no other one overtakes it."""
        if self.num_running >= self.model.max_num_seqs:
            return None
        if self._read:
            return self._read.popleft()
        while (job := self._reserve()) is not None:
            if job.part == DECODE:
                self._listener.reads(job.number, job.left)
                job.left = 1
            elif job.pulls and (tokens := self._listener.pulls(job.number, job.cached)):
                job.cached += tokens
                job.left -= tokens
            else:
                return job
            self._reading[job.number] = job
        return None

    def _reserve(self) -> _Job | None:
        """The next request of the queue with its blocks."""
        if not self._queue:
            return None
        by_length = self.model.order == SHORTEST
        job = min(self._queue, key=lambda one: one.isl) if by_length else self._queue[0]
        held = self._held
        needed = sum(hash_ not in held for hash_ in job.hashes) + job.private
        if needed > self.capacity_blocks - len(held) - self._private:
            return None
        self._queue.remove(job)
        self._leave_queue(job)
        job.cached = self._computed_depth(job.hashes, job.isl) * self.model.block_size
        job.left = job.isl - job.cached
        for hash_ in job.hashes:
            held[hash_] = held.get(hash_, 0) + 1
            self._idle.pop(hash_, None)
        self._private += job.private
        self._evict()
        return job

    def _leave_queue(self, job: _Job) -> None:
        self._queued_tokens -= job.queued[0]
        self._queued_blocks -= job.queued[1]

    def _evict(self) -> None:
        excess = len(self._held) + self._private + len(self._idle) - self.capacity_blocks
        if excess > 0:
            evicted = [self._idle.popitem(last=False)[0] for _ in range(excess)]
            self._computed.difference_update(evicted)
            self._listener.removed(evicted)

    def _release(self, job: _Job) -> None:
        """The deepest blocks first, so that they are evicted first."""
        held = self._held
        self._private -= job.private
        for hash_ in reversed(job.hashes):
            holders = held[hash_] - 1
            if holders:
                held[hash_] = holders
                continue
            del held[hash_]
            if hash_ in self._computed:
                self._idle[hash_] = None

    def _no_longer_coming(self, job: _Job) -> None:
        coming = self._coming
        for hash_ in job.hashes:
            if coming[hash_] == 1:
                del coming[hash_]
            else:
                coming[hash_] -= 1

    def _computed_depth(self, hashes: Sequence[int], isl: int) -> int:
        computed = self._computed
        most = min(len(hashes), (isl - 1) // self.model.block_size)
        return next((depth for depth in range(most) if hashes[depth] not in computed), most)

    # --- predictions, for the oracle ---

    def match(self, hashes: Sequence[int], isl: int) -> int:
        """The leading blocks that a request would not compute: cached, or of a prompt before it."""
        computed, coming = self._computed, self._coming
        most = min(len(hashes), (isl - 1) // self.model.block_size)
        for depth in range(most):
            if hashes[depth] not in computed and hashes[depth] not in coming:
                return depth
        return most

    def held_tokens(self, work: Arrival) -> int:
        """Tokens of the prompt that are cached here."""
        return self._computed_depth(work.hashes, work.prompt_tokens) * self.model.block_size

    def predicted_ttft_s(self, work: Arrival, now: float) -> float:
        """When the first token of a request that arrives now would come, if nothing else arrives."""
        model, sequences = self.model, len(self._decoding)
        own = work.prompt_tokens - self.match(work.hashes, work.prompt_tokens) * model.block_size
        step = self._steps_until(now)
        left_s = max(0.0, self._from + self._elapsed(step) - now) if step else 0.0
        heads = sum(job.left for job in self._heads) - self._share * step * len(self._heads)
        overhead_s = (
            model.base_s
            + model.decode_seq_s * sequences
            + model.context_token_s * (self._context + sequences * step)
        )
        chunk = max(64, model.step_tokens - sequences)

        def prefill_s(tokens: int) -> float:
            return (tokens * model.prefill_token_s + math.ceil(tokens / chunk) * overhead_s) / model.speed

        computing_s = left_s + prefill_s(self._queued_tokens + heads + own)
        room_s = self._until_room_s(work, own, self._step + step, overhead_s / model.speed)
        return max(computing_s, room_s + prefill_s(own)) if room_s else computing_s

    def _until_room_s(self, work: Arrival, own: int, step: int, step_s: float) -> float:
        """The time until enough requests have ended to admit the queue and this request."""
        size = self.model.block_size
        total = -(-(work.prompt_tokens + work.output_tokens) // size)
        needed = self._queued_blocks + total - (work.prompt_tokens - own) // size
        free = self.capacity_blocks - len(self._held) - self._private
        if needed <= free or not self._decoding:
            return 0.0
        last_step = step
        for last_step, _, job in sorted(self._decoding):  # noqa: B007
            free += job.private
            if free >= needed:
                break
        return max(0, last_step - step) * step_s
