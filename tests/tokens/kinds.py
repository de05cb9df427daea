"""Tokenizers of every kind that matters for cutting texts, trained when needed."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, trainers
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre
from tokenizers import processors as post

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + CONTRACTIONS + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + CONTRACTIONS + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre.ByteLevel(add_prefix_space=False, use_regex=False)
START_OF_TEXT = post.TemplateProcessing(
    single="<s> $A </s>", pair="<s> $A $B", special_tokens=[("<s>", 0), ("</s>", 1)]
)
CORPUS = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text("utf-8")[:60_000]


def words(*patterns: str) -> pre.PreTokenizer:
    """The pre-tokenizer of byte-level models."""
    return pre.Sequence([*(pre.Split(Regex(pattern), "isolated") for pattern in patterns), BYTES])


def bpe(
    pre_tokenizer: pre.PreTokenizer | None,
    normalizer: norm.Normalizer | None = None,
    *added: AddedToken,
    special: list[str] | None = None,
) -> Tokenizer:
    """A BPE tokenizer; `added` tokens are added after its training."""
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL if special is None else special,
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = _trained(models.BPE(), trainer, pre_tokenizer, normalizer, *added)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def bert() -> Tokenizer:
    """WordPiece, as in BERT."""
    trainer = trainers.WordPieceTrainer(
        vocab_size=700, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    model = models.WordPiece(unk_token="[UNK]")
    tokenizer = _trained(model, trainer, pre.BertPreTokenizer(), norm.BertNormalizer())
    tokenizer.post_processor = post.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def unigram() -> Tokenizer:
    """Unigram with Metaspace, as in T5."""
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    return _trained(models.Unigram(), trainer, pre.Metaspace(prepend_scheme="always"), None)


def llama3() -> Tokenizer:
    """Llama 3: a start-of-text token where special tokens are added."""
    tokenizer = bpe(words(LLAMA3))
    tokenizer.post_processor = post.Sequence([post.ByteLevel(), START_OF_TEXT])
    return tokenizer


def dropout() -> Tokenizer:
    """BPE that drops merges at random."""
    tokenizer = bpe(words(QWEN2))
    tokenizer.model.dropout = 0.1
    return tokenizer


def raw(text: str, **flags: bool) -> AddedToken:
    """A token that is searched in the original text, not in the normalized one."""
    return AddedToken(text, normalized=False, **flags)


def _trained(
    model: Any,
    trainer: Any,
    pre_tokenizer: pre.PreTokenizer | None,
    normalizer: norm.Normalizer | None,
    *added: AddedToken,
) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator([CORPUS[i : i + 400] for i in range(0, len(CORPUS), 400)], trainer)
    if added:
        tokenizer.add_special_tokens(list(added))
    return tokenizer


def _lower() -> norm.Normalizer:
    return norm.Sequence([norm.Strip(), norm.Lowercase(), norm.StripAccents()])


def _llama2() -> norm.Normalizer:
    return norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])


# Can be cut after words and after added tokens.
AFTER_WORDS: dict[str, Callable[[], Tokenizer]] = {
    "GPT-2": lambda: bpe(pre.ByteLevel(add_prefix_space=False)),
    "Qwen2": lambda: bpe(words(QWEN2), norm.NFC()),
    "Llama 3": llama3,
    "o200k": lambda: bpe(words(O200K)),
    "DeepSeek": lambda: bpe(words(r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK)),  # noqa: RUF001  its own
    "SmolLM": lambda: bpe(
        pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    ),
    "added tokens of all kinds": lambda: bpe(
        words(QWEN2),
        norm.NFC(),
        raw("<l>", lstrip=True),
        raw("<r>", rstrip=True),
        raw("  "),
        raw("<s><s>"),
        raw("\n"),
        AddedToken("nn", normalized=True),
    ),
}

# Can be cut after added tokens only.
AFTER_TOKENS: dict[str, Callable[[], Tokenizer]] = {
    "a prefix space": lambda: bpe(pre.ByteLevel(add_prefix_space=True)),
    "Metaspace, always": lambda: bpe(pre.Metaspace(prepend_scheme="always")),
    "Metaspace, never": lambda: bpe(pre.Metaspace(prepend_scheme="never")),
    "Unigram": unigram,
    "Llama 2": lambda: bpe(None, _llama2()),
    "Gemma": lambda: bpe(pre.Split(" ", "merged_with_previous"), norm.Replace(" ", "▁")),
    "a stripping normalizer": lambda: bpe(pre.Whitespace(), _lower()),
    "BERT": bert,
    "an unknown pattern": lambda: bpe(words(r"\s+|\S+")),
    "NFKC": lambda: bpe(words(QWEN2), norm.NFKC()),
    "a token over two words": lambda: bpe(words(QWEN2), None, raw("end of")),
    "a word that swallows spaces": lambda: bpe(words(QWEN2), None, raw("if", rstrip=True)),
}

# Cannot be cut, with a part of the expected reason.
NOWHERE: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "Metaspace, first": (lambda: bpe(pre.Metaspace(prepend_scheme="first")), "prepend_scheme"),
    "single_word": (lambda: bpe(words(QWEN2), None, raw("if", single_word=True)), "single_word"),
    "dropout": (dropout, "dropout"),
    "nothing to hold on to": (lambda: bpe(pre.Whitespace(), special=[]), "no added token"),
    "fixed length": (lambda: bpe(pre.FixedLength(5)), "FixedLength"),
}


@cache
def build(name: str) -> Tokenizer:
    """The tokenizer of this name; do not change it."""
    nowhere = {name: make for name, (make, _) in NOWHERE.items()}
    return {**AFTER_WORDS, **AFTER_TOKENS, **nowhere}[name]()
