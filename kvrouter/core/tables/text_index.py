"""The text index: which target has been sent which text, per character, as Ray's prefix tree knows it.

    insert("hello", A)                 insert("help", B)

    root ── "hello" {A}                root ── "hel" {A, B} ─┬─ "lo" {A}
                                                             └─ "p"  {B}

An edge carries as much text as no prompt has divided, so a look-up compares slices instead of
walking characters: a 36,000-character prompt costs about as much as a short one. With
`block_chars` > 1 what is matched is rounded down to whole blocks of so many characters.

Eviction is per target, least recently inserted text first; nodes of one insert go together.
Source: Ray Serve, PrefixCacheAffinityRouter.

An insert takes a step for each edge on the text's path: as many as texts that are still held branch
off it. Nothing grows with the number of inserts.

Invariants: a target that holds a node holds its parent, and used the parent no earlier; a node but
the root has text and a holder; a target's characters are the sum over the nodes it holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvrouter.core.wire.ids import Target
from kvrouter.errors import ConfigError

STEP_NODES = 500
"""Letting go of so many nodes takes less than a millisecond."""
CEILING_CHARS = 16_000_000
"""A target's texts above this are evicted by the insert itself, which may take a second."""
TRIM_CHARS = CEILING_CHARS * 3 // 4
"""Above this they are evicted in steps, even without `do_eviction` (Ray's grow without bound)."""


@dataclass(frozen=True, slots=True)
class TextIndexSettings:
    """Names and defaults are Ray's."""

    block_chars: int = 1
    do_eviction: bool = False
    eviction_threshold_chars: int = 400_000
    eviction_target_chars: int = 360_000
    eviction_interval_secs: float = 10.0

    def __post_init__(self) -> None:
        if self.block_chars < 1:
            raise ConfigError(f"block_chars {self.block_chars}: use at least 1")
        if not 0 <= self.eviction_target_chars <= self.eviction_threshold_chars:
            raise ConfigError(
                f"eviction_target_chars {self.eviction_target_chars}: use at least 0, and no more than "
                f"eviction_threshold_chars, {self.eviction_threshold_chars}"
            )


class _Node:
    """`used` maps each holder to the time of its last insert through here."""

    __slots__ = ("children", "parent", "text", "used")

    def __init__(self, text: str, parent: _Node | None) -> None:
        self.text = text
        self.parent = parent
        self.children: dict[str, _Node] = {}
        self.used: dict[Target, float] = {}


class TextIndex:
    """Texts by target."""

    def __init__(self, settings: TextIndexSettings | None = None) -> None:
        self.settings = settings or TextIndexSettings()
        self._root = _Node("", None)
        self._chars: dict[Target, int] = {}
        self._evicted_at: float | None = None

    def chars(self, target: Target) -> int:
        """Characters the target is taken to hold."""
        return self._chars.get(target, 0)

    def insert(self, target: Target, text: str, now: float) -> None:
        """The target has computed this text at `now`."""
        node, start, added = self._root, 0, 0
        while start < len(text):
            node, start = self._step(node, text, start)
            if target not in node.used:
                added += len(node.text)
            node.used[target] = max(now, node.used.get(target, now))
            _join(node)
        self._chars[target] = self._chars.get(target, 0) + added
        if self._chars[target] > CEILING_CHARS:
            self.evict(target, self._chars[target] - CEILING_CHARS * 9 // 10)

    def match(self, text: str, targets: Iterable[Target]) -> tuple[int, set[Target]]:
        """How many leading characters any of the targets holds, and which of them do.

        Nobody holds the first character: 0, and all of them. Whoever holds a node holds its parents,
        so only the last one is looked at closely.
        """
        wanted = set(targets)
        node, start = self._root, 0
        while start < len(text):
            child = node.children.get(text[start])
            if child is None or wanted.isdisjoint(child.used):
                break
            shared = _shared_chars(child.text, text, start)
            start += shared
            node = child
            if shared < len(child.text):
                break
        holders = wanted if node is self._root else wanted.intersection(node.used)
        return start - start % self.settings.block_chars, holders

    def smallest(self, targets: Iterable[Target]) -> set[Target]:
        """Those of the targets that hold the fewest characters; one that is new holds none."""
        sizes = {target: self.chars(target) for target in targets}
        least = min(sizes.values(), default=0)
        return {target for target, size in sizes.items() if size == least}

    def remove(self, target: Target) -> int:
        """The target is gone; returns how many characters it held."""
        for node in list(self._held(target)):  # children before parents
            self._let_go(node, target)
        return self._chars.pop(target, 0)

    def evict(self, target: Target, chars: int) -> int:
        """Take at least so many characters from a target, least recently used first; returns how many.

        What one insert used last goes as a whole: it has been split only by other prompts.
        """
        return sum(self._eviction(target, chars))

    def evict_due(self, now: float) -> int:
        """`eviction` at once; returns how many characters went."""
        return sum(self.eviction(now))

    def eviction(self, now: float) -> Iterator[int]:
        """Every `eviction_interval_secs`: bring each target above the threshold down to its aim.

        In steps, each of which returns the characters it took; between two of them anything may be
        inserted or removed. Without `do_eviction`, at every call: bring those above `TRIM_CHARS` 10 % below.
        """
        wanted = self.settings
        if not wanted.do_eviction:
            for target in [target for target, size in self._chars.items() if size > TRIM_CHARS]:
                yield from self._eviction(target, self.chars(target) - TRIM_CHARS * 9 // 10)
            return
        if self._evicted_at is not None and now - self._evicted_at < wanted.eviction_interval_secs:
            return
        self._evicted_at = now
        full = [target for target, size in self._chars.items() if size > wanted.eviction_threshold_chars]
        for target in full:
            yield from self._eviction(target, self.chars(target) - wanted.eviction_target_chars)

    def _eviction(self, target: Target, chars: int) -> Iterator[int]:
        """Steps of `STEP_NODES`; a node that was used or let go since they began is passed over."""
        entries: list[tuple[float, int, _Node]] = []
        for node in self._walk(target):
            entry = node.used.get(target, 0.0), -len(entries), node
            heapq.heappush(entries, entry)  # least recently used first, children before parents
            if len(entries) % STEP_NODES == 0:
                yield 0
        removed = told = 0
        last: float | None = None
        while entries:
            used, _, node = heapq.heappop(entries)
            if removed >= chars and used != last:
                break
            if node.used.get(target) == used:
                last = used
                removed += len(node.text)
                self._chars[target] -= len(node.text)
                self._let_go(node, target)
            if len(entries) % STEP_NODES == 0:
                yield removed - told
                told = removed
        yield removed - told

    def _walk(self, target: Target) -> Iterator[_Node]:
        """The nodes a target holds, parents before children; the tree may change on the way."""
        stack = [self._root]
        while stack:
            children = [child for child in stack.pop().children.values() if target in child.used]
            stack.extend(children)
            yield from children

    def check(self) -> None:
        """Raise if an invariant is broken. Tests call this after every step."""
        chars: dict[Target, int] = {}
        for node in _below(self._root):
            if not node.text or not node.used or node.parent is None:
                raise AssertionError(f"an empty node is kept: {node.text!r} {node.used}")
            if node.parent.children.get(node.text[0]) is not node:
                raise AssertionError(f"{node.text!r} is not its parent's child")
            for target, used in node.used.items():
                chars[target] = chars.get(target, 0) + len(node.text)
                if node.parent is not self._root and node.parent.used.get(target, -1.0) < used:
                    raise AssertionError(f"{target} used {node.text!r} later than its parent")
        if chars != {target: size for target, size in self._chars.items() if size}:
            raise AssertionError(f"characters do not add up: {chars} != {self._chars}")

    def _step(self, node: _Node, text: str, start: int) -> tuple[_Node, int]:
        """The child that holds what follows in the text, made or split if need be, and where it ends."""
        child = node.children.get(text[start])
        if child is None:
            child = node.children[text[start]] = _Node(text[start:], node)
            return child, len(text)
        shared = _shared_chars(child.text, text, start)
        if shared < len(child.text):
            child = _split(child, shared)
        return child, start + shared

    def _held(self, target: Target) -> Iterator[_Node]:
        return _below(self._root, target)

    def _let_go(self, node: _Node, target: Target) -> None:
        del node.used[target]
        if not node.used and node.parent is not None:
            del node.parent.children[node.text[0]]


def _below(root: _Node, target: Target | None = None) -> Iterator[_Node]:
    """The nodes below the root, or those that a target holds, children before their parents."""
    stack, found = [root], []
    while stack:
        node = stack.pop()
        children = [child for child in node.children.values() if target is None or target in child.used]
        found.extend(children)
        stack.extend(children)
    return reversed(found)


def _split(node: _Node, length: int) -> _Node:
    """Put a node with the first `length` characters above this one; returns it."""
    assert node.parent is not None, "the root has no text to split"
    upper = _Node(node.text[:length], node.parent)
    upper.used = dict(node.used)
    node.parent.children[upper.text[0]] = upper
    node.text, node.parent = node.text[length:], upper
    upper.children[node.text[0]] = node
    return upper


def _join(node: _Node) -> None:
    """Take the parent's text too, if no other text divides them and each target used them together.

    Otherwise a shared beginning would stay cut wherever a text that has been evicted left it.
    """
    upper = node.parent
    if upper is None or upper.parent is None or len(upper.children) > 1 or upper.used != node.used:
        return
    node.text, node.parent = upper.text + node.text, upper.parent
    node.parent.children[node.text[0]] = node
    upper.used = {}  # an eviction that has it listed passes it over


def _shared_chars(edge: str, text: str, start: int) -> int:
    """How many leading characters `edge` shares with the text from `start` on: compared in halves."""
    low, high = 0, min(len(edge), len(text) - start)
    if text.startswith(edge[:high], start):
        return high
    while high - low > 1:  # edge[:low] is shared, edge[:high] is not
        middle = (low + high) >> 1
        if text.startswith(edge[low:middle], start + low):
            low = middle
        else:
            high = middle
    return low
