"""The way `card`: the tokenizer that the workers' cards name, if this machine has it and its ids are right.

card's directory or hub id ──> below --tokenizer-root? ──> loaded ──> probes equal an engine's? ──> serves
                                      └──────────────────────┴──────────── no ──┘
                                        tried again after 5, 10, 20, … 300 s
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import PoolId
from kvrouter.errors import BadRequestError, ConfigError
from kvrouter.prompts.engines_way import FIRST_REST_S, LONGEST_REST_S
from kvrouter.prompts.ways import KINDS, Hashes, Kind, LocalWay, Naming, OptionsOf, Seen
from kvrouter.tokens.hub import cached_directory
from kvrouter.tokens.id_comparison import PROBES
from kvrouter.tokens.prefix_hashes import PrefixHashes
from kvrouter.tokens.prompt import Prompt, PromptEncoder
from kvrouter.tokens.remote_tokenizer import EngineTokenizer, PromptRejectedError

Load = Callable[[Path], PromptEncoder]
"""Reads a model directory. Raises ConfigError."""

_NO_TOKENIZER = PromptEncoder.load(None)


@dataclass(slots=True)
class Trial:
    """The tokenizer of one pool."""

    name: str
    """The directory or hub id on the card."""
    encoder: PromptEncoder | None = None
    equal: frozenset[Kind] = frozenset()
    """The kinds of prompt whose probe has the engine's ids."""
    reason: str = "it is being compared with an engine's /tokenize"
    again_at: float = 0.0
    rest_s: float = 0.0

    def close(self) -> None:
        if self.encoder is not None:
            self.encoder.retire()
        self.encoder, self.equal = None, frozenset()

    def rest(self, reason: str, now: float) -> None:
        self.close()
        self.reason = reason
        self.rest_s = min(2 * self.rest_s, LONGEST_REST_S) or FIRST_REST_S
        self.again_at = now + self.rest_s


class CardTokenizers:
    """The tokenizers of the pools. Close them with `close`."""

    def __init__(
        self,
        root: Path | None,
        load: Load,
        engines: EngineTokenizer,
        now: Callable[[], float],
        *,
        hub_cache: Path | None = None,
    ) -> None:
        """`root`: directories below it may be read; None: none."""
        self._root = root.resolve() if root is not None else None
        self._load = load
        self._engines = engines
        self._now = now
        self._hub_cache = hub_cache
        self._trials: dict[PoolId, Trial] = {}

    def of(self, pool: Pool) -> PromptEncoder:
        """The pool's tokenizer; one that can encode ids only, if it has none."""
        trial = self._trials.get(pool.id)
        return trial.encoder if trial is not None and trial.encoder is not None else _NO_TOKENIZER

    def encoders(self) -> dict[str, PromptEncoder]:
        """Those that are loaded, by the name on the cards."""
        return {one.name: one.encoder for one in self._trials.values() if one.encoder is not None}

    def serves(self, pool: Pool, kind: Kind) -> bool:
        """Whether its ids of such a prompt were equal: not while it is being compared."""
        trial = self._trials.get(pool.id)
        return trial is not None and kind in trial.equal

    def why_not(self, pool: Pool, kind: Kind) -> str:
        if self._root is None:
            return "--tokenizer-root is not given"
        trial = self._trials.get(pool.id)
        if trial is None:
            return "no worker's card names a model directory"
        return "" if kind in trial.equal else f"{trial.name}: {trial.reason}"

    async def look(self, pool: Pool) -> None:
        """Load and compare the pool's tokenizer, if that is due."""
        if self._root is None:
            return
        named = _named_by(pool)
        trial = self._trials.get(pool.id)
        if named is None or (trial is not None and trial.name != named.tokenizer):
            self._drop(pool.id)
            trial = None
        if named is None:
            return
        if trial is None:
            trial = self._trials[pool.id] = Trial(named.tokenizer)
        if trial.encoder is None and self._now() >= trial.again_at:
            await self._try(trial, named)

    def differs(self, pool: Pool, reason: str) -> bool:
        """A later comparison found other ids than the engine's; returns whether they were made here."""
        trial = self._trials.get(pool.id)
        if trial is None or trial.encoder is None:
            return False
        trial.rest_s = LONGEST_REST_S  # no early retry: its ids were proven wrong
        trial.rest(reason, self._now())
        return True

    def keep(self, pools: Iterable[PoolId]) -> None:
        """Forget pools that are gone."""
        for gone in self._trials.keys() - set(pools):
            self._drop(gone)

    def close(self) -> None:
        for pool_id in [*self._trials]:
            self._drop(pool_id)

    async def _try(self, trial: Trial, card: Card) -> None:
        try:
            trial.encoder = await asyncio.to_thread(self._read, card.tokenizer)
            trial.equal, trial.reason = await self._compared(trial.encoder, card.url)
        except Exception as error:  # no operator chose these files: whatever they cause must end here
            trial.rest(str(error) or type(error).__name__, self._now())
            return
        if not trial.equal:
            trial.rest(trial.reason, self._now())

    def _read(self, name: str) -> PromptEncoder:
        """In a thread. Raises ConfigError."""
        directory = Path(name) if Path(name).is_dir() else cached_directory(name, self._hub_cache)
        if directory is None:
            raise ConfigError("it is neither a directory nor a cached hub id on this machine")
        assert self._root is not None
        # resolved: a link below the root may lead elsewhere. Files of a hub's cache are links within it.
        if not directory.resolve().is_relative_to(self._root):
            raise ConfigError(f"{directory} is not below --tokenizer-root {self._root}")
        return self._load(directory)

    async def _compared(self, encoder: PromptEncoder, url: str) -> tuple[frozenset[Kind], str]:
        """The kinds with the engine's ids, and why others are missing. Raises EngineTokenizerError."""
        equal: set[Kind] = set()
        reasons = []
        for kind in reversed(KINDS):
            if kind == "chat" and not encoder.can_encode_chats:
                reasons.append(encoder.why_no_chats)
                continue
            reason = f"its chat template, or the engine's, rejects every probe {kind}"
            for probe in PROBES[kind]:
                try:
                    ids = await encoder.encode(probe)
                    theirs = await self._engines.reference(url, None, probe)
                except (BadRequestError, PromptRejectedError):
                    continue  # some templates reject one form of chat only
                reason = ""
                if ids != [theirs] and not await encoder.settle(probe, theirs):
                    reason = f"the ids of a probe {kind} are not those of {url}"
                    break
            if reason:
                reasons.append(reason)
            else:
                equal.add(kind)
        return (frozenset(equal) if "text" in equal else frozenset()), "; ".join(reasons)

    def _drop(self, pool_id: PoolId) -> None:
        trial = self._trials.pop(pool_id, None)
        if trial is not None:
            trial.close()


class CardWay(LocalWay):
    name = "card"

    def __init__(
        self, tokenizers: CardTokenizers, seen: Seen | None, known: PrefixHashes, options: OptionsOf | None
    ) -> None:
        super().__init__(tokenizers, seen, known, options)
        self.tokenizers = tokenizers

    def why_not(self, pool: Pool, kind: Kind) -> str:
        return self.tokenizers.why_not(pool, kind)

    async def hashes(self, prompt: Prompt, naming: Naming) -> Hashes | None:
        try:
            return await super().hashes(prompt, naming)
        except RuntimeError:  # the tokenizer was retired meanwhile
            return None


def _named_by(pool: Pool) -> Card | None:
    """A live card with the tokenizer that most cards of the pool name."""
    cards = [worker.card for worker in pool.targets.values() if worker.card.tokenizer]
    if not cards:
        return None
    name = Counter(card.tokenizer for card in cards).most_common(1)[0][0]
    return next(card for card in cards if card.tokenizer == name)
