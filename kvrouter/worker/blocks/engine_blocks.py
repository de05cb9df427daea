"""The blocks of one rank as its engine names them (docs/concepts/design.md#tiers).

    engine hash ──known──> sequence hash, seed, references per tier ──> PublishedBlocks ──> ops
        │
        └──held──> tokens, engine hash of the parent      named as soon as the parent is known

    engine hash in another KV group ──> ResumePoints ──> ops

An engine hash is opaque. An engine stores and removes the same hash once per physical block, so references
are counted. Several engine hashes may have one sequence hash (a LoRA that was loaded again from another
path). Only the event of a root block has the seed (salt and LoRA name), which holds for all blocks below it.

The release before this one could ask vLLM for reports (`kv_cache_report_mode: full`). For each such request
that hits blocks from the root on, vLLM announces these blocks again, in an event that looks like a real
store. With `expects_reports` a store at the root therefore adds no reference to a block that already has one,
so the references here never exceed the engine's. (Read in vLLM 0.32, `emit_cached_block_events`. Blocks that
it really stores below a known block come in a separate event, with a parent, which always counts.) Of another
group it announces every block from the root on, also those that the group no longer holds: only the last
ones, which the request needed, count.

Invariants: every known or held engine hash has at least one reference; no hash is both; a held block's parent
is not known; a block without a seed has no sequence hash, nor has any block below it (its extra keys are not
understood, so it is never published).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from kvrouter.core.wire.hashes import block_seed, seeded_block_hashes, sequence_hashes
from kvrouter.core.wire.ids import SequenceHash
from kvrouter.core.wire.ops import DEVICE, HOST, Op
from kvrouter.worker.blocks.published import PublishedBlocks
from kvrouter.worker.blocks.resume_points import GroupImage, ResumePoints

EngineHash: TypeAlias = int | bytes

# The 64-bit multimodal ids of one block; None if its extra keys are not understood.
BlockIds: TypeAlias = Sequence[int] | None
# References per tier.
Refs: TypeAlias = tuple[int, int, int]

# Held blocks keep their tokens. The agent sets the engine's number of blocks instead, if it is known.
MAX_HELD_BLOCKS = 100_000
# About 1 GB. An engine that publishes no removals would fill the table without end.
MAX_KNOWN_BLOCKS = 2_000_000
_NO_REFS = (0, 0, 0)


# gc=False: entries cannot be part of a cycle, and a collection over two million of them would stop the agent.
class Known(Struct, frozen=True, array_like=True, gc=False):
    """An engine hash that has a sequence hash, or can never have one (`sequence` and `seed` None)."""

    sequence: int | None
    # The parent's sequence hash.
    parent: int | None
    seed: int | None
    refs: Refs


class Held(Struct, frozen=True, array_like=True, gc=False):
    """A block whose parent is not known yet. `ids` as in `BlockIds`, () if none were given."""

    parent: EngineHash
    refs: Refs
    block_size: int
    token_ids: tuple[int, ...]
    ids: tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class BlocksImage:
    """A table at one moment. Entries never change, so a shallow copy is enough (100,000 blocks: 1–5 ms)."""

    known: dict[EngineHash, Known]
    held: dict[EngineHash, Held]
    groups: dict[int, GroupImage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Chain:
    """The consecutive blocks of an event: `token_ids` of all of them, `ids` per block or empty."""

    engine_hashes: Sequence[EngineHash]
    token_ids: Sequence[int]
    block_size: int
    ids: Sequence[BlockIds]

    def rest(self, start: int) -> _Chain:
        """The chain without its first `start` blocks."""
        tokens = self.token_ids[start * self.block_size :]
        return _Chain(self.engine_hashes[start:], tokens, self.block_size, self.ids[start:])

    def held(self, index: int, parent: EngineHash) -> Held:
        """One block of the chain, to be held below `parent`; it has no references yet."""
        tokens = self.token_ids[index * self.block_size : (index + 1) * self.block_size]
        ids = tuple(None if block is None else tuple(block) for block in self.ids[index : index + 1])
        return Held(parent, _NO_REFS, self.block_size, tuple(tokens), ids)

    def names(self, parent: int | None, seed: int | None) -> list[int | None]:
        """Each block's sequence hash; None for the first block that cannot be named and all after it."""
        count = len(self.engine_hashes)
        ids = self.ids or [()] * count
        understood = [] if seed is None else list(_until_none(ids))
        blocks = seeded_block_hashes(self.token_ids, self.block_size, seed or 0, understood)
        above = None if parent is None else SequenceHash(parent)
        return [*sequence_hashes(blocks, above), *([None] * (count - len(blocks)))]


class EngineBlocks:
    """Turns engine events into ops: see the picture above."""

    def __init__(
        self, max_held_blocks: int = MAX_HELD_BLOCKS, max_known_blocks: int = MAX_KNOWN_BLOCKS
    ) -> None:
        self.expects_reports = False
        self.max_held_blocks = max_held_blocks
        self.max_known_blocks = max_known_blocks
        # Stores that were ignored because the table is full.
        self.rejected_stores = 0
        self.ignored_removals = 0
        # Another program has announced chunks of its own.
        self.has_chunks = False
        self.dropped_held_blocks = 0
        self._published = PublishedBlocks()
        self._known: dict[EngineHash, Known] = {}
        self._held: dict[EngineHash, Held] = {}
        self._waiting: dict[EngineHash, set[EngineHash]] = {}
        self._resume_points = ResumePoints(self._known)
        self._has_groups = False  # besides the published one; a short way for most engines

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
        return [*self._published.state_ops(), *self._resume_points.state_ops()]

    def check_ops(self) -> list[Op]:
        """One Check per tier set that exists, and one of the resume points if there are other groups."""
        return [*self._published.check_ops(), *self._resume_points.check_ops()]

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

        `ids` has one entry per block, or is empty. Without tokens (vLLM's offload tiers) only hashes that are
        known already count. Raises ValueError if tokens and hashes do not fit together.
        """
        if len(self._known) >= self.max_known_blocks:
            self.rejected_stores += 1
            return []
        if not token_ids:
            return self._stored_again(engine_hashes, tier)
        if len(token_ids) != len(engine_hashes) * block_size or len(ids) not in (0, len(engine_hashes)):
            raise ValueError(
                f"{len(engine_hashes)} blocks of {block_size} with {len(token_ids)} tokens, {len(ids)} ids"
            )
        chain = _Chain(engine_hashes, token_ids, block_size, ids)
        is_counted = not (self.expects_reports and parent is None)
        self._store(chain, parent, block_seed(lora_name, salt), tier, is_counted=is_counted)
        return self._take_ops()

    def stored_chunks(
        self,
        chunk_hashes: Sequence[EngineHash],
        token_ids: Sequence[int],
        *,
        block_size: int,
        parent: EngineHash | None,
        tier: int,
    ) -> list[Op]:
        """Count chunks that a tier outside the engine (LMCache) holds under hashes of its own.

        A chunk is several blocks. Its event has neither salt nor adapter, so it counts only if the device
        holds its last block under the plain name: then this very prompt has just been computed. Hashes that
        the engine has announced count as copies of its blocks.
        """
        if len(self._known) >= self.max_known_blocks:
            self.rejected_stores += 1
            return []
        if not chunk_hashes or any(chunk in self._known or chunk in self._held for chunk in chunk_hashes):
            return self._stored_again(chunk_hashes, tier)
        self.has_chunks = True
        size = len(token_ids) // len(chunk_hashes)
        count, rest = divmod(size, block_size)
        above = None if parent is None else self._known.get(_part(parent, count - 1))
        if rest or (parent is not None and above is None):
            return []
        place, seed = above.sequence if above else None, block_seed(None, None)
        for index, chunk in enumerate(chunk_hashes):
            tokens = token_ids[index * size : (index + 1) * size]
            parts = _Chain([_part(chunk, number) for number in range(count)], tokens, block_size, ())
            last = parts.names(place, seed)[-1]
            if last is None or not self._published.is_on_device(last):
                break
            if parts.engine_hashes[0] not in self._known:
                self._name(parts, place, seed, tier, is_counted=True)
            place = last
        return self._published.take_ops()

    def removed(self, engine_hashes: Sequence[EngineHash], tier: int = DEVICE) -> list[Op]:
        """Remove one reference from each; hashes without a reference in `tier` are ignored."""
        for engine_hash in engine_hashes:
            self._remove(engine_hash, tier)
        return self._take_ops()

    def group_stored(
        self, group: int, needed: int, engine_hashes: Sequence[EngineHash], *, is_root: bool
    ) -> list[Op]:
        """Count one reference to each block of another KV group; `needed` as in ResumePoints."""
        if self._resume_points.stored_hashes >= self.max_known_blocks:
            self.rejected_stores += 1
            return []
        may_be_report = self.expects_reports and is_root
        if may_be_report and needed:
            engine_hashes = engine_hashes[-needed:]
        self._has_groups = True
        self._resume_points.stored(group, needed, engine_hashes, again=may_be_report)
        return self._resume_points.take_ops()

    def group_removed(self, group: int, engine_hashes: Sequence[EngineHash]) -> list[Op]:
        """Remove one reference from each block of another KV group; blocks without one are ignored."""
        self.ignored_removals += self._resume_points.removed(group, engine_hashes)
        return self._resume_points.take_ops()

    def cleared(self) -> list[Op]:
        """Remove all blocks from all tiers."""
        self._known.clear()
        self._held.clear()
        self._waiting.clear()
        self._published.clear()
        self._resume_points.clear()
        self._has_groups = False
        return self._published.take_ops()

    def image(self) -> BlocksImage:
        """The present table, for `restore`; later changes do not alter it."""
        return BlocksImage(self._known.copy(), self._held.copy(), self._resume_points.image())

    def restore(self, image: BlocksImage) -> None:
        """Take over a saved table; this one must be empty. `state_ops` has the resulting ops."""
        self._known.update(image.known)
        for sequence, parent, tier in _references(self._known):
            self._published.add(sequence, parent, tier)
        self._published.take_ops()
        for engine_hash, held in image.held.items():
            self._held[engine_hash] = held
            self._waiting.setdefault(held.parent, set()).add(engine_hash)
        self._resume_points.restore(image.groups)
        self._has_groups = bool(image.groups)

    def _take_ops(self) -> list[Op]:
        ops = self._published.take_ops()
        return [*ops, *self._resume_points.take_ops()] if self._has_groups else ops

    def _stored_again(self, engine_hashes: Sequence[EngineHash], tier: int) -> list[Op]:
        for engine_hash in engine_hashes:
            known, held = self._known.get(engine_hash), self._held.get(engine_hash)
            if known is not None:
                self._refer(engine_hash, known, tier)
            elif held is not None:
                self._held[engine_hash] = replace(held, refs=_counted(held.refs, tier, 1))
        return self._published.take_ops()

    def _store(
        self, chain: _Chain, above: EngineHash | None, root_seed: int, tier: int, *, is_counted: bool
    ) -> None:
        for index, engine_hash in enumerate(chain.engine_hashes):
            known = self._known.get(engine_hash)
            if known is not None:
                self._store_known(engine_hash, known, tier, is_counted=is_counted)
            elif above is None:
                return self._name(chain.rest(index), None, root_seed, tier, is_counted=is_counted)
            elif above in self._known:
                place = self._known[above]
                rest = chain.rest(index)
                return self._name(rest, place.sequence, place.seed, tier, is_counted=is_counted)
            else:
                self._hold(chain, index, above, tier)
            above = engine_hash
        return None

    def _name(
        self, chain: _Chain, parent: int | None, seed: int | None, tier: int, *, is_counted: bool
    ) -> None:
        """Name and count a chain whose parent is known. All hashes are computed in one native call."""
        for engine_hash, sequence in zip(chain.engine_hashes, chain.names(parent, seed), strict=True):
            known = self._known.get(engine_hash)
            if known is None:
                self._learn(engine_hash, sequence, parent, seed, tier)
            else:
                self._store_known(engine_hash, known, tier, is_counted=is_counted)
            parent = sequence

    def _store_known(self, engine_hash: EngineHash, known: Known, tier: int, *, is_counted: bool) -> None:
        if is_counted or not known.refs[tier]:
            self._refer(engine_hash, known, tier)

    def _learn(
        self, engine_hash: EngineHash, sequence: int | None, parent: int | None, seed: int | None, tier: int
    ) -> None:
        if engine_hash in self._held:
            self._drop_held(engine_hash)  # announced below another parent before: the known parent counts
        self._refer(engine_hash, _known(sequence, parent, seed), tier)
        if self._has_groups:
            self._resume_points.learned(engine_hash)
        self._name_waiting(engine_hash)

    def _refer(self, engine_hash: EngineHash, known: Known, tier: int, count: int = 1) -> None:
        refs = _counted(known.refs, tier, count)
        # a new entry, not a changed one: an image may share the old one
        self._known[engine_hash] = Known(known.sequence, known.parent, known.seed, refs)
        if known.sequence is not None:
            for _ in range(count):
                self._published.add(known.sequence, known.parent, tier)

    def _hold(self, chain: _Chain, index: int, parent: EngineHash, tier: int) -> None:
        engine_hash = chain.engine_hashes[index]
        held = self._held.get(engine_hash)
        if held is None:
            held = chain.held(index, parent)
            self._waiting.setdefault(parent, set()).add(engine_hash)
        self._held[engine_hash] = replace(held, refs=_counted(held.refs, tier, 1))
        if len(self._held) > self.max_held_blocks:
            self._drop_held(next(iter(self._held)))  # the oldest: a dict keeps the order of insertion
            self.dropped_held_blocks += 1

    def _name_waiting(self, engine_hash: EngineHash) -> None:
        """Name all blocks that were held below a block that is now known, at every depth."""
        pending = [engine_hash] if self._waiting else []
        while pending:
            above = pending.pop()
            for child in self._waiting.pop(above, ()):
                self._name_held(child, self._held.pop(child), self._known[above])
                pending.append(child)

    def _name_held(self, engine_hash: EngineHash, held: Held, place: Known) -> None:
        chain = _Chain([engine_hash], held.token_ids, held.block_size, held.ids)
        (sequence,) = chain.names(place.sequence, place.seed)
        self._known[engine_hash] = _known(sequence, place.sequence, place.seed)
        for tier, count in enumerate(held.refs):
            self._refer(engine_hash, self._known[engine_hash], tier, count)
        if self._has_groups:
            self._resume_points.learned(engine_hash)

    def _drop_held(self, engine_hash: EngineHash) -> None:
        held = self._held.pop(engine_hash)
        siblings = self._waiting[held.parent]
        siblings.discard(engine_hash)
        if not siblings:
            del self._waiting[held.parent]

    def _remove(self, engine_hash: EngineHash, tier: int) -> None:
        known, held = self._known.get(engine_hash), self._held.get(engine_hash)
        if known is not None and known.refs[tier]:
            self._remove_known(engine_hash, known, tier)
        elif held is not None and held.refs[tier]:
            self._remove_held(engine_hash, held, tier)
        elif _part(engine_hash, 0) in self._known:
            self._remove_chunk(engine_hash, tier)
        else:
            self.ignored_removals += 1

    def _remove_chunk(self, chunk: EngineHash, tier: int) -> None:
        count = 0
        while _part(chunk, count) in self._known:
            count += 1
        for number in reversed(range(count)):
            self._remove(_part(chunk, number), tier)

    def _remove_known(self, engine_hash: EngineHash, known: Known, tier: int) -> None:
        refs = _counted(known.refs, tier, -1)
        if known.sequence is not None:
            self._published.drop(known.sequence, tier)
        if any(refs):
            self._known[engine_hash] = Known(known.sequence, known.parent, known.seed, refs)
        else:
            if self._has_groups:
                self._resume_points.forgotten(engine_hash)
            del self._known[engine_hash]

    def _remove_held(self, engine_hash: EngineHash, held: Held, tier: int) -> None:
        refs = _counted(held.refs, tier, -1)
        if any(refs):
            self._held[engine_hash] = replace(held, refs=refs)
        else:
            self._drop_held(engine_hash)

    def check(self) -> None:
        """Raise if an invariant is broken. Tests call this after every step."""
        named = [(sequence, tier) for sequence, _, tier in _references(self._known)]
        self._published.check(named)
        self._resume_points.check()
        assert not self._known.keys() & self._held.keys(), "both known and held"
        entries: list[Known | Held] = [*self._known.values(), *self._held.values()]
        assert all(any(entry.refs) and min(entry.refs) >= 0 for entry in entries), "unreferenced"
        assert not self._waiting.keys() & self._known.keys(), "held below a known block"
        waiting = {(parent, child) for parent, children in self._waiting.items() for child in children}
        assert waiting == {(held.parent, engine_hash) for engine_hash, held in self._held.items()}, "waiting"
        assert len(self._held) <= self.max_held_blocks, "holds too much"


def _known(sequence: int | None, parent: int | None, seed: int | None) -> Known:
    """A block without references. A block without a sequence hash has no seed for the blocks below it."""
    return Known(sequence, parent, None if sequence is None else seed, _NO_REFS)


def _part(chunk: EngineHash, number: int) -> bytes:
    """The engine hash that stands for one block of a chunk. The engine's own have another length."""
    return (chunk if isinstance(chunk, bytes) else b"%d" % chunk) + b"/%d" % number


def _counted(refs: Refs, tier: int, change: int) -> Refs:
    device, host, disk = refs
    if tier == DEVICE:
        return device + change, host, disk
    return (device, host + change, disk) if tier == HOST else (device, host, disk + change)


def _references(known: Mapping[EngineHash, Known]) -> Iterator[tuple[int, int | None, int]]:
    """Sequence hash, parent and tier of every reference that counts."""
    for block in known.values():
        if block.sequence is not None:
            for tier, count in enumerate(block.refs):
                for _ in range(count):
                    yield block.sequence, block.parent, tier


def _until_none(ids: Sequence[BlockIds]) -> Iterator[Sequence[int]]:
    for block_ids in ids:
        if block_ids is None:
            return
        yield block_ids
