"""What a vLLM engine says about itself, and a mocker, which is a look-alike."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from kvrouter.worker.engines.endpoints import read_sources
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.engines.http import EngineError, EngineHttp, Models
from kvrouter.worker.engines.metrics import Scrape
from kvrouter.worker.engines.settled_feeds import feed_lacks
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import FeedOptions

EVENTS_OFF = (
    "events off: start vLLM with --enable-prefix-caching --kv-events-config "
    '\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5657"}\''
)
ENDPOINTS_UNKNOWN = (
    "event endpoints unknown, this vLLM is too old to tell them: give "
    "kv=tcp://HOST:PORT,replay=tcp://HOST:PORT (an agent: --kv-events, --kv-replay) if its events are on"
)
CACHING_OFF = "prefix caching is off: start vLLM with --enable-prefix-caching"
CACHED_TOKENS_UNKNOWN = (
    "cached_tokens unknown, so predictions cannot be checked: start vLLM with --enable-prompt-tokens-details"
)


async def learn_vllm(engine: EngineHttp, models: Models, options: AgentOptions) -> EngineFacts:
    """Ask /metrics, /version and /kv_event_sources. Raises EngineError."""
    scrape = await _scrape(engine, options)
    sources = await engine.find("kv_event_sources")
    kind = "mocker" if models.owner == "mocker" else "vllm"
    host = urlsplit(options.engine_url).hostname or ""
    feeds = read_sources(sources, host, binds=kind == "mocker") if sources is not None else None
    ranks = max(len(feeds or ()), len(scrape.loads), 1)
    return EngineFacts(
        models,
        await engine.version(),
        scrape,
        kind,
        ranks=ranks,
        feeds=feeds or (),
        tokenizer=models.root,
        lacks=tuple(_lacks(scrape, feeds, ranks, options)),
    )


async def _scrape(engine: EngineHttp, options: AgentOptions) -> Scrape:
    try:
        scrape = await engine.scrape()
    except EngineError:
        if options.block_size is None:
            raise
        scrape = Scrape()
    if not (options.block_size or scrape.block_size):
        raise EngineError("/metrics tells no block size: give --kv-cache-block-size")
    return scrape


def _lacks(
    scrape: Scrape, told: tuple[FeedOptions, ...] | None, ranks: int, options: AgentOptions
) -> Iterator[str]:
    if scrape.has_prefix_caching is False:
        yield CACHING_OFF
    if told is None and not options.feeds:
        yield ENDPOINTS_UNKNOWN
    elif told == ():
        yield EVENTS_OFF
    else:
        yield from feed_lacks(options, told or (), ranks)
