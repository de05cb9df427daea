"""The text index of mode prefix-affinity: which target has computed which text, as a prefix tree.

    insert("hello", A)                 insert("help", B)

    root ── "hello" {A}                root ── "hel" {A, B} ─┬─ "lo" {A}
                                                             └─ "p"  {B}

An edge carries all characters up to the place where two prompts differ, so a look-up compares slices and
does not walk characters: a prompt of 36,000 characters costs about as much as a short one. With
`block_chars` > 1 a match is rounded down to whole blocks of characters.

Eviction is per target, least recently inserted text first. Source: Ray Serve, PrefixCacheAffinityRouter.

An insert takes one step for each edge on the text's path, and texts that are still held are the only ones
that cut an edge: nothing grows with the number of inserts.

Invariants: a target that holds a node holds its parent, and used the parent no earlier; every node except
the root has text and a holder; a target's characters are the sum over the nodes it holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvrouter.core.wire.ids import Target
from kvrouter.core.wire.ops import MAX_SENT_CHARS, SentText
from kvrouter.core.wire.values import valid_unicode
from kvrouter.errors import ConfigError
from kvrouter.settings.declare import Settings, setting

# An eviction of 500 nodes takes less than a millisecond; between two steps requests are routed.
STEP_NODES = 500
# Ray's index grows without bound unless `do_eviction` is set. Here a target above TRIM_CHARS is trimmed in
# steps. The ceiling is for texts that arrive faster than the steps: then the insert itself evicts, which may
# take a second.
CEILING_CHARS = 16_000_000
TRIM_CHARS = CEILING_CHARS * 3 // 4
# About two targets' worth at Ray's threshold for eviction; a joining replica gets no more.
KEPT_CHARS = 1_000_000


@dataclass(frozen=True, slots=True)
class TextIndexSettings(Settings):
    """Names and defaults are those of Ray Serve."""

    heading = "Mode prefix-affinity"

    block_chars: int = 1
    do_eviction: bool = setting(False, "evict old texts")
    eviction_threshold_chars: int = setting(
        400_000, "characters of a worker above which its oldest texts are evicted", least=1
    )
    eviction_target_chars: int = setting(360_000, "characters that remain after an eviction", least=1)
    eviction_interval_secs: float = setting(
        10.0,
        "seconds between two evictions",
        name="eviction-interval-s",
        old=("--eviction-interval-secs",),
        above=0,
    )

    def __post_init__(self) -> None:
        if self.block_chars < 1:
            raise ConfigError(f"block_chars {self.block_chars}: use at least 1")
        if not 0 <= self.eviction_target_chars <= self.eviction_threshold_chars:
            raise ConfigError(
                f"eviction_target_chars {self.eviction_target_chars}: use at least 0, and no more than "
                f"eviction_threshold_chars, {self.eviction_threshold_chars}"
            )


class _TextNode:
    """`used` maps each holder to the time of its last insert through here."""

    __slots__ = ("children", "parent", "text", "used")

    def __init__(self, text: str, parent: _TextNode | None) -> None:
        self.text = text
        self.parent = parent
        self.children: dict[str, _TextNode] = {}
        self.used: dict[Target, float] = {}


class TextIndex:
    def __init__(self, settings: TextIndexSettings | None = None) -> None:
        self.settings = settings or TextIndexSettings()
        self._root = _TextNode("", None)
        self._chars: dict[Target, int] = {}
        self._evicted_at: float | None = None

    def chars(self, target: Target) -> int:
        """Characters that the target is assumed to hold."""
        return self._chars.get(target, 0)

    def insert(self, target: Target, text: str, now: float) -> None:
        """Record that the target has computed this text at `now`."""
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
        """The most leading characters that any of the targets holds, and which of them hold so much.

        `(0, all targets)` if none holds the first character. The holders of a node hold its parents too, so
        only the last node on the path needs the intersection.
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
        """The targets that hold the fewest characters; a new target holds none."""
        sizes = {target: self.chars(target) for target in targets}
        least = min(sizes.values(), default=0)
        return {target for target, size in sizes.items() if size == least}

    def remove(self, target: Target) -> int:
        """Forget the target; returns how many characters it held."""
        for node in list(self._held(target)):  # children before parents
            self._release(node, target)
        return self._chars.pop(target, 0)

    def evict(self, target: Target, chars: int) -> int:
        """Take at least `chars` characters from a target, least recently used first; returns how many.

        Nodes last used by one insert go together, as one text: only other prompts have cut it.
        """
        return sum(self._eviction(target, chars))

    def evict_due(self, now: float) -> int:
        """All steps of `eviction` at once; returns how many characters were taken."""
        return sum(self.eviction(now))

    def eviction(self, now: float) -> Iterator[int]:
        """Evict in steps, each of which yields the characters it took.

        With `do_eviction`: every `eviction_interval_secs`, from each target above the threshold down to
        `eviction_target_chars`. Without: at every call, from each target above TRIM_CHARS to 10 % below it.
        Texts may be inserted and removed between two steps.
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
        """Take nodes in steps of STEP_NODES; skip a node that was used or released since the first step."""
        entries: list[tuple[float, int, _TextNode]] = []
        for node in self._walk(target):
            entry = node.used.get(target, 0.0), -len(entries), node
            heapq.heappush(entries, entry)  # least recently used first, children before parents
            if len(entries) % STEP_NODES == 0:
                yield 0
        removed = reported = 0
        last: float | None = None
        while entries:
            used, _, node = heapq.heappop(entries)
            if removed >= chars and used != last:
                break
            if node.used.get(target) == used:
                last = used
                removed += len(node.text)
                self._chars[target] -= len(node.text)
                self._release(node, target)
            if len(entries) % STEP_NODES == 0:
                yield removed - reported
                reported = removed
        yield removed - reported

    def _walk(self, target: Target) -> Iterator[_TextNode]:
        """The nodes a target holds, parents before children. The tree may change between two of them."""
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

    def _step(self, node: _TextNode, text: str, start: int) -> tuple[_TextNode, int]:
        """The child that holds the text from `start` on, and where it ends. Makes or splits it if needed."""
        child = node.children.get(text[start])
        if child is None:
            child = node.children[text[start]] = _TextNode(text[start:], node)
            return child, len(text)
        shared = _shared_chars(child.text, text, start)
        if shared < len(child.text):
            child = _split(child, shared)
        return child, start + shared

    def _held(self, target: Target) -> Iterator[_TextNode]:
        return _below(self._root, target)

    def _release(self, node: _TextNode, target: Target) -> None:
        del node.used[target]
        if not node.used and node.parent is not None:
            del node.parent.children[node.text[0]]


def _below(root: _TextNode, target: Target | None = None) -> Iterator[_TextNode]:
    """The nodes below the root (only those of `target`, if given), children before their parents."""
    stack, found = [root], []
    while stack:
        node = stack.pop()
        children = [child for child in node.children.values() if target is None or target in child.used]
        found.extend(children)
        stack.extend(children)
    return reversed(found)


def _split(node: _TextNode, length: int) -> _TextNode:
    """Put a new node with the first `length` characters above this one; returns the new node."""
    assert node.parent is not None, "the root has no text to split"
    upper = _TextNode(node.text[:length], node.parent)
    upper.used = dict(node.used)
    node.parent.children[upper.text[0]] = upper
    node.text, node.parent = node.text[length:], upper
    upper.children[node.text[0]] = node
    return upper


def _join(node: _TextNode) -> None:
    """Merge the node with its parent if no other text branches off and all targets used both together.

    Without this a shared beginning would stay cut at every place where an evicted text branched off.
    """
    upper = node.parent
    if upper is None or upper.parent is None or len(upper.children) > 1 or upper.used != node.used:
        return
    node.text, node.parent = upper.text + node.text, upper.parent
    node.parent.children[node.text[0]] = node
    upper.used = {}  # so that an eviction in progress that has listed it skips it


def _shared_chars(edge: str, text: str, start: int) -> int:
    """How many leading characters `edge` shares with the text from `start` on: found by bisection."""
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


def sent_text(target: Target, text: str) -> SentText:
    """The op that publishes that the target has computed this text."""
    return SentText(target.worker_id, target.rank, valid_unicode(text[:MAX_SENT_CHARS]))


class KeptTexts:
    """The texts that targets have computed last, for replicas that join. Holds at most KEPT_CHARS."""

    def __init__(self) -> None:
        self._kept: dict[SentText, None] = {}  # each once, in the order of last use
        self._chars = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, sent: SentText) -> None:
        """A target has computed this text."""
        self._remove(sent)
        self._kept[sent] = None
        self._chars += len(sent.text)
        while self._chars > KEPT_CHARS:
            self._remove(next(iter(self._kept)))

    def forget(self, target: Target) -> None:
        """The target has lost what it held."""
        for sent in [sent for sent in self._kept if (sent.worker_id, sent.rank) == target]:
            self._remove(sent)

    def _remove(self, sent: SentText) -> None:
        if sent in self._kept:
            del self._kept[sent]
            self._chars -= len(sent.text)

    def __iter__(self) -> Iterator[SentText]:
        """Oldest first."""
        return iter(self._kept)
