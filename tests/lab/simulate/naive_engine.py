"""The reference engine's rules, one step after the other, as plainly as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.step_model import SHORTEST, StepModel

Times = tuple[float, float, int]
"""First token, last token, cached tokens."""


class _Request:
    def __init__(self, number: int, arrival: Arrival, size: int) -> None:
        self.number, self.arrival = number, arrival
        self.private = -(-(arrival.prompt_tokens + arrival.output_tokens) // size) - len(arrival.hashes)
        self.cached = self.left = self.answered = 0


class NaiveEngine:
    """One engine; `serve` returns the times of every request whose client stayed."""

    def __init__(self, model: StepModel, capacity_blocks: int) -> None:
        self.model, self.capacity = model, capacity_blocks
        self.queue: list[_Request] = []
        self.heads: list[_Request] = []
        self.decoding: list[_Request] = []
        self.admitted: list[_Request] = []
        self.held: list[int] = []  # with repetitions: one for each holder
        self.idle: list[int] = []  # the next to be evicted first
        self.computed: set[int] = set()
        self.times: dict[int, Times] = {}

    def serve(self, arrivals: Sequence[Arrival], leaves: Mapping[int, float]) -> dict[int, Times]:
        """`leaves`: when clients leave."""
        left = list(enumerate(arrivals))
        now = 0.0
        while left or self.queue or self.heads or self.decoding:
            while left and left[0][1].at <= now:
                self.queue.append(_Request(*left.pop(0), self.model.block_size))
            self._drop_left({number for number, when in leaves.items() if when <= now})
            if self.queue or self.heads or self.decoding:
                now = self._step(now)
            elif left:
                now = left[0][1].at
        return self.times

    def _step(self, now: float) -> float:
        model, decoding = self.model, list(self.decoding)
        budget = model.step_tokens - len(decoding)
        self._fill_heads(0)
        share = budget // max(1, len(self.heads))
        given = {head.number: min(head.left, share) for head in self.heads}
        done = [head for head in self.heads if given[head.number] == head.left]
        if done:  # else all heads take their whole share, and the rest of the division is lost
            left = budget - sum(given.values())
            for head in self.heads:
                more = min(head.left - given[head.number], left)
                given[head.number] += more
                left -= more
            done = self._complete(given)
            while left and (entered := self._fill_heads(len(done), 1)):
                given[entered[0].number] = more = min(entered[0].left, left)
                left -= more
                done += self._complete(given)
        for head in self.heads:
            head.left -= given[head.number]
        context = sum(one.arrival.prompt_tokens + one.answered for one in decoding)
        seconds = (
            model.base_s
            + model.prefill_token_s * sum(given.values())
            + model.decode_seq_s * len(decoding)
            + model.context_token_s * context
        )
        now += seconds / model.speed
        for one in decoding + done:
            one.answered += 1
        self.decoding += done
        for one in done:
            self.times[one.number] = (now, now, one.cached)
        ended = [one for one in self.decoding if one.answered == one.arrival.output_tokens]
        for one in sorted(ended, key=lambda one: one.number):
            first, _, cached = self.times[one.number]
            self.times[one.number] = (first, now, cached)
            self.decoding.remove(one)
            self._release(one)
        return now

    def _complete(self, given: Mapping[int, int]) -> list[_Request]:
        done = [head for head in self.heads if given[head.number] == head.left]
        self.heads = [head for head in self.heads if head not in done]
        for head in done:
            self.computed.update(head.arrival.hashes)
        return done

    def _fill_heads(self, completing: int, most: int = 1_000) -> list[_Request]:
        entered: list[_Request] = []
        while self.queue and len(self.heads) < self.model.parallel and len(entered) < most:
            if len(self.heads) + completing + len(self.decoding) >= self.model.max_num_seqs:
                break
            by_length = self.model.order == SHORTEST
            one = min(self.queue, key=lambda one: one.arrival.prompt_tokens) if by_length else self.queue[0]
            if not self._reserve(one):
                break
            self.queue.remove(one)
            self.heads.append(one)
            entered.append(one)
        return entered

    def _reserve(self, one: _Request) -> bool:
        hashes, size = one.arrival.hashes, self.model.block_size
        private = sum(other.private for other in self.admitted) + one.private
        used = set(self.held) | set(hashes)
        if len(used) + private > self.capacity:
            return False
        depth = 0
        while depth < min(len(hashes), (one.arrival.prompt_tokens - 1) // size):
            if hashes[depth] not in self.computed:
                break
            depth += 1
        one.cached = depth * size
        one.left = one.arrival.prompt_tokens - one.cached
        self.admitted.append(one)
        self.held += hashes
        self.idle = [hash_ for hash_ in self.idle if hash_ not in hashes]
        while len(used) + private + len(self.idle) > self.capacity:
            self.computed.remove(self.idle.pop(0))
        return True

    def _release(self, one: _Request) -> None:
        self.admitted.remove(one)
        for hash_ in reversed(one.arrival.hashes):
            self.held.remove(hash_)
            if hash_ not in self.held and hash_ in self.computed:
                self.idle.append(hash_)

    def _drop_left(self, numbers: set[int]) -> None:
        self.queue = [one for one in self.queue if one.number not in numbers]
        for batch in (self.heads, self.decoding):
            for one in [one for one in batch if one.number in numbers]:
                batch.remove(one)
                self._release(one)
                self.times.pop(one.number, None)
