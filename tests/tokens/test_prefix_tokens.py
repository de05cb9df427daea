"""The prefix-token cache: exact after any history, and bounded."""

from __future__ import annotations

import re
import threading
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Model

from kvrouter.errors import BadRequestError
from kvrouter.tokens.prefix_tokens import ENTRY_BYTES, CacheSettings, PrefixStore, PrefixTokens
from kvrouter.tokens.splits import Splits, find_splits
from kvrouter.tokens.tokenizer import Tokenizer
from tests.long import examples
from tests.tokens.kinds import AFTER_TOKENS, AFTER_WORDS, CORPUS, build

TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
KINDS = [*AFTER_WORDS, *AFTER_TOKENS]

pieces = st.sampled_from(
    ["<s>", "<|im_end|>", "end", " of", " ", "\n", "if", "x", "é", "中", "123", ".", "'s"]
)
texts = st.lists(pieces, max_size=40).map("".join)


def whole(model: Model, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """The ids of a full tokenization."""
    ids: list[int] = model.encode(text, add_special_tokens=add_special_tokens).ids
    return ids


def cached(name: str, store: PrefixStore | None = None, part_characters: int = 256) -> PrefixTokens:
    """A cache for a tokenizer of `kinds`."""
    splits = find_splits(build(name))
    store = PrefixStore() if store is None else store
    return PrefixTokens(build(name), splits, store, model=name, part_characters=part_characters)


def part(*ids: int) -> array[int]:
    """The ids of one part."""
    return array("I", ids)


def chain(*names: str) -> list[tuple[bytes, array[int]]]:
    """New parts of these names, one id each."""
    return [(name.encode(), part(7)) for name in names]


@examples(5000, 40)
@given(st.sampled_from(KINDS), st.lists(texts, min_size=1, max_size=6), st.integers(1, 20), st.booleans())
def test_exact(name: str, texts: list[str], part_characters: int, add: bool) -> None:
    """Each text, and each continued from others, has the ids of a full tokenization, cold and warm."""
    cache = cached(name, PrefixStore(max_parts=30), part_characters)
    for text in [*texts, "".join(texts), *("".join(texts[:count]) for count in range(len(texts)))]:
        for _ in range(2):
            found = cache.encode(text, add_special_tokens=add)

            assert whole(build(name), text, add_special_tokens=add) == list(found.ids)
            assert len(found.ids) == found.isl


@pytest.mark.parametrize("name", ["Qwen2", "Llama 2", "BERT"])
def test_many_turns(name: str) -> None:
    """A conversation that grows is exact at every turn, and only what is new is tokenized."""
    store = PrefixStore()
    cache, prompt, newest = cached(name, store), "", 0
    end = "[SEP]" if name == "BERT" else ""
    for turn in range(20):
        newest = len(prompt)
        prompt += TURN.format(CORPUS[turn * 900 : turn * 900 + 700]) + end
        before = store.counters.tokenized_characters

        assert whole(build(name), prompt) == list(cache.encode(prompt, add_special_tokens=False).ids)
        assert store.counters.tokenized_characters - before <= len(prompt) - newest + 700 + 2 * 256


def test_shared_prefix_within_a_message() -> None:
    """If texts can be cut after words, prompts share a beginning also without a special token at its end."""
    store = PrefixStore()
    cache = cached("Qwen2", store)
    for question in ("What is it?", "Who wrote it?"):
        cache.encode(CORPUS[:8000] + question, add_special_tokens=True)

    assert store.counters.known_characters > 7500


def test_models_share_a_store_and_no_ids() -> None:
    """One store may serve several tokenizers."""
    store = PrefixStore()
    for name in ("Qwen2", "GPT-2", "Qwen2", "GPT-2"):
        found = cached(name, store).encode(CORPUS[:3000], add_special_tokens=False)

        assert whole(build(name), CORPUS[:3000]) == list(found.ids)
    assert store.counters.known_characters > 5000


def test_threads_share_a_cache() -> None:
    """Concurrent threads receive the ids of their own texts, even with a tiny store."""
    cache = cached("Llama 3", PrefixStore(max_parts=10))
    prompts = [CORPUS[start : start + 5000] for start in range(0, 20_000, 1000)] * 3
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda text: cache.encode(text, add_special_tokens=True), prompts))

    assert [whole(build("Llama 3"), text, add_special_tokens=True) for text in prompts] == [
        list(encoded.ids) for encoded in found
    ]


def test_enough_is_known() -> None:
    """With `enough` the end of a mostly known prompt is not tokenized, and its length is estimated."""
    store = PrefixStore()
    cache = cached("Llama 3", store)
    known = CORPUS[:9000]
    cache.encode(known, add_special_tokens=False)
    text = known + "x" * 1000

    found = cache.encode(text, add_special_tokens=True, enough=0.8)

    ids = whole(build("Llama 3"), text, add_special_tokens=True)
    assert ids[: len(found.ids)] == list(found.ids)
    characters = store.counters.known_characters
    assert found.isl == round(len(found.ids) * len(text) / characters)
    assert len(text) - characters == store.counters.skipped_characters
    exact = cache.encode(text, add_special_tokens=True, enough=0.95)
    assert ids == list(exact.ids)


def test_splits_without_a_pattern() -> None:
    """Splits without a pattern are an error with its reason."""
    with pytest.raises(ValueError, match="cannot be cut: because"):
        PrefixTokens(build("Qwen2"), Splits(None, reason="because"), PrefixStore(), model="m")


@pytest.fixture
def store() -> PrefixStore:
    """A store shared by several tokenizers."""
    return PrefixStore()


@pytest.fixture
def loaded(tmp_path: Path, store: PrefixStore) -> Iterator[Tokenizer]:
    """Qwen2's kind, loaded with a cache."""
    build("Qwen2").save(str(tmp_path / "tokenizer.json"))
    with Tokenizer.load(tmp_path, threads=1, cache=CacheSettings(), store=store) as tokenizer:
        yield tokenizer


def test_a_tokenizer_with_a_cache(loaded: Tokenizer, store: PrefixStore) -> None:
    """Short and long texts, alone and together, have the right ids; only long ones are stored."""
    for texts in (["short"], [CORPUS[:2000]], ["short", CORPUS[:2000] + " more", ""]):
        found = loaded.encode_all_now(texts, add_special_tokens=True)

        assert [whole(build("Qwen2"), text) for text in texts] == found
    assert store.counters.known_characters > 1500


def test_half_a_surrogate_pair(loaded: Tokenizer) -> None:
    """A long text with a lone surrogate in any part is a BadRequestError."""
    for text in ("\ud800" + CORPUS[:1000], CORPUS[:1000] + "\ud800"):
        with pytest.raises(BadRequestError, match="not valid Unicode"):
            loaded.encode_now(text, add_special_tokens=False)


def test_off_with_a_reason(tmp_path: Path) -> None:
    """A tokenizer that cannot be cut safely works without a cache, and has the reason."""
    build("Metaspace, first").save(str(tmp_path / "tokenizer.json"))
    with Tokenizer.load(tmp_path, threads=1, cache=CacheSettings()) as tokenizer:
        assert "prepend_scheme" in tokenizer.cache.off_because
        ids = tokenizer.encode_now(CORPUS[:2000], add_special_tokens=True)

    assert whole(build("Metaspace, first"), CORPUS[:2000], add_special_tokens=True) == ids


def test_off_after_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the proof is wrong, the trial at start-up detects it."""
    build("Qwen2").save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr("kvrouter.tokens.tokenizer.find_splits", lambda _: Splits(re.compile(r"\n")))
    with Tokenizer.load(tmp_path, threads=1, cache=CacheSettings()) as tokenizer:
        assert "changed the ids of" in tokenizer.cache.off_because


def test_a_hole() -> None:
    """A stored part is not used if an earlier one was evicted: its position in the ids is unknown."""

    class Holed(PrefixStore):
        names: Sequence[bytes] = ()

        def find(self, key: bytes) -> array[int] | None:
            return None if key in self.names[1:2] else super().find(key)

        def use(self, known: Sequence[bytes], new: Sequence[tuple[bytes, array[int]]]) -> None:
            super().use(known, new)
            self.names = self.names or [name for name, _ in new]

    store = Holed()
    cache = cached("Qwen2", store)
    expected = list(cache.encode(CORPUS[:5000], add_special_tokens=False).ids)
    assert len(store.names) > 2

    assert expected == list(cache.encode(CORPUS[:5000], add_special_tokens=False).ids)
    store.check()


def test_finds_what_was_used() -> None:
    """A part is found under its key."""
    store = PrefixStore()
    store.use([], [(b"a", part(1, 2))])

    assert part(1, 2) == store.find(b"a")
    assert store.find(b"b") is None
    assert (1, ENTRY_BYTES + 8) == (len(store), store.held_bytes)


def test_the_deepest_goes_first() -> None:
    """The end of a chain is evicted first, so the rest can still be reached from the start."""
    store = PrefixStore(max_parts=2)
    store.use([], chain("a", "ab", "abc"))

    assert [True, True, False] == [store.find(key) is not None for key in (b"a", b"ab", b"abc")]
    assert 1 == store.counters.evicted_parts


def test_the_least_recently_used_goes() -> None:
    """A chain that was used again stays; the other one is evicted."""
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
    """After any use, the store also has all parts before each stored part."""
    store, ever = PrefixStore(max_parts=most), set[bytes]()
    for text in texts:
        keys = [text[:end].encode() for end in range(1, len(text) + 1)]
        known = [key for key in keys if store.find(key) is not None]
        store.use(known, [(key, part(7)) for key in keys[len(known) :]])

        store.check()
        ever.update(keys)
        stored = [key for key in ever if store.find(key) is not None]
        assert len(store) == len(stored)
        assert all(store.find(key[:-1]) is not None for key in stored if len(key) > 1)


def test_many_threads() -> None:
    """Threads that use and evict each other's parts keep the invariants of the store."""
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
