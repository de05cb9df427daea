"""The first half of the request path: bytes become a request that can be routed.

body ──> what routing must know ──> pool ──> overrides ──> tokens, hashes, text ──> Work
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from msgspec import UNSET, Struct

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.pools import Pools
from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.cost import Prompt
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.frontend import passthrough
from kvrouter.frontend.bodies import openai
from kvrouter.frontend.bodies.edits import apply, edits_of
from kvrouter.frontend.bodies.large import LARGE_BYTES, LargeBody
from kvrouter.frontend.overrides import Dialect, find_wanted, priority_of, read_overrides
from kvrouter.frontend.prediction_checks import Traits
from kvrouter.frontend.prompt_blocks import Naming, PromptBlocks
from kvrouter.relay.request import Request
from kvrouter.telemetry.metrics import RequestMetrics
from kvrouter.tokens import prompt as texts

_MOST_CHARACTERS_PER_TOKEN = 64
"""A text with more for each token of the model's length is not tokenized: a 30 MB text takes 40 s."""
_UNKNOWN_MODEL_LEN = 131_072


class Work(Struct, frozen=True):
    """One client request on its way."""

    id: str
    request: Request
    body: bytes
    stream: bool
    route: RouteRequest
    router: Router
    received_at: float
    traits: Traits | None
    """None if its tokens are not known: there is nothing to compare."""
    is_completion: bool
    """Whether it is a chat or a completion: of the routes of passthrough.py no tokens are known."""
    has_engine_arguments: bool
    """Whether its body has a field `vllm_xargs`."""
    is_dry_run: bool
    """Whether the client wants to know where it would go, and nothing be sent."""


Parse: TypeAlias = Callable[[bytes], openai.CompletionRequest]


class Accept:
    """Makes work of requests."""

    def __init__(self, pools: Pools, blocks: PromptBlocks, metrics: RequestMetrics, dialect: Dialect) -> None:
        self._pools = pools
        self._blocks = blocks
        self._metrics = metrics
        self._dialect = dialect

    async def work(self, request: Request, parse: Parse | None, request_id: str, received_at: float) -> Work:
        """Read the request, as far as routing must understand it; without a way to parse, hardly at all."""
        body = await request.read() if request.body is None else request.body
        large = await LargeBody.read(body) if parse is not None and len(body) > LARGE_BYTES else None
        readable = body if large is None else large.rest
        asked = passthrough.parse(request, readable) if parse is None else parse(readable)
        router = self._pools.router_for(asked.model)
        if large is not None and large.runs and parse is not None:
            asked = await large.with_ids(asked, parse, _longest_context(router.pool))
        said = read_overrides(request.headers, asked.kvrouter, asked.session_id, self._dialect)
        wanted = find_wanted(said.target, request.headers, router.pool)
        policy = router.modes.of(said.mode).policy
        lora_name = _lora_name(router, asked)
        prompts: tuple[Prompt, ...] = ()
        if asked.prompt is not None and (router.needs_tokens or policy.needs_tokens):
            prompts = await self._prompts(router, asked, asked.prompt)
        route = RouteRequest(
            request_id,
            prompts,
            lora_name,
            said.overlap_weight,
            said.temperature,
            text=texts.plain_text(asked.prompt) if policy.needs_text else "",
            session=said.session,
            bucket=said.bucket,
            wanted=wanted,
            priority=priority_of(request.headers, asked.priority),
            mode=said.mode,
        )
        traits = Traits.of(asked, lora_name, len(prompts)) if prompts else None
        return Work(
            request_id,
            request,
            _edited(body, large, asked),
            asked.stream,
            route,
            router,
            received_at,
            traits,
            is_completion=parse is not None,
            has_engine_arguments=asked.engine_arguments is not UNSET,
            is_dry_run=said.dry_run,
        )

    async def _prompts(
        self, router: Router, asked: openai.CompletionRequest, prompt: texts.Prompt
    ) -> tuple[Prompt, ...]:
        """Token ids, then hashes; empty where the tokens cannot be known."""
        most_characters = _MOST_CHARACTERS_PER_TOKEN * (router.pool.max_model_len or _UNKNOWN_MODEL_LEN)
        if texts.text_characters(prompt) > most_characters:
            return ()  # far above the model's limit: the engine will refuse it, unread
        naming = Naming(router.pool, asked.model, _lora_name(router, asked), asked.cache_salt)
        began = time.perf_counter()
        try:
            return await self._blocks.hashes(prompt, naming)
        finally:
            self._metrics.tokenize.observe(time.perf_counter() - began)


def _edited(body: bytes, large: LargeBody | None, asked: openai.CompletionRequest) -> bytes:
    if asked.kvrouter is None and asked.engine_arguments is UNSET:
        return body  # nearly every request
    edits = edits_of(asked)
    return apply(edits, body) if large is None else large.edited(edits)


def _longest_context(pool: Pool) -> int:
    """The tokens that the worker with the longest context can take; 0 if one of them does not tell."""
    lengths = [worker.card.max_model_len for worker in pool.workers.values()]
    return max(lengths) if lengths and all(lengths) else 0


def _lora_name(router: Router, asked: openai.CompletionRequest) -> str | None:
    """The adapter, if the model that the client names is one."""
    return asked.model if asked.model in router.pool.lora_names else None
