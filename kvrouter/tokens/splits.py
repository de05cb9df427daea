r"""Positions at which a text can be cut so that its parts, tokenized separately, have the ids of the whole.

`tokenizers` works in this order, and every step except the first processes one piece at a time:

    text ──added tokens──> pieces ──normalizer──> ──pre-tokenizer──> words ──model──> ids ──post-processor

So two kinds of position can be proven safe from tokenizer.json alone:

after an added token that is found wherever its text occurs (`anchors`)
    The search for added tokens continues after it as if the text began there. This excludes tokens that
    absorb spaces (lstrip, rstrip), tokens that are searched in normalized text, and tokens whose text
    is part of another token's or overlaps with it, since the search might find the other one.

between an ASCII letter and a space or newline (`words`)
    The patterns of `_WORD_PATTERNS` end a word there: no alternative matches both the letter and the
    space, and no lookahead from before reaches that far. NFC composes no characters across it.

The position after a newline is not safe: these patterns match spaces and newlines together.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""


def _camel_case(contractions: str, numbers: str) -> str:
    """The words of OpenAI's o200k: an upper-case part followed by a lower-case part."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{contractions}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{contractions}"
        rf"|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


def _qwen_like(numbers: str, letters: str = r"\p{L}", no_sign: str = r"\p{L}\p{N}") -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{numbers}"
        rf"| ?[^\s{no_sign}]+[\r\n]*|{_SPACES}"
    )


# Each pattern was checked by hand for the property that the module's docstring states; add none unchecked.
_WORD_PATTERNS = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        _qwen_like(r"\p{N}"),  # Qwen2, Qwen3
        _qwen_like(r"\p{N}{1,3}"),  # Llama 3
        _qwen_like(r"\p{N}", r"[\p{L}\p{M}]", r"\p{L}\p{M}\p{N}"),  # Qwen3.5
        _camel_case(_CONTRACTIONS + "?", r"\p{N}{1,3}"),  # o200k
        _camel_case("", r"\p{N}"),  # Mistral's Tekken
        rf"{_DEEPSEEK_SIGNS}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",  # DeepSeek-V3
    }
)

# Their matches contain neither an ASCII letter nor a space, so none of them spans the end of a word.
_NUMBER_PATTERNS = frozenset({r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", "[一-龥぀-ゟ\u30a0-ヿ]+"})

_PIECEWISE_PRE_TOKENIZERS = frozenset(
    {"BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Punctuation", "Split"}
    | {"UnicodeScripts", "Whitespace", "WhitespaceSplit"}
)
_PIECEWISE_NORMALIZERS = frozenset(
    {"BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled"}
    | {"Prepend", "Replace", "Strip", "StripAccents"}
)
_WORD_END = r"[A-Za-z](?=[ \n])"


@dataclass(frozen=True, slots=True)
class Splits:
    """What could be proven about one tokenizer."""

    # A text can be cut at the end of each match; None: nowhere.
    pattern: re.Pattern[str] | None
    before: tuple[int, ...] = ()
    # The ids that `add_special_tokens` adds before and after those of the text.
    after: tuple[int, ...] = ()
    # Why `pattern` is None.
    reason: str = ""
    # Number of added tokens after which a text can be cut.
    anchors: int = 0
    # Whether a text can be cut after a word.
    words: bool = False


class _NotProvableError(Exception):
    """The message is the reason."""


def find_splits(tokenizer: tokenizers.Tokenizer) -> Splits:
    """Where texts of this tokenizer can be cut; if nowhere, with the reason."""
    try:
        return _find_splits(tokenizer)
    except _NotProvableError as error:
        return Splits(None, reason=str(error))


def _find_splits(tokenizer: tokenizers.Tokenizer) -> Splits:
    normalizers = list(_parts(_state(tokenizer.normalizer), "normalizers"))
    pre_tokenizers = list(_parts(_state(tokenizer.pre_tokenizer), "pretokenizers"))
    tokens = list(tokenizer.get_added_tokens_decoder().values())
    _refuse_chance(tokenizer.model)
    _refuse_context(normalizers, pre_tokenizers, tokens)
    before, after = _special_ids(_state(tokenizer.post_processor))
    anchors = [] if tokenizer.encode_special_tokens else _anchors(tokens)
    words = _ends_words(normalizers, pre_tokenizers) and not any(map(_reaches_over_word_end, tokens))
    if not anchors and not words:
        raise _NotProvableError("no added token and no known pre-tokenizer pattern marks a place to cut")
    # Python's alternation takes the first alternative that matches: the longest token must come first
    longest_first = sorted(map(re.escape, anchors), key=len, reverse=True)
    pattern = re.compile("|".join([*longest_first, *([_WORD_END] if words else [])]))
    return Splits(pattern, before, after, anchors=len(anchors), words=words)


def _state(component: Any) -> dict[str, Any]:
    """The component's part of tokenizer.json."""
    return json.loads(component.__getstate__()) if component is not None else {}


def _parts(component: dict[str, Any], nested: str) -> Iterator[dict[str, Any]]:
    """A component, or the members of a sequence of them."""
    if component.get("type") == "Sequence":
        for part in component[nested]:
            yield from _parts(part, nested)
    elif component:
        yield component


def _refuse_chance(model: object) -> None:
    """Reject a model that uses random numbers: the ids of one text differ from call to call."""
    if isinstance(model, models.BPE) and model.dropout:
        raise _NotProvableError("the model drops merges at random (dropout)")
    if isinstance(model, models.Unigram) and (model.alpha or model.nbest_size):
        raise _NotProvableError("the model samples (alpha, nbest_size)")
    if not isinstance(model, models.BPE | models.Unigram | models.WordPiece | models.WordLevel):
        raise _NotProvableError(f"the model {type(model).__name__} is not known here")


def _refuse_context(
    normalizers: Iterable[dict[str, Any]],
    pre_tokenizers: Iterable[dict[str, Any]],
    tokens: Iterable[tokenizers.AddedToken],
) -> None:
    """Reject a step that depends on more than one piece, or on the position of the piece in the text."""
    for part in normalizers:
        if part["type"] not in _PIECEWISE_NORMALIZERS:
            raise _NotProvableError(f"the normalizer {part['type']} is not known here")
    for part in pre_tokenizers:
        is_metaspace = part["type"] == "Metaspace"
        if is_metaspace and part.get("prepend_scheme") not in {"always", "never"}:
            raise _NotProvableError("Metaspace prepends to the first word only (prepend_scheme)")
        if not is_metaspace and part["type"] not in _PIECEWISE_PRE_TOKENIZERS:
            raise _NotProvableError(f"the pre-tokenizer {part['type']} is not known here")
    for token in tokens:
        if token.single_word:
            raise _NotProvableError(
                f"the added token {token.content!r} depends on the characters next to it (single_word)"
            )


def _special_ids(post_processor: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids added before and after those of a text."""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    for part in _parts(post_processor, "processors"):
        match part["type"]:
            case "ByteLevel":
                continue  # changes offsets only, no ids
            case "BertProcessing" | "RobertaProcessing":
                first, last = _ids(part["cls"]), _ids(part["sep"])
            case "TemplateProcessing":
                first, last = _around_text(part)
            case other:
                raise _NotProvableError(f"the post-processor {other} is not known here")
        before, after = (*first, *before), (*after, *last)
    return before, after


def _ids(named: tuple[str, int]) -> tuple[int, ...]:
    """The id in a (name, id) pair."""
    return (named[1],)


def _around_text(template: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sides: list[list[int]] = [[]]
    for piece in template["single"]:
        if "Sequence" in piece:
            sides.append([])
        else:
            sides[-1] += template["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    if len(sides) != 2:
        raise _NotProvableError("the post-processor repeats or drops the text")
    return tuple(sides[0]), tuple(sides[1])


def _anchors(tokens: list[tokenizers.AddedToken]) -> list[str]:
    """The tokens that are found wherever their text occurs, independently of the text around it."""
    raw = {token.content for token in tokens if not token.normalized and token.content}
    endings = {text[i:] for text in raw for i in range(1, len(text))}
    everything = "\0".join(raw)
    return [
        token.content
        for token in tokens
        if token.content in raw
        and not (token.normalized or token.lstrip or token.rstrip)
        and "\0" not in token.content
        and _count(token.content, everything) == 1  # otherwise it is part of another token
        and not any(token.content[:i] in endings for i in range(1, len(token.content)))
    ]


def _count(text: str, everything: str) -> int:
    """Occurrences of `text`, overlapping ones included, counted up to 2."""
    first = everything.find(text)
    return 1 + (everything.find(text, first + 1) >= 0)


def _ends_words(normalizers: list[dict[str, Any]], pre_tokenizers: list[dict[str, Any]]) -> bool:
    """Whether a word always ends between a letter and a space."""
    if any(part["type"] != "NFC" for part in normalizers):
        return False
    for part in pre_tokenizers:
        if part["type"] == "ByteLevel":
            return bool(part["use_regex"]) and not part["add_prefix_space"]  # GPT-2's pattern is built in
        if part["type"] == "Split" and _pattern(part) in _WORD_PATTERNS:
            return True  # later steps process single words
        if part["type"] != "Digits" and not (part["type"] == "Split" and _pattern(part) in _NUMBER_PATTERNS):
            return False
    return False


def _pattern(split: dict[str, Any]) -> str | None:
    """The regular expression, if both its matches and the text between them are kept as words."""
    keeps_all = (split["behavior"], split["invert"]) in {("Isolated", False), ("Removed", True)}
    return split["pattern"].get("Regex") if keeps_all else None


def _reaches_over_word_end(token: tokenizers.AddedToken) -> bool:
    """Whether the token could match text on both sides of the end of a word."""
    texts = {token.content, unicodedata.normalize("NFC", token.content)}
    swallows = token.rstrip and any(text[-1:].isalpha() for text in texts)
    return swallows or any(re.search(_WORD_END, text) for text in texts)
