"""Learning what an engine is. The `owned_by` of its /v1/models names its kind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

import structlog

from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.engines.http import EngineError, EngineHttp, Models
from kvrouter.worker.engines.sglang import learn_sglang
from kvrouter.worker.engines.vllm import learn_vllm
from kvrouter.worker.options import AgentOptions

log = structlog.get_logger()

_LEARN_EVERY_S = 0.5
_LOG_EVERY_S = 10.0

# What each kind of engine provides: a function that asks the engine, or raises EngineError.
Learn: TypeAlias = Callable[[EngineHttp, Models, AgentOptions], Awaitable[EngineFacts]]

KINDS: Mapping[str, Learn] = {"vllm": learn_vllm, "sglang": learn_sglang, "mocker": learn_vllm}


async def learn(engine: EngineHttp, options: AgentOptions) -> EngineFacts:
    """Ask the engine what it is. An unknown kind is treated as vLLM. Raises EngineError."""
    models = await engine.models()
    return await KINDS.get(models.owner, learn_vllm)(engine, models, options)


async def learn_patiently(
    engine: EngineHttp, options: AgentOptions, stop: asyncio.Event
) -> EngineFacts | None:
    """Wait until the engine answers, and log the reason now and then; None if `stop` is set before."""
    logged_at = float("-inf")
    while not stop.is_set():
        try:
            return await learn(engine, options)
        except EngineError as error:
            if time.monotonic() - logged_at >= _LOG_EVERY_S:
                logged_at = time.monotonic()
                log.info("engine.awaited", url=options.engine_url, reason=str(error))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEARN_EVERY_S):
                await stop.wait()
    return None
