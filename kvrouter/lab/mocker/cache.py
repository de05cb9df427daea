"""The paged KV cache of one engine: physical blocks, prefix reuse and eviction, with vLLM's semantics.

    chain of a request      [ b7 | b3 | b12 | b4 ]     physical blocks it holds
    their engine hashes     [ h0 | h1 | h2  |    ]     full blocks only; b4 is partial

    _home    h -> first block with that hash           _spares   h -> further copies
    blank: no hash, taken first                        idle: hash, no holder, evictable, in `_order`

As in vLLM's block pool, and unlike in a set, storing the same hash again keeps a second copy and announces it
again; each copy is removed, and announced, separately. So there is one event per physical block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvrouter.core.wire.hashes import MediaSpan
from kvrouter.lab.mocker.events import (
    CPU,
    GPU,
    SPEC_KIND,
    ClearedBlocks,
    ExtraKeys,
    KvEvent,
    StoredBlocks,
    removed,
)
from kvrouter.lab.mocker.eviction import ORDERS, EvictionOrder
from kvrouter.lab.mocker.hashing import (
    TokenIds,
    chain_hashes,
    images_by_block,
    images_key,
    lookahead_key,
    lora_key,
    root_hash,
)


class HostTier:
    """Blocks evicted from the device, kept in CPU memory: at most `capacity_blocks` distinct hashes.

    Invariant: the parent of a block kept here is here or on the device. A block comes here when its last copy
    leaves the device, so leaves come first, and the oldest blocks are evicted first.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._kept: OrderedDict[int, None] = OrderedDict()

    def keep(self, stored: StoredBlocks) -> Iterator[KvEvent]:
        """Take one block that leaves the device; yields the resulting events."""
        (engine_hash,) = stored.block_hashes
        if engine_hash in self._kept:
            self._kept.move_to_end(engine_hash)  # a copy stayed here when the block was last loaded
            return
        if len(self._kept) == self.capacity_blocks:
            yield removed(self._kept.popitem(last=False)[0], CPU)
        self._kept[engine_hash] = None
        yield stored

    def touch(self, engine_hashes: Iterable[int]) -> None:
        """Mark blocks as used, deepest first: they are evicted last."""
        for engine_hash in engine_hashes:
            self._kept.move_to_end(engine_hash)

    def clear(self) -> None:
        """Remove all blocks; the caller publishes the event."""
        self._kept.clear()

    def __contains__(self, engine_hash: int) -> bool:
        return engine_hash in self._kept

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


class Hit(NamedTuple):
    """Leading blocks of a chain that need not be computed, on the device and then on the host."""

    device_blocks: int
    host_blocks: int

    @property
    def blocks(self) -> int:
        return self.device_blocks + self.host_blocks


class Chain:
    """The blocks of one request, as the cache sees them."""

    __slots__ = (
        "_images",
        "_key",
        "_root",
        "blocks",
        "hashes",
        "lookahead",
        "lora_name",
        "salt",
        "stored_blocks",
        "tokens",
    )

    def __init__(
        self,
        tokens: TokenIds,
        block_size: int,
        *,
        lora_name: str | None = None,
        salt: str | None = None,
        media: Sequence[MediaSpan] = (),
        lookahead: int = 0,
    ) -> None:
        """`lookahead`: tokens behind a block that its hash covers, too (EAGLE and MTP on vLLM 0.33)."""
        self.tokens = tokens
        self.lookahead = lookahead
        self.lora_name = lora_name
        self.salt = salt
        self._root = root_hash(salt)
        self._key = lora_key(lora_name)
        # Per block up to the last image: the id of each image in it, and where that begins.
        self._images = images_by_block(media, block_size)
        self.hashes: list[int] = []
        self.blocks: list[int] = []
        # Leading blocks that the cache knows by their hash.
        self.stored_blocks = 0
        self.name_blocks(len(tokens) // block_size, block_size)

    def name_blocks(self, full_blocks: int, block_size: int) -> None:
        """Hash the blocks up to `full_blocks` that have no hash yet and whose look-ahead is known."""
        named = len(self.hashes)
        full_blocks = min(full_blocks, max(0, len(self.tokens) - self.lookahead) // block_size)
        if named >= full_blocks:
            return
        parent = self.hashes[-1] if named else self._root
        fresh = self.tokens[named * block_size : full_blocks * block_size]
        keys = [images_key(images) for images in self._images[named:full_blocks]]
        if self.lookahead:
            keys += [0] * (full_blocks - named - len(keys))
            behind = self.behind(named, full_blocks, block_size)
            keys = [key ^ lookahead_key(tokens) for key, tokens in zip(keys, behind, strict=True)]
        self.hashes.extend(chain_hashes(fresh, block_size, parent=parent, key=self._key, keys=keys))

    def behind(self, first: int, last: int, block_size: int) -> list[TokenIds]:
        """The look-ahead of blocks `first` to `last`."""
        ends = range((first + 1) * block_size, (last + 1) * block_size, block_size)
        return [self.tokens[end : end + self.lookahead] for end in ends]

    def extra_keys(self, first: int, last: int) -> ExtraKeys:
        """`extra_keys` of an event for blocks `first` to `last`."""
        return [self._extra_keys(block) for block in range(first, last)]

    def _extra_keys(self, block: int) -> list[str | list[str | int]] | None:
        here = self._images[block] if block < len(self._images) else ()
        images: list[str | list[str | int]] = [[f"{item:016x}", offset] for item, offset in here]
        salt = [self.salt] if block == 0 and self.salt else []
        lora = [self.lora_name] if self.lora_name else []
        return [*lora, *images, *salt] or None


class BlockCache:
    """The blocks of one engine.

    Invariants (`check`): a block is blank, idle or held; only idle ones are evicted; the parent of a
    cached hash is cached; used_blocks counts the held ones.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, eviction: str = "lru", host_blocks: int = 0
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Blocks held by requests.
        self.used_blocks = 0
        self.host = HostTier(host_blocks)
        # Per physical block that was ever taken: a large cache costs nothing until it is used.
        self._hash_of: list[int | None] = []
        self._holders: list[int] = []
        self._home: dict[int, int] = {}
        self._spares: dict[int, list[int]] = {}
        self._blanks: list[int] = []
        self._order: EvictionOrder = ORDERS[eviction]()
        self._content: dict[int, StoredBlocks] = {}  # only with a host tier: what to announce when moved
        self._events: list[KvEvent] = []

    # --- reading ---

    @property
    def free_blocks(self) -> int:
        """Blocks that a request could take now: blank or evictable."""
        return self.num_blocks - self.used_blocks

    def cached_hashes(self) -> Iterator[int]:
        """The hashes that can be hit on the device."""
        return iter(self._home)

    def lookup(self, chain: Chain, limit_blocks: int) -> Hit:
        """How many of the chain's first `limit_blocks` blocks are cached without a gap."""
        device = 0
        hashes = chain.hashes
        for engine_hash in islice(hashes, limit_blocks):
            if engine_hash not in self._home:
                break
            device += 1
        depth = device
        while depth < min(limit_blocks, len(hashes)) and hashes[depth] in self.host:
            depth += 1
        return Hit(device, depth - device)

    # --- holding blocks ---

    def open(self, chain: Chain, hit: Hit, blocks: int, *, must_fit_blocks: int) -> bool:
        """Hold the hit blocks and take new ones, up to `blocks`; False, and no change, if too few are free.

        `must_fit_blocks`, the whole prompt, must fit even if this step computes only a part of it (vLLM's
        `scheduler_reserve_full_isl`).
        """
        homes = [self._home[engine_hash] for engine_hash in chain.hashes[: hit.device_blocks]]
        idle = sum(not self._holders[block] for block in homes)
        if must_fit_blocks - len(homes) + idle > self.free_blocks:
            return False
        for block in homes:
            self._hold(block)
        self._order.used(chain.hashes[: hit.device_blocks])
        chain.blocks = homes
        chain.stored_blocks = len(homes)  # blocks from the host are stored again, and announced on the device
        self.host.touch(reversed(chain.hashes[hit.device_blocks : hit.blocks]))
        chain.blocks.extend(self._take() for _ in range(blocks - len(homes)))
        return True

    def grow(self, chain: Chain, blocks: int) -> bool:
        """Take new blocks up to `blocks`; False, and no change, if too few are free."""
        missing = blocks - len(chain.blocks)
        if missing > self.free_blocks:
            return False
        chain.blocks.extend(self._take() for _ in range(missing))
        return True

    def store(self, chain: Chain, full_blocks: int) -> None:
        """Make the chain's first `full_blocks` blocks reusable, and announce the new ones."""
        first = chain.stored_blocks
        chain.name_blocks(full_blocks, self.block_size)
        full_blocks = min(full_blocks, len(chain.hashes))
        if full_blocks <= first:
            return
        for depth in range(first, full_blocks):
            self._name(chain.blocks[depth], chain.hashes[depth])
        self._order.used(chain.hashes[first:full_blocks])
        chain.stored_blocks = full_blocks
        self._events.append(self._stored(chain, first, full_blocks))
        if self.host.capacity_blocks:
            self._remember(chain, first, full_blocks)

    def release(self, chain: Chain) -> None:
        """Release all blocks, tail first, so that leaves are evicted before their parents."""
        for block in reversed(chain.blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._retire(block)
        chain.blocks = []
        chain.stored_blocks = 0

    def clear(self) -> bool:
        """Empty the cache; False, and no change, while blocks are held."""
        if self.used_blocks:
            return False
        self._blanks.extend(self._order.pop() for _ in range(len(self._order)))
        for engine_hash in self._home:
            self._order.forget(engine_hash)
        self._hash_of = [None] * len(self._hash_of)
        self._home.clear()
        self._spares.clear()
        self._content.clear()
        self.host.clear()
        self._events.append(ClearedBlocks())
        return True

    def take_events(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # --- single blocks ---

    def _hold(self, block: int) -> None:
        if self._holders[block] == 0:
            self._order.discard(block)
            self.used_blocks += 1
        self._holders[block] += 1

    def _take(self) -> int:
        """A blank block with one holder. The caller has checked that a block is free."""
        self.used_blocks += 1
        if self._blanks:
            block = self._blanks.pop()
        elif len(self._hash_of) < self.num_blocks:
            block = len(self._hash_of)
            self._hash_of.append(None)
            self._holders.append(0)
        else:
            block = self._order.pop()
            self._evict(block)
        self._holders[block] = 1
        return block

    def _retire(self, block: int) -> None:
        """The last holder has released the block: keep its contents for reuse, if they have a hash."""
        self.used_blocks -= 1
        engine_hash = self._hash_of[block]
        if engine_hash is None:
            self._blanks.append(block)
        else:
            self._order.push(block, engine_hash)

    def _name(self, block: int, engine_hash: int) -> None:
        self._hash_of[block] = engine_hash
        if engine_hash in self._home:
            self._spares.setdefault(engine_hash, []).append(block)
        else:
            self._home[engine_hash] = block

    def _evict(self, block: int) -> None:
        engine_hash = self._hash_of[block]
        assert engine_hash is not None
        self._hash_of[block] = None
        if self._drop_copy(engine_hash, block):
            self._order.forget(engine_hash)
            if self.host.capacity_blocks:
                # copied before it is removed, so that the block is in a tier at every moment
                self._events.extend(self.host.keep(self._content.pop(engine_hash)))
        self._events.append(removed(engine_hash, GPU))

    def _drop_copy(self, engine_hash: int, block: int) -> bool:
        """Remove one copy; True if it was the last."""
        spares = self._spares.get(engine_hash)
        if spares is None:
            del self._home[engine_hash]
            return True
        if self._home[engine_hash] == block:
            self._home[engine_hash] = spares.pop(0)
        else:
            spares.remove(block)
        if not spares:
            del self._spares[engine_hash]
        return False

    # --- events ---

    def _stored(self, chain: Chain, first: int, last: int, medium: str = GPU) -> StoredBlocks:
        behind = chain.behind(first, last, self.block_size) if chain.lookahead else None
        return StoredBlocks(
            block_hashes=chain.hashes[first:last],
            parent_block_hash=chain.hashes[first - 1] if first else None,
            token_ids=chain.tokens[first * self.block_size : last * self.block_size].tolist(),
            block_size=self.block_size,
            lora_id=None,  # deprecated in vLLM in favour of the name
            medium=medium,
            lora_name=chain.lora_name,
            extra_keys=chain.extra_keys(first, last),
            group_idx=0,
            kv_cache_spec_kind=SPEC_KIND,
            lookahead_token_ids=None if behind is None else [ids.tolist() for ids in behind],
        )

    def _remember(self, chain: Chain, first: int, last: int) -> None:
        for depth in range(first, last):
            self._content[chain.hashes[depth]] = self._stored(chain, depth, depth + 1, CPU)

    def check(self) -> None:
        """Raise if an invariant is broken. Tests call this after every step."""
        copies = Counter(h for h in self._hash_of if h is not None)
        known = {h: 1 + len(self._spares.get(h, ())) for h in self._home}
        assert copies == known, "the tables and the physical blocks name different hashes"
        for engine_hash, block in self._home.items():
            assert self._hash_of[block] == engine_hash, f"block {block} is not the home of {engine_hash}"
        held = sum(holders > 0 for holders in self._holders)
        assert held == self.used_blocks <= self.num_blocks, f"{held} held, {self.used_blocks} counted"
        idle = len(self._order)
        assert len(self._hash_of) == held + idle + len(self._blanks), "a block is in no list, or in two"
        assert len(self.host) <= self.host.capacity_blocks
