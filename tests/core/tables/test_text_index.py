"""The text index: Ray's cases, rounding to blocks, eviction, published texts, random histories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.tables import text_index
from kvrouter.core.tables.text_index import KeptTexts, TextIndex, TextIndexSettings, sent_text
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.core.wire.ops import MAX_SENT_CHARS
from kvrouter.errors import ConfigError
from scripts.kit.bench.meter import instructions

A, B, C = (Target(WorkerId(name)) for name in "abc")
ALL = (A, B, C)


@pytest.fixture
def index() -> TextIndex:
    return TextIndex()


def test_empty(index: TextIndex) -> None:
    """No text matches, all targets are the smallest, nothing can be removed."""
    assert (0, {A, B, C}) == index.match("hello", ALL)
    assert (0, {A, B, C}) == index.match("", ALL)
    assert {A, B, C} == index.smallest(ALL)
    assert 0 == index.remove(A) == index.evict(A, 5)


def test_empty_text(index: TextIndex) -> None:
    """An empty text matches all targets and has no characters."""
    index.insert(A, "", 1.0)

    assert 0 == index.chars(A)
    index.check()


def test_exact(index: TextIndex) -> None:
    """The whole text matches on its target."""
    index.insert(A, "hello", 1.0)

    assert (5, {A}) == index.match("hello", ALL)


@pytest.mark.parametrize(
    ("asked", "matched"), [("helloworld", 5), ("hel", 3), ("help", 3), ("hello!", 5), ("hallo", 1)]
)
def test_partial(index: TextIndex, asked: str, matched: int) -> None:
    """A match may end inside an edge, at its end, or with the text."""
    index.insert(A, "hello", 1.0)

    assert (matched, {A}) == index.match(asked, ALL)


def test_match_limited_to_given_targets(index: TextIndex) -> None:
    """The longest match among the given targets, not among all."""
    index.insert(A, "hello world", 1.0)
    index.insert(B, "hello", 2.0)

    assert (11, {A}) == index.match("hello world", ALL)
    assert (5, {B}) == index.match("hello world", [B, C])
    assert (0, {C}) == index.match("hello world", [C])
    assert (0, set()) == index.match("hello world", [])


def test_shared_prefixes(index: TextIndex) -> None:
    """Texts that branch off share the node before; each target's characters count it once."""
    index.insert(A, "helloworld", 1.0)
    index.insert(B, "hellothere", 2.0)
    index.insert(B, "hellothomas", 3.0)

    assert (5, {A, B}) == index.match("hello", ALL)
    assert (10, {A}) == index.match("helloworld", ALL)
    assert (7, {B}) == index.match("helloth", ALL)
    assert (10, 5 + 2 + 3 + 4) == (index.chars(A), index.chars(B))
    index.check()


def test_same_text_twice(index: TextIndex) -> None:
    """Its characters count once."""
    index.insert(A, "hello", 1.0)
    index.insert(A, "hello", 2.0)

    assert 5 == index.chars(A)


def test_removal_of_one_leaves_the_other(index: TextIndex) -> None:
    """A text stays until its last holder is removed."""
    index.insert(A, "helloworld", 1.0)
    index.insert(B, "hellothere", 2.0)

    assert 10 == index.remove(A)

    index.check()
    assert (5, {B}) == index.match("helloworld", ALL)
    assert 10 == index.remove(B)
    assert (0, set(ALL)) == index.match("hello", ALL)
    index.check()


def test_eviction_of_the_least_recently_used(index: TextIndex) -> None:
    """Texts a, then bb, then ccc: evicting one character takes a, two more take bb."""
    for text, now in (("a", 1.0), ("bb", 2.0), ("ccc", 3.0)):
        index.insert(A, text, now)

    assert 1 == index.evict(A, 1)
    assert 5 == index.chars(A)
    assert 2 == index.evict(A, 1)
    assert (3, {A}) == index.match("ccc", [A])
    index.check()


def test_eviction_takes_whole_nodes(index: TextIndex) -> None:
    """Until at least the requested characters are gone, or all of them."""
    for text, now in (("a", 1.0), ("bb", 2.0), ("ccc", 3.0)):
        index.insert(A, text, now)

    assert 3 == index.evict(A, 2)
    assert 3 == index.evict(A, 99)
    assert 0 == index.chars(A)


def test_eviction_of_split_texts(index: TextIndex) -> None:
    """Nodes last used by one insert go together, even if others have split them (Ray's own example)."""
    index.insert(A, "helloworld", 1.0)
    index.insert(B, "hellothere", 2.0)
    index.insert(B, "hellothomas", 3.0)

    assert 10 == index.evict(A, 1), "hello and world"
    assert 3 == index.evict(B, 1), "ere"
    assert 11 == index.chars(B)
    assert 11 == index.evict(B, 1), "hello, th and omas"
    index.check()


def test_use_renews(index: TextIndex) -> None:
    """A prefix that is used again is younger than the text below it."""
    index.insert(A, "hello world", 1.0)
    index.insert(A, "other", 2.0)
    index.insert(A, "hello", 3.0)

    assert 6 == index.evict(A, 1)

    assert (5, {A}) == index.match("hello world", [A])


def test_smallest_with_ties(index: TextIndex) -> None:
    """All targets with the fewest characters, new ones included."""
    index.insert(A, "12345", 1.0)
    index.insert(B, "12", 2.0)

    assert {C} == index.smallest(ALL)
    index.insert(C, "ab", 3.0)
    assert {B, C} == index.smallest(ALL)
    assert {A} == index.smallest([A])


def test_larger_blocks_round_the_rate_down() -> None:
    """With blocks of four characters, eleven matching characters count as eight."""
    index = TextIndex(TextIndexSettings(block_chars=4))
    index.insert(A, "hello world", 1.0)

    assert (8, {A}) == index.match("hello world", ALL)
    assert (0, {A}) == index.match("hel", [A])


@pytest.fixture
def evicting() -> TextIndex:
    """An index that evicts above 20 characters down to 10, every 10 s."""
    return TextIndex(TextIndexSettings(1, True, 20, 10, 10.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_chars": 0}, "block_chars 0"),
        ({"eviction_target_chars": -1}, "eviction_target_chars -1"),
        (
            {"eviction_threshold_chars": 5, "eviction_target_chars": 6},
            "no more than eviction_threshold_chars, 5",
        ),
    ],
)
def test_wrong_settings(settings: dict[str, int], message: str) -> None:
    """Reported when the settings are made, not by a later match or eviction."""
    with pytest.raises(ConfigError, match=message):
        TextIndexSettings(**settings)  # type: ignore[arg-type]  # they are integers


def test_eviction_above_the_threshold(evicting: TextIndex) -> None:
    """At 20 characters nothing happens; at 21 the oldest go until at most 10 are left."""
    for number in range(4):
        evicting.insert(A, f"{number}----", float(number))
    assert 0 == evicting.evict_due(100.0)

    evicting.insert(A, "x", 5.0)

    assert 15 == evicting.evict_due(110.0)
    assert 6 == evicting.chars(A)
    evicting.check()


def test_eviction_happens_every_interval(evicting: TextIndex) -> None:
    """Between two intervals nothing is evicted; each target is treated by itself."""
    assert 0 == evicting.evict_due(0.0)
    evicting.insert(A, "a" * 30, 1.0)
    evicting.insert(B, "b" * 20, 1.0)

    assert 0 == evicting.evict_due(9.999)
    assert 30 == evicting.evict_due(10.0)
    assert (0, 20) == (evicting.chars(A), evicting.chars(B))


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_index, "STEP_NODES", 1)


@pytest.mark.usefixtures("small_steps")
def test_eviction_in_steps(evicting: TextIndex) -> None:
    """Between two steps texts are inserted, used and removed: texts used meanwhile stay."""
    for number in range(6):
        evicting.insert(A, f"{number}----", float(number))

    steps = evicting.eviction(100.0)
    assert 5 == next(step for step in steps if step), "the oldest"
    evicting.insert(A, "1----", 101.0)
    evicting.insert(A, "2-!", 102.0)
    evicting.insert(B, "3-?", 103.0)
    evicting.check()
    left = sum(steps)
    evicting.check()

    assert 0 == evicting.match("0----", [A])[0]
    assert [5, 3] == [evicting.match(text, [A])[0] for text in ("1----", "2-!")]
    assert 31 - 5 - left == evicting.chars(A)
    assert 15 <= 5 + left


@pytest.mark.usefixtures("small_steps")
def test_target_that_leaves_during_its_eviction(evicting: TextIndex) -> None:
    """The eviction ends."""
    for number in range(6):
        evicting.insert(A, f"{number}----", float(number))
    steps = evicting.eviction(100.0)
    next(step for step in steps if step)

    assert 25 == evicting.remove(A)
    assert 0 == sum(steps)
    evicting.check()


def test_eviction_is_off_by_default(index: TextIndex) -> None:
    """The defaults are Ray's: 400,000 and 360,000 characters, 10 s, off."""
    wanted = TextIndexSettings()
    index.insert(A, "a" * 500_000, 0.0)

    assert (False, 400_000, 360_000, 10.0) == (
        wanted.do_eviction, wanted.eviction_threshold_chars, wanted.eviction_target_chars,
        wanted.eviction_interval_secs,
    )  # fmt: skip
    assert 0 == index.evict_due(1e9)


def test_trim_before_the_ceiling(index: TextIndex) -> None:
    """The timer evicts in steps, without an interval, what an insert would have to evict at once."""
    tenth = text_index.TRIM_CHARS // 10
    for number in range(11):
        index.insert(A, chr(0x4E00 + number) * tenth, float(number))

    assert 2 * tenth == index.evict_due(0.0)
    assert 0 == index.evict_due(0.0)
    index.insert(A, "-" * 2 * tenth, 11.0)
    assert 2 * tenth == index.evict_due(0.0)
    index.check()


def test_ceiling(index: TextIndex) -> None:
    """A target never holds more than the ceiling."""
    tenth = text_index.CEILING_CHARS // 10
    for number in range(50):
        index.insert(A, chr(0x4E00 + number) * tenth, float(number))

        assert index.chars(A) <= text_index.CEILING_CHARS
    index.check()
    assert (tenth, {A}) == index.match(chr(0x4E00 + 49) * tenth, [A])


def test_texts_that_went_leave_no_trace(index: TextIndex) -> None:
    """Texts that ended or branched off at every character of a shared text do not cut it for good."""
    text = "ab" * 100
    index.insert(A, text, 0.0)
    whole = instructions(index.insert, A, text, 0.0)
    for place in range(1, 200):
        index.insert(A, text[:place] + "-", 1.0)
        index.insert(A, text[:place], 1.0)
    index.insert(A, text, 2.0)
    assert 199 == index.evict(A, 1)

    index.insert(A, text, 3.0)

    assert whole == instructions(index.insert, A, text, 3.0)
    index.check()


@given(
    st.lists(st.tuples(st.sampled_from("ire"), st.sampled_from(ALL), st.text("ab", max_size=8)), max_size=40)
)
def test_random_histories(history: list[tuple[str, Target, str]]) -> None:
    """Matches equal those of plain sets of texts; characters equal the number of their distinct prefixes."""
    index = TextIndex()
    held: dict[Target, set[str]] = {target: set() for target in ALL}
    for now, (what, target, text) in enumerate(history):
        if what == "i":
            index.insert(target, text, float(now))
            held[target] |= {text[: end + 1] for end in range(len(text))}
        elif what == "r":
            assert len(held[target]) == index.remove(target)
            held[target] = set()
        else:
            before = index.chars(target)
            removed = index.evict(target, 3)
            assert removed >= min(3, before)
            held[target] = {
                prefix for prefix in held[target] if index.match(prefix, [target])[0] == len(prefix)
            }
            assert before - removed == len(held[target])
        index.check()
        for asked in ("a", "ab", "abab", "bbbbbbbb", text):
            best = {
                one: max(n for n in range(len(asked) + 1) if not n or asked[:n] in held[one]) for one in ALL
            }
            longest = max(best.values())
            assert (longest, {one for one in ALL if best[one] == longest}) == index.match(asked, ALL)


def test_texts_for_joiners_are_bounded() -> None:
    """The oldest are dropped. A text counts once, at its last use."""
    texts = KeptTexts()
    for letter in "abcdefghijklc":
        texts.add(sent_text(A, letter * MAX_SENT_CHARS))

    assert "cdefghijkl"[1:] + "c" == "".join(sent.text[0] for sent in texts)


def test_texts_for_joiners_forget_a_target() -> None:
    """Its texts make room for others."""
    texts = KeptTexts()
    for target in (A, B) * 5:
        texts.add(sent_text(target, f"{target.worker_id}{len(texts)}" * 10_000))

    texts.forget(A)

    assert {str(B.worker_id)} == {sent.worker_id for sent in texts}
    assert len(texts) == 5
