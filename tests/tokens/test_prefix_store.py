"""The store behind the prefix-token cache: bounded, and its chains are never left without their beginning."""

from __future__ import annotations

import threading
from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.tokens.prefix_store import ENTRY_BYTES, PrefixStore


def part(*ids: int) -> array[int]:
    """The ids of one part."""
    return array("I", ids)


def chain(*names: str) -> list[tuple[bytes, array[int]]]:
    """New parts of these names, one id each."""
    return [(name.encode(), part(7)) for name in names]


def test_finds_what_was_used() -> None:
    """A part is found under its key."""
    store = PrefixStore()
    store.use([], [(b"a", part(1, 2))])

    assert part(1, 2) == store.find(b"a")
    assert store.find(b"b") is None
    assert (1, ENTRY_BYTES + 8) == (len(store), store.held_bytes)


def test_the_deepest_goes_first() -> None:
    """Of one chain the end goes first, so what is left can still be reached from the start."""
    store = PrefixStore(max_parts=2)
    store.use([], chain("a", "ab", "abc"))

    assert [True, True, False] == [store.find(key) is not None for key in (b"a", b"ab", b"abc")]
    assert 1 == store.counters.evicted_parts


def test_the_least_recently_used_goes() -> None:
    """A chain used again stays; the other one goes."""
    store = PrefixStore(max_parts=3)
    store.use([], chain("a"))
    store.use([], chain("b", "bc"))
    store.use([b"a"], [])

    store.use([], chain("d"))

    assert [True, True, False, True] == [store.find(key) is not None for key in (b"a", b"b", b"bc", b"d")]


def test_bounded_in_bytes() -> None:
    """Long parts count for more."""
    store = PrefixStore(max_bytes=3 * ENTRY_BYTES)
    store.use([], [(b"a", part(*range(100)))])
    store.use([], [(b"b", part(1)), (b"bc", part(2))])

    store.check()
    assert store.find(b"a") is None
    store.use([], [(b"huge", part(*range(1000)))])
    store.check()
    assert 0 == len(store)


chains = st.lists(st.text("ab", min_size=1, max_size=6), max_size=40)


@given(chains, st.integers(1, 6))
def test_no_part_without_its_beginning(texts: list[str], most: int) -> None:
    """Whatever is used: a part in the store has all that comes before it there, too."""
    store = PrefixStore(max_parts=most)
    for text in texts:
        keys = [text[:end].encode() for end in range(1, len(text) + 1)]
        known = [key for key in keys if store.find(key) is not None]
        store.use(known, [(key, part(7)) for key in keys[len(known) :]])

        store.check()
        assert all(store.find(key[:-1]) is not None for key in store._parts if len(key) > 1)


def test_many_threads() -> None:
    """Threads that use and push out each other's parts leave a store that adds up."""
    store = PrefixStore(max_parts=20)

    def use(letter: str) -> None:
        for number in range(400):
            keys = [f"{letter}{number % 30}{'x' * depth}".encode() for depth in range(5)]
            known = [key for key in keys if store.find(key) is not None]
            store.use(known, [(key, part(1)) for key in keys if key not in known])
            store.count(known=1)

    threads = [threading.Thread(target=use, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    store.check()
    assert 1600 == store.counters.known_characters
