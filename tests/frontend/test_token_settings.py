"""The flags of tokenizing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrouter.errors import ConfigError
from kvrouter.frontend.settings import parse_options
from kvrouter.prompts.settings import TokenOptions
from kvrouter.tokens.prefix_tokens import CacheSettings


def test_defaults() -> None:
    """Without flags: the documented defaults. Without a model only prompts of token ids are hashed."""
    expected = TokenOptions(cache=CacheSettings(500_000, 256, 512 * 1024 * 1024, None))

    assert expected == parse_options([]).tokens
    assert ("auto", 8, None) == (expected.way, expected.threads, expected.model_path)


def test_given(tmp_path: Path) -> None:
    """Every flag reaches the options."""
    key = tmp_path / "key"
    key.write_text("secret\n")
    flags = "--model-path org/m --model-path n=d --tokenizer-workers 3 --prefix-store-blocks 9"
    flags += " --prefix-store-mib 2 --min-prefix-overlap-ratio 0.8 --no-token-comparison --chat-template t"
    flags += " --tokenizer-cache-dir c --tokenizer-root r --send-token-ids off"
    flags += " --tokenizer-backend huggingface --tokenizer-queue-mib 3"
    flags += f" --engine-api-key-file {key}"
    cache = CacheSettings(9, 256, 2 * 1024 * 1024, 0.8)

    paths = (("", "org/m"), ("n", "d"))
    options = parse_options(flags.split()).tokens

    given = TokenOptions(
        paths,
        "auto",
        Path("c"),
        Path("r"),
        Path("t"),
        3,
        "huggingface",
        3 * 1024 * 1024,
        False,
        key,
        cache,
        send_ids="off",
    )
    assert given == options
    assert ("org/m", {"n": "d"}, "secret") == (
        options.model_path,
        options.model_paths,
        options.engine_api_key,
    )


def test_no_cache() -> None:
    """--prefix-store-blocks 0 switches the prefix-token cache off."""
    assert parse_options(["--prefix-store-blocks", "0"]).tokens.prefix_cache is None


def test_none_implies_no_kv_events() -> None:
    """Hashes of text match no engine's events, so the events are not read."""
    assert not parse_options(["--tokenizer", "none", "--use-kv-events"]).replica.pool.use_kv_events
    assert parse_options(["--tokenizer", "remote"]).replica.pool.use_kv_events


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tokenizer", "remote", "--model-path", "d"], "--model-path is not used with --tokenizer remote"),
        (["--chat-template", "f"], "--chat-template needs a --model-path without MODEL="),
        (["--engine-api-key-file", "/no/such"], "--engine-api-key-file /no/such: No such file"),
    ],
)
def test_contradictions(flags: list[str], words: str) -> None:
    """Contradicting flags end the start with a message that contains the way out."""
    with pytest.raises(ConfigError, match=words):
        parse_options(flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model-path", "=d"], "must be DIR or MODEL=DIR"),
        (["--tokenizer", "best"], "must be auto, local, remote or none"),
        (["--min-prefix-overlap-ratio", "1.5"], "must be a number above 0 and at most 1"),
        (["--min-prefix-overlap-ratio", "nan"], "must be a number above 0 and at most 1"),
        (["--min-prefix-overlap-ratio", "most"], "'most': must be a number above 0"),
        (["--prefix-store-blocks", "-1"], "must be a whole number of at least 0"),
        (["--prefix-store-block-chars", "0"], "removed; a piece of the prefix cache has 256 characters"),
    ],
)
def test_wrong_flags(flags: list[str], words: str) -> None:
    """A wrong value is named."""
    with pytest.raises(ConfigError, match=words):
        parse_options(flags)
