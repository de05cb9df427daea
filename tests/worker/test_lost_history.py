"""Random histories of a simulated engine, whose agents are killed and started again.

The engine is the mocker's, with its paged cache, copies of one hash and evictions; its replay buffer is
short. Requests of the release before may ask it for reports, as they asked vLLM. Every published block is in
the engine's cache (an undercount is allowed, an overcount never), and if nothing was lost the published
blocks are the cache.
"""

from __future__ import annotations

from array import array
from collections import deque
from itertools import count, takewhile
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.wire.hashes import block_hashes, block_seed, seeded_block_hashes, sequence_hashes
from kvrouter.lab.mocker.engine import Engine, EngineConfig, EngineRequest
from kvrouter.lab.mocker.events import GPU, BatchEncoder, KvEvent, StoredBlocks
from kvrouter.worker.blocks.state import (
    AgentState,
    Header,
    RankState,
    decode_state,
    digest_of_file,
    encode_state,
)
from kvrouter.worker.engines.vllm import VllmAdapter
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.rank import EngineRank
from kvrouter.worker.zmq.ordering import Continued, EngineStream, Numbered, Step
from tests.long import IS_LONG
from tests.worker.closed_sets import ClosedSets
from tests.worker.fakes import FakeBus

EXAMPLES = 300 if IS_LONG else 15
SIZE = 2
NUM_BLOCKS = 9
CONFIG = EngineConfig(num_blocks=NUM_BLOCKS, block_size=SIZE, max_num_seqs=3, max_model_len=16)
ENCODER = BatchEncoder("map", 0)
PROMPTS = [
    [1, 1, 2, 2, 3, 3, 4],
    [1, 1, 2, 2, 3, 3],  # an exact multiple: its last block is stored once more
    [1, 1, 2, 2, 5, 5, 6, 6, 7],
    [1, 1],
    [8, 8, 9, 9],
    [13, 13, 14, 14, 15, 15, 16],
    [8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13],
]


class SmallEngine:
    """An engine with a bounded replay buffer. `names` has the sequence hash of each engine hash."""

    def __init__(self, buffer_batches: int, clock: count[int]) -> None:
        self.names: dict[int, int] = {}
        self.engine = Engine(CONFIG)
        self._sent = count()
        self._clock = clock
        self._buffer: deque[Numbered] = deque(maxlen=buffer_batches)
        self._requests = count()

    def serve(self, prompts: list[int], *, reports: bool) -> list[Numbered]:
        """Serve some requests at once; returns the resulting batches. `reports`: also of reused blocks."""
        batches = []
        for prompt in prompts:
            if reports and (event := self._report(PROMPTS[prompt])):
                batches.append(self._send([event]))
            self.engine.add(
                EngineRequest(str(next(self._requests)), array("I", PROMPTS[prompt]), max_tokens=2)
            )
        while self.engine.has_work():
            events = self.engine.step().events
            if events:
                batches.append(self._send(events))
        return batches

    def replay(self, start: int) -> list[Numbered]:
        """The buffered batches from a number on."""
        return [batch for batch in self._buffer if batch[0] >= start]

    def cached(self) -> set[int]:
        """The sequence hashes that can be hit."""
        return {self.names[engine_hash] for engine_hash in self.engine.cache.cached_hashes()}

    def _report(self, tokens: list[int]) -> StoredBlocks | None:
        """As of vLLM with `kv_cache_report_mode: full`: the cached blocks of a prompt, from the root on."""
        cached = {self.names[engine_hash]: engine_hash for engine_hash in self.engine.cache.cached_hashes()}
        chain = sequence_hashes(block_hashes(tokens, SIZE))
        hashes = [cached[name] for name in takewhile(cached.__contains__, chain)]
        if not hashes:
            return None
        return StoredBlocks(hashes, None, tokens[: len(hashes) * SIZE], SIZE, None, GPU, None)

    def _send(self, events: list[KvEvent]) -> Numbered:
        for event in events:
            if isinstance(event, StoredBlocks):
                self._learn(event)
        batch = next(self._sent), ENCODER.encode(next(self._clock), events)
        self._buffer.append(batch)
        return batch

    def _learn(self, event: StoredBlocks) -> None:
        parent = event.parent_block_hash
        above = None if parent is None else self.names[parent]
        blocks = seeded_block_hashes(event.token_ids, SIZE, block_seed(), [()] * len(event.block_hashes))
        chain = sequence_hashes(blocks, above)  # type: ignore[arg-type]  # a plain number here
        self.names.update(zip(event.block_hashes, chain, strict=True))


class SmallAgent:
    """Stream, rank and publisher, driven step by step."""

    def __init__(
        self, engine: SmallEngine, former: RankState | None, incarnation: int, started_s: float
    ) -> None:
        self.stream = EngineStream(can_replay=True)
        publisher = KvPublisher(FakeBus(), "w", SIZE, model="m", incarnation=incarnation)
        self.rank = EngineRank(
            publisher, self.stream, NUM_BLOCKS, started_s=started_s, former=former, adapter=VllmAdapter()
        )
        self.was_continued = False
        self._engine = engine
        self._asked: int | None = None
        if former is None:
            self.receive(self.stream.begin())
        else:
            head = former.head
            self.receive(self.stream.resume(head.seq, head.digest, was_complete=head.is_complete))
        self.settle()

    @property
    def published(self) -> set[int]:
        """The blocks that readers hold."""
        return ClosedSets().apply(self.rank.publisher.blocks.state_ops()).tiers[0]

    def receive(self, step: Step) -> None:
        """Perform a step. After each action the table is valid."""
        for action in step.actions:
            self.was_continued = self.was_continued or isinstance(action, Continued)
            self.rank.on_action(action)
            self.rank.publisher.blocks.check()
        self._asked = step.replay_from if step.replay_from is not None else self._asked

    def settle(self) -> None:
        """Let the engine answer, until the stream needs no further replay."""
        for _ in range(8):
            if self._asked is None:
                self.receive(self.stream.verify())
            asked, self._asked = self._asked, None
            if asked is not None:
                self.receive(self.stream.replayed(asked, self._engine.replay(asked)))


class World:
    """An engine, its agent, and the state that was saved last.

    `reports`: requests of the release before ask for them while a rank is partial; agents have just started.
    """

    def __init__(self, buffer_batches: int, *, reports: bool) -> None:
        self.clock = count(100)
        self.buffer_batches = buffer_batches
        self.reports = reports
        self.incarnations = count(1)
        self.kept: RankState | None = None
        self.has_asked = False
        self.engine = SmallEngine(buffer_batches, self.clock)
        self.kept_of = self.engine
        self.agent: SmallAgent | None = None

    def new_agent(self) -> SmallAgent:
        """An agent that starts with the saved state."""
        return SmallAgent(self.engine, self.kept, next(self.incarnations), inf if self.reports else -inf)

    def is_provable(self) -> bool:
        """Whether the engine is still the process of the saved batch, and still has that batch."""
        seqs = [seq for seq, _ in self.engine.replay(0)]
        return self.kept is not None and self.kept_of is self.engine and self.kept.head.seq in seqs

    def step(self, kind: str, prompts: list[int]) -> None:
        match kind:
            case "serve" | "missed":
                self._serve(prompts, is_received=kind == "serve")
            case "reset":
                self.engine.engine.reset_prefix_cache()
                self._serve(prompts, is_received=True)  # the event of the reset comes with the next step
            case "restart engine":
                self.engine = SmallEngine(self.buffer_batches, self.clock)
                self.agent = None  # a restart with a running agent: see test_ordering
            case "keep":
                self.keep()
            case "kill":
                self.agent = None
            case "stop":
                self.keep()
                self.agent = None
            case "forget":
                self.agent = self.kept = None
            case _:
                self.agent = self.new_agent()
                assert self.agent.was_continued is self.is_provable()
        if self.agent is not None:
            self.agent.settle()
            self.judge(self.agent)

    def keep(self) -> None:
        """Write the state file and read it again."""
        if self.agent is None or not self.agent.rank.is_settled:
            return
        state = self.agent.rank.state()
        agent = AgentState(Header(1, "o", 0.0, 1), {} if state is None else {0: state})
        pieces = list(encode_state(agent))
        read = decode_state(b"".join([*pieces, digest_of_file(pieces)]), "o")
        assert agent == read
        self.kept, self.kept_of = read.ranks.get(0), self.engine

    def _serve(self, prompts: list[int], *, is_received: bool) -> None:
        """Frontends ask for reports while the last heartbeat said `partial`, also without an agent."""
        if self.agent is not None:
            self.has_asked = self.reports and self.agent.rank.is_partial
        batches = self.engine.serve(prompts, reports=self.has_asked)
        for seq, payload in batches if is_received and self.agent is not None else ():
            assert self.agent is not None
            self.agent.receive(self.agent.stream.receive(seq, payload))

    def judge(self, agent: SmallAgent) -> None:
        """Published blocks are cached; if all stores were counted from the start, they are equal."""
        published, cached = agent.published, self.engine.cached()
        assert published <= cached, "overcount"
        assert agent.rank.publisher.blocks.held_blocks <= NUM_BLOCKS
        if not agent.rank.is_partial and not self.reports:
            assert published == cached


def ops(kinds: list[str], max_size: int) -> st.SearchStrategy[list[tuple[str, list[int]]]]:
    """Random events, each with the prompts that are served at it."""
    prompts = st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=3)
    return st.lists(st.tuples(st.sampled_from(kinds), prompts), max_size=max_size)


@st.composite
def histories(draw: st.DrawFn, away: list[str], ends: list[str]) -> list[tuple[str, list[int]]]:
    """Lives of agents: the events of each, how it ends, and the events until the next."""
    history: list[tuple[str, list[int]]] = []
    for _ in range(draw(st.integers(1, 4))):
        history += [("start", []), *draw(ops(["serve", "serve", "serve", "missed", "keep", "reset"], 8))]
        history += [(draw(st.sampled_from(ends)), []), *draw(ops(away, 6))]
    return [*history, ("start", []), *draw(ops(["serve", "missed"], 8))]


@settings(max_examples=3 * EXAMPLES)
@given(
    histories(["serve"] * 6 + ["reset", "restart engine"], ["kill", "stop", "stop", "forget"]),
    st.sampled_from([1, 3, 8, 1000]),
    st.booleans(),
)
def test_never_overcounts(history: list[tuple[str, list[int]]], buffer_batches: int, reports: bool) -> None:
    """Agents are killed, stopped and restarted with and without state, engines restart, buffers are short."""
    world = World(buffer_batches, reports=reports)

    for step in history:
        world.step(*step)


@settings(max_examples=EXAMPLES)
@given(histories(["serve", "serve", "reset"], ["kill", "stop"]))
def test_exact_where_continuity_is_proven(history: list[tuple[str, list[int]]]) -> None:
    """With a saved state and a buffer that reaches back to it, the next agent holds exactly the cache."""
    world = World(1000, reports=False)
    for step in history:
        world.step(*step)

        assert world.kept is None or world.is_provable()
        if world.agent is not None:
            assert world.agent.published == world.engine.cached()
            assert not world.agent.rank.is_partial


def test_a_hot_prefix_is_lost() -> None:
    """It was stored before the agent started, and stays unknown until the engine empties its cache."""
    world = World(1, reports=False)
    for prompt in (2, 2, 2):
        world.step("serve", [prompt])
    world.step("start", [])
    for _ in range(5):
        world.step("serve", [2])

    assert world.agent is not None
    assert world.agent.rank.is_partial
    assert not set(sequence_hashes(block_hashes(PROMPTS[2], SIZE))) & world.agent.published

    hot = set(sequence_hashes(block_hashes(PROMPTS[2], SIZE)))
    world.step("reset", [2])
    world.step("serve", [2])
    assert (False, True) == (world.agent.rank.is_partial, hot <= world.agent.published)
