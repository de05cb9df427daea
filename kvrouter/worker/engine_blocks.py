"""The blocks of one rank as its engine names them (design §5, Feeds and Tiers).

    engine hash ──known──> sequence hash, seed, references per tier ──> PublishedBlocks ──> ops
        │
        └──held──> tokens, engine hash of the parent      named as soon as the parent is known

An engine hash is opaque. Engines store and remove the same hash once per physical block, so
references are counted; several engine hashes may mean one sequence hash (a LoRA reloaded from
another path). The seed, salt and LoRA, is shown on a root block only and handed down.

Invariants: every known or held engine hash has at least one reference; no hash is both; a held
block's parent is not known; a block without a seed has no sequence hash, nor has any below it
(its extra keys are not understood: it is never published).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvrouter.core.blocks import block_seed, seeded_block_hashes, sequence_hashes
from kvrouter.core.events import DEVICE, TIERS, Op
from kvrouter.core.ids import SequenceHash
from kvrouter.worker.published import PublishedBlocks

EngineHash: TypeAlias = int | bytes
BlockIds: TypeAlias = Sequence[int] | None
"""The 64-bit multimodal ids of one block; None if its extra keys are not understood."""

MAX_HELD_BLOCKS = 100_000


class _Known:
    """An engine hash that has a name, or never will (`sequence` and `seed` None)."""

    __slots__ = ("parent", "refs", "seed", "sequence")

    def __init__(self, sequence: SequenceHash | None, parent: SequenceHash | None, seed: int | None) -> None:
        self.sequence = sequence
        self.parent = parent
        self.seed = seed if sequence is not None else None
        self.refs = [0] * len(TIERS)


class _Held:
    """A block whose parent is not known yet."""

    __slots__ = ("block", "parent", "refs")

    def __init__(self, block: _Chain, parent: EngineHash) -> None:
        self.block = block
        self.parent = parent
        self.refs = [0] * len(TIERS)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Consecutive blocks as an event brings them: `token_ids` of all, `ids` per block or empty."""

    engine_hashes: Sequence[EngineHash]
    token_ids: Sequence[int]
    block_size: int
    ids: Sequence[BlockIds]

    def rest(self, start: int, end: int | None = None) -> _Chain:
        """The blocks [start, end) as a chain of their own."""
        stop = len(self.engine_hashes) if end is None else end
        tokens = self.token_ids[start * self.block_size : stop * self.block_size]
        return _Chain(self.engine_hashes[start:stop], tokens, self.block_size, self.ids[start:stop])

    def names(self, parent: SequenceHash | None, seed: int | None) -> list[SequenceHash | None]:
        """Each block's sequence hash; None from the first that cannot be named on."""
        count = len(self.engine_hashes)
        ids = self.ids or [()] * count
        understood = [] if seed is None else list(_until_none(ids))
        blocks = seeded_block_hashes(self.token_ids, self.block_size, seed or 0, understood)
        return [*sequence_hashes(blocks, parent), *([None] * (count - len(blocks)))]


class EngineBlocks:
    """Engine events in, ops out: see the picture above."""

    def __init__(self, max_held_blocks: int = MAX_HELD_BLOCKS) -> None:
        self.ignored_removals = 0
        self.dropped_held_blocks = 0
        self._max_held_blocks = max_held_blocks
        self._published = PublishedBlocks()
        self._known: dict[EngineHash, _Known] = {}
        self._held: dict[EngineHash, _Held] = {}
        self._waiting: dict[EngineHash, set[EngineHash]] = {}

    @property
    def widest_tier(self) -> int:
        """The widest tier the engine has reported so far."""
        return self._published.widest

    @property
    def held_blocks(self) -> int:
        """Blocks whose parent is not known."""
        return len(self._held)

    def count(self, tier: int = DEVICE) -> int:
        """Distinct blocks published in a tier set."""
        return self._published.count(tier)

    def state_ops(self) -> list[Op]:
        """Ops that build the published state from nothing; at most 4,096 hashes each."""
        return self._published.state_ops()

    def check_ops(self) -> list[Op]:
        """One Check per tier set that exists."""
        return self._published.check_ops()

    def stored(
        self,
        engine_hashes: Sequence[EngineHash],
        token_ids: Sequence[int],
        *,
        block_size: int,
        parent: EngineHash | None = None,
        lora_name: str | None = None,
        salt: str | None = None,
        ids: Sequence[BlockIds] = (),
        tier: int = DEVICE,
    ) -> list[Op]:
        """Count one reference to each of a chain of blocks, the first below `parent`.

        `ids` has one entry per block, or none at all. Without tokens (vLLM's offload tiers) only
        hashes known already count. Raises ValueError if tokens and hashes do not fit together.
        """
        if not token_ids:
            return self._stored_again(engine_hashes, tier)
        if len(token_ids) != len(engine_hashes) * block_size or len(ids) not in (0, len(engine_hashes)):
            raise ValueError(
                f"{len(engine_hashes)} blocks of {block_size} with {len(token_ids)} tokens, {len(ids)} ids"
            )
        chain = _Chain(engine_hashes, token_ids, block_size, ids)
        self._store(chain, parent, block_seed(lora_name, salt), tier)
        return self._published.take_ops()

    def removed(self, engine_hashes: Sequence[EngineHash], tier: int = DEVICE) -> list[Op]:
        """Count one reference less to each; hashes without one in `tier` are ignored."""
        for engine_hash in engine_hashes:
            self._remove(engine_hash, tier)
        return self._published.take_ops()

    def cleared(self) -> list[Op]:
        """The engine holds nothing any more, in no tier."""
        self._known.clear()
        self._held.clear()
        self._waiting.clear()
        self._published.clear()
        return self._published.take_ops()

    def _stored_again(self, engine_hashes: Sequence[EngineHash], tier: int) -> list[Op]:
        for engine_hash in engine_hashes:
            known, held = self._known.get(engine_hash), self._held.get(engine_hash)
            if known is not None:
                self._refer(known, tier)
            elif held is not None:
                held.refs[tier] += 1
        return self._published.take_ops()

    def _store(self, chain: _Chain, above: EngineHash | None, root_seed: int, tier: int) -> None:
        for index, engine_hash in enumerate(chain.engine_hashes):
            known = self._known.get(engine_hash)
            if known is not None:
                self._refer(known, tier)
            elif above is None:
                return self._name(chain.rest(index), None, root_seed, tier)
            elif above in self._known:
                place = self._known[above]
                return self._name(chain.rest(index), place.sequence, place.seed, tier)
            else:
                self._hold(chain, index, above, tier)
            above = engine_hash
        return None

    def _name(self, chain: _Chain, parent: SequenceHash | None, seed: int | None, tier: int) -> None:
        """Learn and count a chain whose parent is known: all its hashes in one go."""
        for engine_hash, sequence in zip(chain.engine_hashes, chain.names(parent, seed), strict=True):
            known = self._known.get(engine_hash)
            if known is None:
                known = self._learn(engine_hash, _Known(sequence, parent, seed))
            self._refer(known, tier)
            self._name_waiting(engine_hash)
            parent = sequence

    def _learn(self, engine_hash: EngineHash, known: _Known) -> _Known:
        self._known[engine_hash] = known
        if engine_hash in self._held:
            self._drop_held(engine_hash)  # it was announced below another parent: believe the known one
        return known

    def _refer(self, known: _Known, tier: int) -> None:
        known.refs[tier] += 1
        if known.sequence is not None:
            self._published.add(known.sequence, known.parent, tier)

    def _hold(self, chain: _Chain, index: int, parent: EngineHash, tier: int) -> None:
        engine_hash = chain.engine_hashes[index]
        held = self._held.get(engine_hash)
        if held is None:
            held = self._held[engine_hash] = _Held(chain.rest(index, index + 1), parent)
            self._waiting.setdefault(parent, set()).add(engine_hash)
        held.refs[tier] += 1
        if len(self._held) > self._max_held_blocks:
            self._drop_held(next(iter(self._held)))
            self.dropped_held_blocks += 1

    def _name_waiting(self, engine_hash: EngineHash) -> None:
        """Name what was held back below a block that is now known, however deep."""
        pending = [engine_hash] if self._waiting else []
        while pending:
            above = pending.pop()
            for child in self._waiting.pop(above, ()):
                self._name_held(self._held.pop(child), self._known[above])
                pending.append(child)

    def _name_held(self, held: _Held, place: _Known) -> None:
        (sequence,) = held.block.names(place.sequence, place.seed)
        (engine_hash,) = held.block.engine_hashes
        known = self._known[engine_hash] = _Known(sequence, place.sequence, place.seed)
        for tier, count in enumerate(held.refs):
            for _ in range(count):
                self._refer(known, tier)

    def _drop_held(self, engine_hash: EngineHash) -> None:
        held = self._held.pop(engine_hash)
        siblings = self._waiting[held.parent]
        siblings.discard(engine_hash)
        if not siblings:
            del self._waiting[held.parent]

    def _remove(self, engine_hash: EngineHash, tier: int) -> None:
        entry = self._known.get(engine_hash) or self._held.get(engine_hash)
        if entry is None or not entry.refs[tier]:
            self.ignored_removals += 1
            return
        entry.refs[tier] -= 1
        if isinstance(entry, _Held):
            if not any(entry.refs):
                self._drop_held(engine_hash)
            return
        if entry.sequence is not None:
            self._published.drop(entry.sequence, tier)
        if not any(entry.refs):
            del self._known[engine_hash]

    def check(self) -> None:
        """Raise if an invariant is broken. Tests call this after every step."""
        self._published.check(self._references())
        assert not self._known.keys() & self._held.keys(), "both known and held"
        refs = [entry.refs for entries in (self._known, self._held) for entry in entries.values()]
        assert all(map(any, refs)), "unreferenced"
        assert not self._waiting.keys() & self._known.keys(), "held below a known block"
        waiting = {(parent, child) for parent, children in self._waiting.items() for child in children}
        assert waiting == {(held.parent, engine_hash) for engine_hash, held in self._held.items()}, "waiting"
        assert len(self._held) <= self._max_held_blocks, "holds too much"

    def _references(self) -> Iterator[tuple[int, int]]:
        for known in self._known.values():
            if known.sequence is not None:
                yield from (
                    (known.sequence, tier) for tier, count in enumerate(known.refs) for _ in range(count)
                )


def _until_none(ids: Sequence[BlockIds]) -> Iterator[Sequence[int]]:
    for block_ids in ids:
        if block_ids is None:
            return
        yield block_ids
