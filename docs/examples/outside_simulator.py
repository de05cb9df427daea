"""An outside simulator, by public names of kvrouter alone: two replicas and four engines in virtual time.

An engine computes one prompt at a time. Stored blocks and the other replica's bookings are known 5 ms later.
"""

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Literal

from kvrouter import KvPublisher, KvRouter, PlacedRequest, block_hashes, sequence_hashes

BLOCK, ROOM_BLOCKS, DELAY_S, TOKEN_S, ANSWER_S = 16, 3000, 0.005, 1 / 20_000, 2.0
REQUESTS, PER_SECOND, DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS = 1000, 60.0, 200, 1600, 200


class Engine:
    def __init__(self, name: str, world: "World") -> None:
        self.name, self.world = name, world
        self.queue = deque[tuple[list[int], Callable[[], None]]]()
        self.blocks = OrderedDict[int, None]()  # the least recently used first
        self.publisher = KvPublisher(self, name, BLOCK, model="simulated")
        for router in world.replicas.values():
            router.add_worker(name, kv_blocks=ROOM_BLOCKS)

    def publish(self, _subject: str, frame: bytes) -> bool:  # called by the publisher, in place of a bus
        for router in self.world.replicas.values():
            self.world.after(DELAY_S, partial(router.apply, frame, self.name))
            router.load(self.name, waiting=len(self.queue))  # modes and policies may use it
        return True

    def add(self, tokens: list[int], began: Callable[[], None]) -> None:
        self.queue.append((tokens, began))
        if len(self.queue) == 1:
            self.compute(tokens)

    def compute(self, tokens: list[int]) -> None:
        chain: list[int] = [*sequence_hashes(block_hashes(tokens, BLOCK))]
        depth = next((at for at, block in enumerate(chain) if block not in self.blocks), len(chain))
        self.world.uncached_tokens += (uncached := len(tokens) - min(depth * BLOCK, len(tokens) - 1))
        self.world.after(uncached * TOKEN_S, partial(self.first_byte, tokens, chain, depth))

    def first_byte(self, tokens: list[int], chain: list[int], depth: int) -> None:
        own = tokens[depth * BLOCK : len(chain) * BLOCK]
        self.publisher.stored(chain[depth:], own, parent=chain[depth - 1] if depth else None)
        for block in reversed(chain):  # so that the deepest leaves first
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > ROOM_BLOCKS:
            self.publisher.removed([self.blocks.popitem(last=False)[0]])
        self.publisher.flush(self.world.now)
        self.queue.popleft()[1]()
        if self.queue:
            self.compute(self.queue[0][0])


class World:
    def __init__(self, weight: float | Literal["auto"]) -> None:
        self.now, self.entries, self.made = 0.0, list[tuple[float, int, Callable[[], object]]](), 0
        self.chance, self.ttfts, self.uncached_tokens = random.Random(1), list[float](), 0
        new, draw = partial(KvRouter, BLOCK, overlap_weight=weight, clock=lambda: self.now), random.Random(2)
        self.replicas = {name: new(replica_id=name, chance=draw.random) for name in "ab"}
        self.engines = {name: Engine(name, self) for name in ("w1", "w2", "w3", "w4")}

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        self.made += 1  # entries of one time stay in order
        heapq.heappush(self.entries, (self.now + seconds, self.made, act))

    def run(self) -> str:
        self.after(0.0, partial(self.arrive, 0))
        while self.entries:
            self.now, _, act = heapq.heappop(self.entries)
            act()
            for name, peer in (("a", "b"), ("b", "a")):
                for frame in self.replicas[name].frames():
                    self.after(DELAY_S, partial(self.replicas[peer].receive, frame, name))
        p50, p90 = (1000 * sorted(self.ttfts)[int(share * REQUESTS)] for share in (0.5, 0.9))
        cached = 1 - self.uncached_tokens / (REQUESTS * (DOCUMENT_TOKENS + QUESTION_TOKENS))
        return f"TTFT p50 {p50:.0f} ms, p90 {p90:.0f} ms, cached {cached:.1%}"

    def arrive(self, number: int) -> None:
        first = int(DOCUMENTS * self.chance.random() ** 2) * 10_000  # some documents are hot
        own = 10_000_000 + number * QUESTION_TOKENS
        tokens = [*range(first, first + DOCUMENT_TOKENS), *range(own, own + QUESTION_TOKENS)]
        placed = self.replicas[self.chance.choice("ab")].route(tokens)
        self.engines[placed.worker_id].add(tokens, partial(self.began, placed, self.now))
        if number + 1 < REQUESTS:
            self.after(self.chance.expovariate(PER_SECOND), partial(self.arrive, number + 1))

    def began(self, placed: PlacedRequest, sent_at: float) -> None:
        self.ttfts.append(self.now - sent_at)
        placed.mark_prefill_completed()  # teaches how fast prefill is
        self.after(ANSWER_S, placed.free)


print("weight auto:", World("auto").run())
print("weight 1:", World(1.0).run())
