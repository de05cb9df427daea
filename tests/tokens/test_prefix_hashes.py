"""Hashes of known beginnings: equal to a fresh computation, bounded, and found again."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.wire.hashes import block_hashes, block_seed, seeded_prompt_hashes, sequence_hashes
from kvrouter.tokens.prefix_hashes import ENTRY_BYTES, LEAST_TOKENS, MOST_STEPS, NEAR_TOKENS, PrefixHashes
from kvrouter.tokens.prefix_tokens import Beginnings, CacheSettings, Encoded, PrefixStore, PrefixTokens
from kvrouter.tokens.splits import find_splits
from kvrouter.tokens.tokenizer import Tokenizer
from tests.long import examples
from tests.tokens.kinds import CORPUS, build

SEED = block_seed()


pytestmark = pytest.mark.usefixtures("core")


def fresh(ids: Any, block_size: int, lora_name: str | None = None, salt: str | None = None) -> list[int]:
    """By the two public functions, without a cache."""
    return list(sequence_hashes(block_hashes(list(ids), block_size, lora_name=lora_name, salt=salt)))


def prompt(*parts: int, tokens: int = 60, known: int = 0, before: int = 0) -> Encoded:
    """A prompt of these parts, of which some are known. A name lists all parts up to its own."""
    ids = array("I", [7] * before)
    ends = []
    for part in parts:
        ids.extend(part * 1000 + number for number in range(tokens))
        ends.append(len(ids))
    names = [repr(parts[: end + 1]).encode() for end in range(len(parts))]
    ids.extend((1, 2, 3))
    known_tokens = ends[known - 1] if known else before
    return Encoded(ids, len(ids), Beginnings(before, names[:known], known_tokens, names[-1], ends[-1]))


def small(**bounds: int) -> PrefixHashes:
    """A cache that stores beginnings of any length."""
    return PrefixHashes(**{"least_tokens": 0, "near_tokens": 0, **bounds})


def hashes_of(hashes: PrefixHashes, encoded: Encoded, block_size: int, seed: int) -> array[int]:
    """The hashes, computed as in a frontend."""
    if encoded.beginnings is None:
        return seeded_prompt_hashes(encoded.ids, block_size, seed)
    return hashes.of(encoded.ids, encoded.beginnings, block_size, seed)


def known_blocks(hashes: PrefixHashes, encoded: Encoded, block_size: int = 16) -> int:
    """The number of blocks of this prompt that were not hashed."""
    before = hashes.counters.known_blocks

    assert fresh(encoded.ids, block_size) == list(hashes_of(hashes, encoded, block_size, SEED))
    hashes.check()
    return hashes.counters.known_blocks - before


# equal to a fresh computation

pieces = st.sampled_from(["<s>", "<|im_end|>", "end", " of", " ", "\n", "x", "é", "中", "123", "It was the"])
turns = st.lists(pieces, min_size=1, max_size=25).map("".join)
MODELS = ("Qwen2", "Llama 3", "BERT")
requests = st.tuples(
    st.sampled_from(MODELS),
    st.integers(0, 5),  # which of the earlier texts is continued
    turns,
    st.sampled_from([1, 3, 16]),
    st.sampled_from([None, "adapter"]),
    st.sampled_from([None, "salt", "pepper"]),
    st.booleans(),
    st.sampled_from([None, 0.5]),
)
bounds = st.fixed_dictionaries(
    {
        "most": st.sampled_from([1, 3, 1000]),
        "max_bytes": st.sampled_from([3 * ENTRY_BYTES, 1 << 20]),
        "near_tokens": st.sampled_from([0, 20]),
        "least_tokens": st.sampled_from([0, 10]),
    }
)


@examples(3000, 50)
@given(st.lists(requests, min_size=1, max_size=12), bounds, st.integers(1, 12), st.sampled_from([5, 1000]))
def test_exact(history: list[Any], limits: dict[str, int], part_characters: int, most_parts: int) -> None:
    """After any history of texts, evictions and seeds, hashes equal a fresh computation."""
    hashes, store = PrefixHashes(**limits), PrefixStore(max_parts=most_parts)
    caches = {
        name: PrefixTokens(
            build(name), find_splits(build(name)), store, model=name, part_characters=part_characters
        )
        for name in MODELS
    }
    texts = [""]
    for name, earlier, turn, block_size, lora_name, salt, add, enough in history:
        texts.append(texts[earlier % len(texts)] + turn)
        encoded = caches[name].encode(texts[-1], add_special_tokens=add, enough=enough)
        for _ in range(2):
            found = hashes_of(hashes, encoded, block_size, block_seed(lora_name, salt))

            assert fresh(encoded.ids, block_size, lora_name, salt) == list(found)
        hashes.check()


def test_the_test_above_finds_hashes() -> None:
    """The histories of the test above do use stored hashes."""
    hashes, cache = (
        small(),
        PrefixTokens(
            build("Llama 3"), find_splits(build("Llama 3")), PrefixStore(), model="m", part_characters=10
        ),
    )
    for end in (500, 700, 2000):
        encoded = cache.encode(CORPUS[:end], add_special_tokens=True)

        assert fresh(encoded.ids, 3) == list(hashes_of(hashes, encoded, 3, SEED))
    assert hashes.counters.known_blocks > hashes.counters.hashed_blocks / 2


def test_special_tokens_move_the_blocks() -> None:
    """The same text behind a special token, or without it, has other blocks under the same names."""
    hashes = small()

    assert 0 == known_blocks(hashes, prompt(1, 2))
    assert 0 == known_blocks(hashes, prompt(1, 2, known=2, before=1))
    assert 7 == known_blocks(hashes, prompt(1, 2, 3, known=2, before=1))


def test_beginnings_name_the_known_parts() -> None:
    """The encoder names all known parts with their number of ids, and the last part."""
    cache = PrefixTokens(
        build("Llama 3"), find_splits(build("Llama 3")), PrefixStore(), model="m", part_characters=100
    )
    cold = cache.encode(CORPUS[:1000], add_special_tokens=True).beginnings
    longer = cache.encode(CORPUS[:2000], add_special_tokens=True)
    again = cache.encode(CORPUS[:2000], add_special_tokens=True).beginnings

    assert cold is not None
    assert longer.beginnings is not None
    assert again is not None
    assert (1, 0, 1) == (cold.before, len(cold.known), cold.known_tokens)
    assert (cold.deepest, cold.deepest_tokens) == (
        longer.beginnings.known[-1],
        longer.beginnings.known_tokens,
    )
    assert longer.beginnings[-2:] == again[-2:] == (again.known[-1], again.known_tokens)
    without = cache.encode(CORPUS[:2000], add_special_tokens=False)
    assert without.beginnings is not None
    assert (0, again.deepest, again.deepest_tokens - 1) == (
        without.beginnings.before,
        without.beginnings.deepest,
        without.beginnings.deepest_tokens,
    )
    part = cache.encode(CORPUS[:2000] + "x" * 50, add_special_tokens=True, enough=0.5)
    assert part.beginnings is not None
    assert len(part.ids) == part.beginnings.known_tokens == part.beginnings.deepest_tokens < part.isl
    assert cache.encode("too short", add_special_tokens=True).beginnings is None


# found again


def test_a_conversation_goes_on() -> None:
    """From the second turn on, only new blocks are hashed."""
    hashes = small()

    assert 0 == known_blocks(hashes, prompt(1, 2))
    assert 7 == known_blocks(hashes, prompt(1, 2, 3, known=2))
    assert 11 == known_blocks(hashes, prompt(1, 2, 3, 4, known=3))


def test_the_same_system_prompt() -> None:
    """The second prompt that begins with it shows where it ends; from the third on it is not hashed."""
    hashes = small()

    assert 0 == known_blocks(hashes, prompt(1, 2, 3, 8))
    assert 0 == known_blocks(hashes, prompt(1, 2, 3, 9, known=3))
    assert 11 == known_blocks(hashes, prompt(1, 2, 3, 10, known=3))
    assert 11 == known_blocks(hashes, prompt(1, 2, 3, 11, known=3))


def test_a_little_more_is_known_than_is_held() -> None:
    """A beginning a few parts before what is known is found; then the deeper one is held, too."""
    hashes = small()
    known_blocks(hashes, prompt(1, 2))
    shared = tuple(range(1, MOST_STEPS + 2))

    assert 7 == known_blocks(hashes, prompt(*shared, 90, known=MOST_STEPS + 1))
    assert 60 * len(shared) // 16 == known_blocks(hashes, prompt(*shared, 91, known=MOST_STEPS + 1))


def test_looking_is_bounded() -> None:
    """Beginnings more than MOST_STEPS parts before the known end are not looked up."""
    hashes = small()
    known_blocks(hashes, prompt(1))
    shared = tuple(range(1, MOST_STEPS + 2))

    assert 0 == known_blocks(hashes, prompt(*shared, 90, known=MOST_STEPS + 1))
    assert 60 * len(shared) // 16 == known_blocks(hashes, prompt(*shared, 91, known=MOST_STEPS + 1))


def test_nothing_is_held_twice_nearby() -> None:
    """An ending that is not much longer than what is held is hashed each time and pushes nothing out."""
    hashes = small(near_tokens=NEAR_TOKENS)
    for ending in range(100, 110):
        known_blocks(hashes, prompt(1, 2, 3, 4, 5, ending, known=5))

    assert 1 == len(hashes)
    known_blocks(hashes, prompt(1, 2, 3, 4, 5, *range(200, 206), known=5))
    assert 2 == len(hashes)


def test_short_prompts_are_left_out(core: str) -> None:
    """Prompts that are faster to hash than to look up are hashed; the limit depends on the version in use."""
    hashes, parts = PrefixHashes(near_tokens=0), range(LEAST_TOKENS[core] // 60)
    known_blocks(hashes, prompt(*parts))
    assert 0 == len(hashes)

    known_blocks(hashes, prompt(*parts, 900))
    assert 1 == len(hashes)
    assert 0 == known_blocks(hashes, prompt(*parts, 901, known=len(parts)))
    assert known_blocks(hashes, prompt(*parts, 900, 902, known=len(parts) + 1)) > 0
    held = len(hashes)
    known_blocks(hashes, prompt(*parts[::-1], 903, known=2))
    assert held + 1 == len(hashes)


# bounded


def test_bounded_in_number() -> None:
    """The least recently used beginning is evicted."""
    hashes = small(most=2)
    for first in (1, 2, 1, 3):
        known_blocks(hashes, prompt(first, known=int(len(hashes) == 2)))

    assert (2, 1) == (len(hashes), hashes.counters.evicted)
    assert 3 == known_blocks(hashes, prompt(1, known=1))
    assert 0 == known_blocks(hashes, prompt(2, known=1))


def test_bounded_in_bytes() -> None:
    """Long ones count for more; a beginning larger than the cache is not stored."""
    hashes = small(max_bytes=2 * ENTRY_BYTES + 8 * 8)
    known_blocks(hashes, prompt(1))
    known_blocks(hashes, prompt(2))
    assert (2, 2 * ENTRY_BYTES + 6 * 8) == (len(hashes), hashes.held_bytes)

    known_blocks(hashes, prompt(3, 4))
    assert (1, ENTRY_BYTES + 7 * 8) == (len(hashes), hashes.held_bytes)
    known_blocks(hashes, prompt(*range(200)))
    assert (0, 0) == (len(hashes), hashes.held_bytes)


def test_callers_may_change_what_they_get() -> None:
    """The array returned is a copy."""
    hashes = small()
    for _ in range(3):
        found = hashes_of(hashes, prompt(1, 2, known=2), 16, SEED)
        found[0] = 0

    assert 7 == known_blocks(hashes, prompt(1, 2, known=2))


def test_a_tokenizer_names_what_long_texts_begin_with() -> None:
    """Short texts have no names: they are not looked up."""
    with Tokenizer(build("Qwen2"), threads=1, cache=CacheSettings(), model="m") as tokenizer:
        short, long = tokenizer.encode_known_now(["short", CORPUS[:2000]], add_special_tokens=True)

    assert short.beginnings is None
    assert long.beginnings is not None
