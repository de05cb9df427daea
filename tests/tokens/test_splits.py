"""Where texts can be cut: proven from the tokenizer, and tried on many texts."""

from __future__ import annotations

import re

import pytest
from tokenizers import Tokenizer

from kvrouter.tokens.prefix_tokens import trial_fault
from kvrouter.tokens.splits import Splits, find_splits
from tests.long import IS_LONG
from tests.tokens.kinds import AFTER_TOKENS, AFTER_WORDS, NOWHERE, QWEN2, bpe, build, raw, words

TRIALS = 20_000 if IS_LONG else 100


@pytest.mark.parametrize("name", AFTER_WORDS)
def test_after_words(name: str) -> None:
    """A byte-level tokenizer with a known pattern can be cut after words and added tokens, exactly."""
    splits = find_splits(build(name))

    assert splits.words
    assert splits.anchors
    assert "" == trial_fault(build(name), splits, trials=TRIALS)


@pytest.mark.parametrize("name", AFTER_TOKENS)
def test_after_added_tokens(name: str) -> None:
    """Any other piecewise tokenizer can be cut after added tokens, exactly."""
    splits = find_splits(build(name))

    assert not splits.words
    assert splits.anchors
    assert "" == trial_fault(build(name), splits, trials=TRIALS)


@pytest.mark.parametrize("name", NOWHERE)
def test_nowhere(name: str) -> None:
    """A tokenizer without a proof is not cut, and the reason is given."""
    make, words_of_reason = NOWHERE[name]
    splits = find_splits(make())

    assert splits.pattern is None
    assert words_of_reason in splits.reason


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("Metaspace, first", "<s>"),
        ("Qwen2", r"\n"),
        ("Llama 3", r"\n"),
        ("GPT-2", " "),
        ("a prefix space", r"[a-z](?=[ \n])"),
        ("added tokens of all kinds", "<r>"),
        ("added tokens of all kinds", "<s>"),
        ("a token over two words", r"[a-z](?=[ \n])"),
        ("a word that swallows spaces", r"[a-z](?=[ \n])"),
        ("NFKC", r"[a-z]"),
        ("BERT", r"[a-z]"),
    ],
)
def test_the_trial_finds_wrong_places(name: str, pattern: str) -> None:
    """The trial at start-up finds positions that are not safe."""
    wrong = Splits(re.compile(pattern))

    assert trial_fault(build(name), wrong)


def test_the_trial_finds_wrong_special_ids() -> None:
    """The trial at start-up finds wrong special ids."""
    splits = find_splits(build("Llama 3"))
    assert ((0,), (1,)) == (splits.before, splits.after)

    assert trial_fault(build("Llama 3"), Splits(splits.pattern))


def anchors(tokenizer: Tokenizer) -> set[str]:
    """The added tokens after which a text can be cut."""
    pattern = find_splits(tokenizer).pattern
    assert pattern is not None
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    return {text for text in added if re.fullmatch(pattern, text)}


@pytest.mark.parametrize(
    ("another", "hidden"),
    [("x<s>", "<s>"), ("<|im_start|>user", "<|im_start|>"), ("a<", "<s>"), ("aba", "aba"), ("<s><s>", "<s>")],
)
def test_tokens_that_hide_others(another: str, hidden: str) -> None:
    """A text is not cut after a token that another contains or overlaps: the search may find the other."""
    plain = {"<s>", "</s>", "<|im_start|>", "<|im_end|>"}
    found = anchors(bpe(words(QWEN2), None, raw(another)))

    assert plain == anchors(build("Qwen2"))
    assert hidden not in found


def test_tokens_inside_others() -> None:
    """A token that contains others is found itself."""
    assert "<|im_start|>user" in anchors(bpe(words(QWEN2), None, raw("<|im_start|>user"), raw("im")))
