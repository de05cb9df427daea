"""One simulated engine: vLLM's scheduler over the paged cache. Pure: no clock, no randomness, no socket.

    add() ──> waiting ──admit──> running ──step()──> outputs, events, duration
                 ^                  │
                 └──── preempt ─────┘     the newest, when blocks run out; it starts over, keeping its tokens

A step serves every running request within `max_num_batched_tokens`: one token for a request that decodes, a
chunk of the prompt for a request that prefills. Then it admits requests from the queue, first come, first
served. As in vLLM, blocks become reusable when they are scheduled, and the last sampled token is not in the
cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from kvrouter.core.wire.hashes import MediaSpan
from kvrouter.errors import ConfigError
from kvrouter.lab.mocker.answers import Answer, Vocabulary
from kvrouter.lab.mocker.cache import BlockCache, Chain
from kvrouter.lab.mocker.events import KvEvent
from kvrouter.lab.mocker.hashing import TokenIds


@dataclass(slots=True)
class StepWork:
    """The work of one step."""

    prefill_tokens: int = 0
    decode_seqs: int = 0
    # Tokens in the caches of the decoding sequences.
    context_tokens: int = 0
    # Tokens whose blocks are copied back from host memory.
    host_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per unit of work: a linear model of a transformer on one GPU.

    The defaults stand for Llama-3-8B in bf16 on one H100 SXM (3.35 TB/s of memory, ~400 TFLOP/s achieved).
    They are derived from these figures, not from a benchmark.
    """

    # 16 GB of weights read once per step.
    base_s: float = 5e-3
    # 2 x 8e9 FLOP per token.
    prefill_token_s: float = 40e-6
    # Sampling, detokenizing and scheduling; an estimate.
    decode_seq_s: float = 20e-6
    # 128 KiB of KV cache read per token of context (32 layers, 8 KV heads of 128, bf16).
    context_token_s: float = 40e-9
    # 128 KiB over PCIe 5 x16 at 50 GB/s.
    host_token_s: float = 2.6e-6

    def step_s(self, work: StepWork) -> float:
        """The duration of one step, in seconds."""
        return (
            self.base_s
            + self.prefill_token_s * work.prefill_tokens
            + self.decode_seq_s * work.decode_seqs
            + self.context_token_s * work.context_tokens
            + self.host_token_s * work.host_tokens
        )

    def scaled(self, speedup: float) -> Timing:
        """The same GPU, `speedup` times as fast."""
        return Timing(
            self.base_s / speedup,
            self.prefill_token_s / speedup,
            self.decode_seq_s / speedup,
            self.context_token_s / speedup,
            self.host_token_s / speedup,
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of one engine; names and meanings are vLLM's."""

    num_blocks: int = 8192
    block_size: int = 16
    host_blocks: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_model_len: int = 32_768
    eviction: str = "lru"
    # Tokens behind a block that its hash covers, too: those of EAGLE, 1, on vLLM 0.33.
    lookahead: int = 0
    timing: Timing = field(default_factory=Timing)
    vocabulary: Vocabulary = field(default_factory=Vocabulary)

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} must be at least 1")
        capacity = self.num_blocks * self.block_size
        if self.max_model_len > capacity:
            raise ConfigError(
                f"max_model_len {self.max_model_len} does not fit in {self.num_blocks} blocks of "
                f"{self.block_size} ({capacity} tokens): lower it or raise num_blocks"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below "
                f"max_num_seqs {self.max_num_seqs}"
            )


class EngineRequest(msgspec.Struct, frozen=True):
    """One prompt. `id` is unique in its engine."""

    id: str
    prompt: TokenIds
    # None: until the answer ends by itself (see `Vocabulary`) or the context is full. With a number the
    # answer has exactly that many tokens, as with vLLM's `ignore_eos`.
    max_tokens: int | None = None
    ignore_eos: bool = False
    lora_name: str | None = None
    salt: str | None = None
    # The images whose placeholders the prompt has.
    media: Sequence[MediaSpan] = ()
    # At its end the blocks stay held, until `Engine.free`.
    keeps_blocks: bool = False
    # Leading tokens of the prompt whose KV another engine has computed, and the cached tokens to report then.
    remote_tokens: int = 0
    reported_cached_tokens: int | None = None


class EngineOutput(msgspec.Struct, frozen=True, gc=False):
    """One token of one request. The last one has a `finish_reason`."""

    id: str
    # None if the request ended without another token ("abort").
    token: int | None
    finish_reason: str | None
    # Prompt tokens that were not computed.
    cached_tokens: int


class StepResult(msgspec.Struct, frozen=True):
    """The result of one step. Outputs and events are due when it ends."""

    duration_s: float
    outputs: list[EngineOutput]
    events: list[KvEvent]


@dataclass(slots=True)
class Counters:
    """Totals since the start, in tokens unless noted otherwise."""

    prompt: int = 0
    generated: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    preemptions: int = 0  # requests
    finished: int = 0  # requests
    steps: int = 0
    # Of hand-overs from other engines: prompt tokens asked for, tokens got, transfers, blocks, leases.
    external_queries: int = 0
    external_hits: int = 0
    transfers: int = 0
    failed_transfers: int = 0
    transferred_blocks: int = 0
    expired_leases: int = 0


class _Sequence:
    """A request in the engine. `tokens` has the prompt and the tokens generated so far."""

    __slots__ = ("answer", "cached_tokens", "chain", "computed", "limit", "prompt_len", "request", "tokens")

    def __init__(self, request: EngineRequest, config: EngineConfig) -> None:
        self.request = request
        self.tokens = request.prompt[:]
        self.prompt_len = len(self.tokens)
        self.computed = 0
        self.cached_tokens: int | None = None  # set once, when first admitted
        self.limit = min(config.max_model_len, self.prompt_len + (request.max_tokens or config.max_model_len))
        self.chain = Chain(
            self.tokens,
            config.block_size,
            lora_name=request.lora_name,
            salt=request.salt,
            media=request.media,
            lookahead=config.lookahead,
        )
        self.answer = Answer(
            request.prompt,
            config.vocabulary,
            lora_name=request.lora_name,
            may_end=request.max_tokens is None and not request.ignore_eos,
        )


class Engine:
    """One engine (one data-parallel rank)."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.cache = BlockCache(
            config.num_blocks, config.block_size, eviction=config.eviction, host_blocks=config.host_blocks
        )
        self.counters = Counters()
        self.timing = config.timing
        """How long its steps take from now on."""
        self.kept: dict[str, Chain] = {}
        """By request that has ended, the blocks that it keeps until somebody takes them."""
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._sequences: dict[str, _Sequence] = {}

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, including preempted ones."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Fraction of the blocks held by requests; cached but free blocks count as free, as in vLLM."""
        return self.cache.used_blocks / self.cache.num_blocks

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ValueError if its prompt leaves no token for the answer."""
        if not 0 < len(request.prompt) < self.config.max_model_len:
            raise ValueError(
                f"prompt of {len(request.prompt)} tokens, max_model_len is {self.config.max_model_len}"
            )
        if request.id in self._sequences:
            raise ValueError(f"request {request.id!r} is already in the engine")
        sequence = _Sequence(request, self.config)
        self._sequences[request.id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """End a request now, without output; False if the engine does not have it."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        queue = self._running if sequence in self._running else self._waiting
        queue.remove(sequence)
        self.cache.release(sequence.chain)
        return True

    def free(self, request_id: str) -> None:
        """Release the blocks that a request has kept, if it has."""
        if (chain := self.kept.pop(request_id, None)) is not None:
            self.cache.release(chain)

    def hashes(self, request: EngineRequest) -> list[int]:
        """The names of the blocks that its prompt may reuse."""
        hashes = _Sequence(request, self.config).chain.hashes
        return hashes[: (len(request.prompt) - 1) // self.config.block_size]

    def cached_blocks(self, request: EngineRequest) -> int:
        """How many of them are cached here."""
        chain = _Sequence(request, self.config).chain
        return self.cache.lookup(chain, (len(request.prompt) - 1) // self.config.block_size).blocks

    def reset_prefix_cache(self) -> bool:
        """Empty the cache; False while requests hold blocks. The next step returns the event."""
        return self.cache.clear()

    def step(self) -> StepResult:
        """Schedule, compute and sample once. Call only if `has_work()`."""
        work = StepWork()
        budget = self.config.max_num_batched_tokens
        budget, preempted = self._schedule_running(budget, work)
        if not preempted:  # as in vLLM: no new requests in a step in which blocks ran out
            self._admit(budget, work)
        fits = self._running or self.cache.used_blocks  # those of an ended request come back
        assert fits, "no request fits: config allows a longer sequence than the cache holds"
        outputs = self._sample()
        self.counters.steps += 1
        return StepResult(self.timing.step_s(work), outputs, self.cache.take_events())

    # --- scheduling ---

    def _schedule_running(self, budget: int, work: StepWork) -> tuple[int, bool]:
        """Give each running request its next tokens; returns the budget left, and if one was preempted."""
        block_size = self.config.block_size
        preempted = False
        position = 0
        while position < len(self._running) and budget:
            sequence = self._running[position]
            tokens = min(len(sequence.tokens) - sequence.computed, budget)
            blocks = -(-(sequence.computed + tokens) // block_size)
            while not self.cache.grow(sequence.chain, blocks):
                preempted = True
                if self._preempt_newest() is sequence:
                    return budget, preempted
            self._advance(sequence, tokens, work)
            budget -= tokens
            position += 1
        return budget, preempted

    def _admit(self, budget: int, work: StepWork) -> None:
        """Move requests from the queue into the batch, as long as the whole next prompt fits."""
        while self._waiting and budget and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            tokens = self._open(sequence, budget, work)
            if not tokens:
                return  # first come, first served: a shorter prompt does not overtake
            self._running.append(self._waiting.popleft())
            self._advance(sequence, tokens, work)
            budget -= tokens

    def _open(self, sequence: _Sequence, budget: int, work: StepWork) -> int:
        """Hold a request's cached blocks, and blocks for its next tokens. Returns their number, or 0."""
        block_size = self.config.block_size
        length = len(sequence.tokens)
        # the last token is always computed: the next one is sampled from its output
        hit = self.cache.lookup(sequence.chain, (length - 1) // block_size)
        cached = hit.blocks * block_size
        if sequence.cached_tokens is None:  # a preempted request computes again what it had from elsewhere
            cached = max(cached, min(sequence.request.remote_tokens, length - 1))
        tokens = min(length - cached, budget)
        blocks = -(-(cached + tokens) // block_size)
        if not self.cache.open(sequence.chain, hit, blocks, must_fit_blocks=-(-length // block_size)):
            return 0
        if sequence.cached_tokens is None:
            self._count_admission(sequence, hit.blocks * block_size, cached)
        sequence.computed = cached
        work.host_tokens += hit.host_blocks * block_size
        return tokens

    def _count_admission(self, sequence: _Sequence, cached: int, known: int) -> None:
        """`cached` tokens here, `known` with those of other engines."""
        request = sequence.request
        reported = request.reported_cached_tokens
        sequence.cached_tokens = known if reported is None else reported
        if request.remote_tokens:
            self.counters.external_queries += sequence.prompt_len - cached
            self.counters.external_hits += max(0, request.remote_tokens - cached)
        self.counters.prompt += sequence.prompt_len
        self.counters.cache_queries += sequence.prompt_len
        self.counters.cache_hits += cached

    def _advance(self, sequence: _Sequence, tokens: int, work: StepWork) -> None:
        """Compute `tokens` more. Blocks that are full now become reusable."""
        # a decoding sequence computes one token beyond its prompt; a preempted one prefills its answer again
        if tokens == 1 and sequence.computed >= sequence.prompt_len:
            work.decode_seqs += 1
            work.context_tokens += sequence.computed
        else:
            work.prefill_tokens += tokens
        sequence.computed += tokens
        full_blocks = sequence.computed // self.config.block_size
        if full_blocks > sequence.chain.stored_blocks:
            self.cache.store(sequence.chain, full_blocks)

    def _preempt_newest(self) -> _Sequence:
        sequence = self._running.pop()
        self.cache.release(sequence.chain)
        sequence.computed = 0
        self._waiting.appendleft(sequence)  # first in the queue: it was admitted before all that wait
        self.counters.preemptions += 1
        return sequence

    # --- sampling ---

    def _sample(self) -> list[EngineOutput]:
        """Sample one token for each request whose tokens are all computed; finished requests leave."""
        ready = [s for s in self._running if s.computed == len(s.tokens)]
        outputs = [self._next_output(sequence) for sequence in ready]
        self.counters.generated += len(outputs)
        if any(output.finish_reason for output in outputs):
            self._running = [s for s in self._running if s.request.id in self._sequences]
        return outputs

    def _next_output(self, sequence: _Sequence) -> EngineOutput:
        token = sequence.answer.next_token()
        sequence.tokens.append(token)
        finish_reason = self._finish_reason(sequence, token)
        request_id = sequence.request.id
        if finish_reason is not None:
            del self._sequences[request_id]
            if sequence.request.keeps_blocks:
                self.kept[request_id] = sequence.chain
            else:
                self.cache.release(sequence.chain)
            self.counters.finished += 1
        return EngineOutput(request_id, token, finish_reason, sequence.cached_tokens or 0)

    def _finish_reason(self, sequence: _Sequence, token: int) -> str | None:
        if len(sequence.tokens) == sequence.limit:
            return "length"
        if token == self.config.vocabulary.end and sequence.request.max_tokens is None:
            return None if sequence.request.ignore_eos else "stop"
        return None

    def check(self) -> None:
        """Raise if the scheduler's tables disagree. Tests call this after every step."""
        self.cache.check()
        queued = {s.request.id for s in [*self._running, *self._waiting]}
        assert queued == set(self._sequences), "a request is in no queue"
        assert len(self._running) <= self.config.max_num_seqs
        assert all(not s.chain.blocks for s in self._waiting), "a waiting request holds blocks"


def speed_up(config: EngineConfig, speedup: float) -> EngineConfig:
    """The same engine on a GPU `speedup` times as fast."""
    return replace(config, timing=config.timing.scaled(speedup))
