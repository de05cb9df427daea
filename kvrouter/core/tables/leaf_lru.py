"""Which block a full index loses next (`--index-full lru`): the least recently used one without a child.

    root ── A ── B ── C            C and D have no child. A block with one is never lost, so what targets
             └── D                 hold stays prefix-closed. If C goes, B may be next, as recently used as C

Only the deepest block that a prompt or an op reaches is marked as used: a block is as recently used as its
most recently used descendant, which it inherits when that one is lost.

Invariants: `children` of a node counts the nodes that name it as their parent; a node without children has an
entry in `_leaves` whose time is its `listed`, and is at least as recently used as that.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

SHARDS = 1024
_SHARD_MASK = SHARDS - 1
_NEVER = -1


class _LruNode:
    __slots__ = ("children", "listed", "parent", "used")

    def __init__(self, parent: int | None) -> None:
        self.parent = parent
        self.children = 0
        self.used = 0
        self.listed = _NEVER


class LeafLru:
    """The tree of the stored blocks, of all targets together: a sequence hash has one parent."""

    def __init__(self) -> None:
        # in shards, so that `prune` can take one at a time
        self._shards: list[dict[int, _LruNode]] = [{} for _ in range(SHARDS)]
        self._leaves: list[tuple[int, int]] = []
        self._uses = 0

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def store(self, hashes: Sequence[int], parent: int | None) -> None:
        """A chain of blocks below `parent` is stored; None: below the root."""
        self._uses += 1
        for hash_ in hashes:
            node = self._node(hash_)
            if node is None:
                node = self._shards[hash_ & _SHARD_MASK][hash_] = _LruNode(parent)
                above = self._node(parent)
                if above is not None:
                    above.children += 1
            node.used, parent = self._uses, hash_
        for hash_ in hashes:  # all of them: a wrong feed may name another parent than an earlier one
            self._list(hash_)

    def use(self, hash_: int) -> None:
        """A prompt has reached this block."""
        node = self._node(hash_)
        if node is not None:
            self._uses += 1
            node.used = self._uses

    def forget(self, hash_: int) -> None:
        """No target holds the block any more."""
        node = self._shards[hash_ & _SHARD_MASK].pop(hash_, None)
        above = self._node(node.parent) if node is not None else None
        if node is None or above is None or node.parent is None:
            return
        above.children -= 1
        above.used = max(above.used, node.used)
        self._list(node.parent)

    def oldest(self) -> int | None:
        """The block to lose next; None without any. The caller forgets it."""
        while self._leaves:
            listed, hash_ = self._leaves[0]
            node = self._node(hash_)
            if node is not None and node.listed == listed and not node.children:
                if node.used == listed:
                    return hash_
                node.listed = node.used  # used since: it goes back to its place
                heapq.heapreplace(self._leaves, (node.used, hash_))
                continue
            heapq.heappop(self._leaves)
            if node is not None and node.listed == listed:
                node.listed = _NEVER
        return None

    def prune(self, shard_number: int, is_held: Callable[[int], bool]) -> None:
        """Forget the blocks of one shard that nothing holds."""
        for hash_ in [hash_ for hash_ in self._shards[shard_number] if not is_held(hash_)]:
            self.forget(hash_)

    def check(self) -> None:
        """Raise if an invariant is broken. Tests call this after every step."""
        nodes = {hash_: node for shard in self._shards for hash_, node in shard.items()}
        entries = set(self._leaves)
        for hash_, node in nodes.items():
            children = sum(one.parent == hash_ for one in nodes.values())
            if node.children != children:
                raise AssertionError(f"{hash_} counts {node.children} children, it has {children}")
            if not children and ((node.listed, hash_) not in entries or node.used < node.listed):
                raise AssertionError(f"{hash_} has no child, and no entry {node.listed}")

    def _node(self, hash_: int | None) -> _LruNode | None:
        return None if hash_ is None else self._shards[hash_ & _SHARD_MASK].get(hash_)

    def _list(self, hash_: int) -> None:
        """Give the block an entry if it has no child."""
        node = self._node(hash_)
        if node is not None and not node.children and node.listed == _NEVER:
            node.listed = node.used
            heapq.heappush(self._leaves, (node.used, hash_))
