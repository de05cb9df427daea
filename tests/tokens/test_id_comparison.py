"""Differences between our ids and an engine's, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.tokens.id_comparison import Difference, find_difference


def decode(ids: Sequence[int]) -> str:
    """Ids below 100 are letters; 100 is two of them at once."""
    if max(ids) > 100:
        raise OverflowError
    return "".join("ab" if number == 100 else chr(96 + number) for number in ids)


def found(here: Sequence[int], engine: Sequence[int], *, is_chat: bool = False) -> Difference:
    """The difference there must be."""
    difference = find_difference(here, engine, decode, is_chat=is_chat)
    assert difference is not None
    return difference


def test_equal() -> None:
    """Equal ids do not differ."""
    assert find_difference([1, 2], [1, 2], decode, is_chat=True) is None


def test_first_position() -> None:
    """The first differing position is named, with the ids and the text around it."""
    here, engine = [*range(1, 21)], [*range(1, 10), 25, *range(11, 21)]
    difference = found(here, engine)

    assert (9, 20, 20) == (difference.position, difference.here_tokens, difference.engine_tokens)
    assert ([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], "efghijklmno") == (
        difference.here_ids,
        difference.here_text,
    )
    assert "efghiyklmno" == difference.engine_text


def test_texts_are_short() -> None:
    """Of long tokens only what is next to the difference is shown."""

    def long(ids: Sequence[int]) -> str:
        return "".join(chr(96 + number) * 9 for number in ids)

    difference = find_difference([*range(1, 21)], [*range(1, 10), 25, *range(11, 21)], long, is_chat=False)

    assert difference is not None
    assert (2 * "g" + 9 * "h" + 9 * "i" + 9 * "j" + 9 * "k" + 2 * "l") == difference.here_text
    assert (2 * "g" + 9 * "h" + 9 * "i" + 9 * "y" + 9 * "k" + 2 * "l") == difference.engine_text


def test_one_is_longer() -> None:
    """If one is longer, it differs where the other ends."""
    assert 2 == found([1, 2], [1, 2, 3]).position


def test_what_to_change() -> None:
    """Each kind of difference has its own remedy."""
    assert "the engine puts 'z' first" in found([1, 2], [26, 1, 2]).remedy
    assert "only this frontend puts 'z' first" in found([26, 1, 2], [1, 2]).remedy
    assert "same text, other ids" in found([1, 2], [100]).remedy
    assert "--chat-template the engine's" in found([1, 2], [1, 3], is_chat=True).remedy
    assert "another tokenizer or normalizer" in found([1, 2], [1, 3]).remedy


def test_ids_that_are_not_ours() -> None:
    """Ids of an engine with a larger vocabulary have no text here, and are compared nevertheless."""
    difference = found([1, 2], [1, 999])

    assert (1, "") == (difference.position, difference.engine_text)
