"""Learning what an engine is. The `owned_by` of its /v1/models names its kind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import structlog

from kvrouter.core.wire.heartbeats import BOTH
from kvrouter.engine_versions import reaches, since
from kvrouter.long_wait import LongWait
from kvrouter.worker.engines.adapter import Adapter
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.engines.http import (
    HEALTH_PATH,
    MODELS_PATH,
    EngineError,
    EngineHttp,
    Models,
    half_of_a_pair,
    remedy_of,
)
from kvrouter.worker.engines.sglang import SglangAdapter, learn_sglang
from kvrouter.worker.engines.tensorrt import OWNER, TensorrtAdapter, learn_tensorrt
from kvrouter.worker.engines.usual_ports import with_usual_events
from kvrouter.worker.engines.vllm import CACHED_TOKENS_UNKNOWN, VllmAdapter, learn_vllm
from kvrouter.worker.options import AgentOptions

log = structlog.get_logger()

_LEARN_EVERY_S = 0.5


class EngineKind(NamedTuple):
    """What a kind of engine needs: a function that asks it (or raises EngineError), and its event adapter."""

    learn: Callable[[EngineHttp, Models, AgentOptions], Awaitable[EngineFacts]]
    adapter: Callable[[], Adapter[Any]]
    health_path: str = HEALTH_PATH


_VLLM = EngineKind(learn_vllm, VllmAdapter)
KINDS: Mapping[str, EngineKind] = {
    "vllm": _VLLM,
    # its /health generates a token and takes a second: too slow and too costly for one probe per second
    "sglang": EngineKind(learn_sglang, SglangAdapter, MODELS_PATH),
    OWNER: EngineKind(learn_tensorrt, TensorrtAdapter),
    "mocker": _VLLM,
}


def kind_named(name: str) -> EngineKind:
    """The kind of engine with this name. An unknown kind is treated as vLLM."""
    return KINDS.get(name, _VLLM)


async def learn(engine: EngineHttp, options: AgentOptions) -> EngineFacts:
    """Ask the engine what it is. Raises EngineError."""
    if options.whole is False and options.role is None:
        raise EngineError(half_of_a_pair("--no-whole", "give --role prefill or decode instead"))
    models = await engine.models()
    kind = kind_named(models.owner)
    if models.owner == OWNER and options.role not in {None, BOTH}:
        raise EngineError(f"--role {options.role}: pairs of {models.owner} are not served yet")
    engine.health_path = kind.health_path
    return await kind.learn(engine, models, options)


async def learn_with_events(engine: EngineHttp, options: AgentOptions) -> EngineFacts:
    """`learn`, and try the usual ports if the engine does not report its events. Raises EngineError."""
    return await with_usual_events(engine, options, await learn(engine, options))


async def with_cached_tokens(http: EngineHttp, facts: EngineFacts) -> EngineFacts:
    """The facts, with CACHED_TOKENS_UNKNOWN among the lacks if answers omit the cached tokens."""
    # asked with one real completion, and so only of versions whose answer proves something
    if not reaches(facts.version, since(facts.kind).cached_zeros):
        return facts
    if await http.reports_cached_tokens(facts.models.served_names[0]) is not False:
        return facts
    return replace(facts, lacks=(*facts.lacks, CACHED_TOKENS_UNKNOWN))


async def learn_patiently(
    engine: EngineHttp, options: AgentOptions, stop: asyncio.Event
) -> EngineFacts | None:
    """Wait until the engine answers, and log the reason at first and now and then; None if `stop` is set."""
    wait: LongWait | None = None
    while not stop.is_set():
        try:
            return await learn_with_events(engine, options)
        except EngineError as error:
            if wait is None:
                log.info("engine.awaited", url=options.engine_url, reason=str(error))
                wait = awaited(options, time.monotonic())
            wait.look(time.monotonic(), str(error), remedy_of(error))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEARN_EVERY_S):
                await stop.wait()
    return None


def awaited(options: AgentOptions, now: float) -> LongWait:
    """The wait for the engine, from now on."""
    return LongWait(
        "engine.awaited", f"the engine of worker {options.worker_id}", now, url=options.engine_url
    )
