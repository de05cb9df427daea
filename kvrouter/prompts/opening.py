"""How one frontend turns prompts into hashes: opened by its flags, reported in /workers and /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from kvrouter.core.audit.problems import NOT_COMPARED, TokenComparison
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.ids import PoolId
from kvrouter.prompts.card_way import CardTokenizers, CardWay
from kvrouter.prompts.checks import TokenChecks
from kvrouter.prompts.engines_way import EnginesWay
from kvrouter.prompts.image_counts import ImageCounts
from kvrouter.prompts.settings import TokenOptions
from kvrouter.prompts.way_reports import WayReports
from kvrouter.prompts.ways import Encoders, Kind, LocalWay, PromptWays, TextWay, Way
from kvrouter.telemetry.metrics import Sample
from kvrouter.tokens.fast_ids import RESULTS, FastIds
from kvrouter.tokens.hub import model_directory
from kvrouter.tokens.media import OUTCOMES
from kvrouter.tokens.prefix_hashes import PrefixHashes
from kvrouter.tokens.prefix_tokens import CacheSettings, PrefixStore
from kvrouter.tokens.prompt import PromptEncoder
from kvrouter.tokens.remote_tokenizer import EngineTokenizer
from kvrouter.tokens.tokenizer import PrefixCache

log = structlog.get_logger()

# Hashes of known prefixes get 1/_HASHES_SHARE of the memory for prefixes, their tokens the rest.
_HASHES_SHARE = 8


@dataclass(frozen=True, slots=True)
class Tokens:
    """`store` and `hashes` are shared by all models."""

    setting: str
    """Of `--tokenizer`."""
    encoders: Encoders
    cards: CardTokenizers
    store: PrefixStore
    hashes: PrefixHashes
    blocks: PromptWays
    reports: WayReports
    by_engines: EnginesWay | None
    checks: TokenChecks | None
    engines: EngineTokenizer
    images: ImageCounts

    async def run(self) -> None:
        """Look for better ways, and run the comparisons with engines, if they are on."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reports.run(), name="ways")
            tasks.create_task(self.images.run(), name="images")
            if self.checks is not None:
                tasks.create_task(self.checks.run(), name="comparisons")

    def compared(self, pool_id: PoolId) -> TokenComparison:
        check = self.checks.pools.get(pool_id) if self.checks is not None else None
        compared = check.compared() if check is not None else NOT_COMPARED
        slow = "; ".join(
            f"{name or 'default'}: {fast.difference}" for name, fast in self._fast.items() if fast.difference
        )
        return msgspec.structs.replace(compared, unknown=self.reports.unknown(pool_id), backend=slow)

    def decoder(self, pool: Pool) -> Callable[[Sequence[int]], str] | None:
        """Makes text of token ids as the engine does; None: there is no tokenizer of the pool here."""
        encoder = _Local(self.encoders, self.cards).of(pool)
        return partial(encoder.decode, with_special=False) if encoder.can_encode_text else None

    def view(self) -> dict[str, Any]:
        """For /workers. The model of `--model-path DIR` is named `default`."""
        caches = {name or "default": _cache_view(cache) for name, cache in self._caches().items()}
        return {
            "tokenizer": self.setting if self.setting != "local" or caches else "ids only",
            "ways": self.reports.view(),
            "backends": {name or "default": _backend_view(fast) for name, fast in self._fast.items()},
            "prefix_caches": caches,
            "prefix_store": {
                "blocks": len(self.store),
                "bytes": self.store.held_bytes,
                **asdict(self.store.counters),
            },
            "prefix_hashes": {
                "entries": len(self.hashes),
                "bytes": self.hashes.held_bytes,
                **asdict(self.hashes.counters),
            },
            "compared": self.checks.view() if self.checks is not None else {},
        }

    def samples(self) -> Iterator[Sample]:
        yield from _store_samples(self.store)
        yield from self.reports.samples()
        for result in RESULTS:
            checked = sum(fast.checks[result] for fast in self._fast.values())
            yield "kvrouter_tokenizer_checks_total", {"result": result}, checked
        for outcome in OUTCOMES:
            yield "kvrouter_media_prompts_total", {"outcome": outcome}, self.blocks.media[outcome]
        if self.by_engines is not None:
            for result, count in asdict(self.by_engines.counters).items():
                yield "kvrouter_remote_tokenizations_total", {"result": result}, count

    def log_what_is_off(self) -> None:
        effect = "every prompt is tokenized from its start"
        for name, cache in self._caches().items():
            if not cache.is_on:
                model = name or "default"
                log.warning("tokens.no_prefix_cache", model=model, reason=cache.off_because, effect=effect)

    @property
    def _fast(self) -> dict[str, FastIds]:
        encoders = self.cards.encoders() | self.encoders.all()
        found = {name: encoder.fast for name, encoder in encoders.items()}
        return {name: fast for name, fast in found.items() if fast is not None}

    def _caches(self) -> dict[str, PrefixCache]:
        caches = {name: encoder.cache for name, encoder in self.encoders.all().items()}
        return {name: cache for name, cache in caches.items() if cache is not None}


@contextlib.asynccontextmanager
async def open_tokens(
    options: TokenOptions, replica: Replica, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Tokens]:
    """Read the models, if any are given. `tls`: which engines are trusted. Raises ConfigError."""
    networks = replica.settings.worker_networks
    async with contextlib.AsyncExitStack() as stack:
        now = asyncio.get_running_loop().time
        cache = options.prefix_cache or CacheSettings()
        hashes_bytes = cache.max_bytes // _HASHES_SHARE
        store = PrefixStore(max_parts=cache.max_parts, max_bytes=cache.max_bytes - hashes_bytes)
        hashes = PrefixHashes(most=cache.max_parts // _HASHES_SHARE, max_bytes=hashes_bytes)
        encoders = stack.enter_context(_load(options, store))
        engines = await stack.enter_async_context(EngineTokenizer.open(options.engine_api_key, tls, networks))
        root = options.root if options.way == "auto" else None
        cards = CardTokenizers(
            root, partial(_read, options, store), engines, now, hub_cache=options.cache_directory
        )
        stack.callback(cards.close)
        checks = None
        # Without a tokenizer there is nothing to compare: prompts of token ids are the client's.
        has_own = any(each.can_encode_text for each in encoders.all().values())
        own = _Local(encoders, cards)
        if options.compare and (has_own or root is not None):
            checks = TokenChecks(replica, own, engines, cards.differs, sends_ids=options.send_ids == "auto")
        seen = checks.seen if checks else None
        by_engines = EnginesWay(engines, now)
        options_of = checks.options_of if checks else None
        local = LocalWay(encoders, seen, hashes, options_of)
        by_card = CardWay(cards, seen, hashes, options_of)
        ways: dict[str, list[Way]] = {
            "auto": [local, by_card, by_engines, TextWay()],
            "local": [local],
            "remote": [by_engines, TextWay()],
            "none": [TextWay()],
        }
        if options.way == "none":
            log.warning(
                "tokens.none",
                effect="no KV events: workers are assumed to hold sent text for --router-ttl-s",
            )
        blocks = PromptWays(ways[options.way])
        asks = by_engines if by_engines in blocks.ways else None
        reports = WayReports(replica, blocks, asks, cards, is_auto=asks is not None)
        counts = ImageCounts(replica, own, engines)
        tokens = Tokens(
            setting=options.way,
            encoders=encoders,
            cards=cards,
            store=store,
            hashes=hashes,
            blocks=blocks,
            reports=reports,
            by_engines=asks,
            checks=checks,
            engines=engines,
            images=counts,
        )
        tokens.log_what_is_off()
        yield tokens


@dataclass(frozen=True, slots=True)
class _Local:
    """The encoder that serves a pool in this process."""

    given: Encoders
    cards: CardTokenizers

    def of(self, pool: Pool) -> PromptEncoder:
        given = self.given.of(pool)
        return given if given.can_encode_text else self.cards.of(pool)

    def serves(self, pool: Pool, kind: Kind) -> bool:
        given = self.given.of(pool)
        if given.can_encode_text:
            return kind == "text" or given.can_encode_chats
        return self.cards.serves(pool, kind)


def _read(
    options: TokenOptions, store: PrefixStore, directory: Path, chat_template: Path | None = None
) -> PromptEncoder:
    """Raises ConfigError."""
    return PromptEncoder.load(
        directory,
        threads=options.threads,
        cache=options.prefix_cache,
        store=store,
        chat_template=chat_template,
        is_fast=options.backend == "auto",
        most_waiting=options.most_waiting,
    )


def _load(options: TokenOptions, store: PrefixStore) -> contextlib.AbstractContextManager[Encoders]:
    def read(path: str | None) -> PromptEncoder:
        if path is None:
            return PromptEncoder.load(None)
        chat_template = options.chat_template if path == options.model_path else None
        directory = model_directory(path, options.cache_directory, options.hub_token)
        return _read(options, store, directory, chat_template)

    return Encoders.load(read, options.model_path, options.model_paths)


def _cache_view(cache: PrefixCache) -> dict[str, Any]:
    if cache.splits is None:
        return {"on": False, "reason": cache.off_because}
    words, anchors = cache.splits.words, cache.splits.anchors
    return {"on": True, "cut_after_words": words, "cut_after_tokens": anchors}


def _backend_view(fast: FastIds) -> dict[str, Any]:
    if not fast.is_on:
        return {"backend": "huggingface", "reason": fast.off_because}
    return {"backend": "fastokens", "checks": dict(fast.checks)}


def _store_samples(store: PrefixStore) -> Iterator[Sample]:
    counters = store.counters
    for result, count in (
        ("known", counters.known_characters),
        ("tokenized", counters.tokenized_characters),
        ("skipped", counters.skipped_characters),
    ):
        yield "kvrouter_prefix_store_characters_total", {"result": result}, count
