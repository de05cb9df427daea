"""Engine hashes name a block and everything before it."""

from __future__ import annotations

import pytest

from kvrouter.lab.mocker.cache import Chain
from kvrouter.lab.mocker.hashing import token_ids

TOKENS = range(40)


def names(*, lora_name: str | None = None, salt: str | None = None) -> list[int]:
    """The names of TOKENS' blocks of 16."""
    return Chain(token_ids(TOKENS), 16, lora_name=lora_name, salt=salt).hashes


def test_partial_block_has_no_name() -> None:
    """Only full blocks are named."""
    assert 2 == len(names())


def test_names_are_stable() -> None:
    """Equal prompts have equal names on every engine."""
    assert names() == names()


@pytest.mark.parametrize("keys", [{"lora_name": "a"}, {"salt": "a"}, {"lora_name": "a", "salt": "a"}])
def test_lora_and_salt_reach_every_block(keys: dict[str, str]) -> None:
    """Another LoRA or salt changes every hash: the LoRA directly, the salt through the chain."""
    assert not set(names()) & set(names(**keys))


def test_empty_salt_counts_as_absent() -> None:
    """An empty salt or LoRA name changes nothing."""
    assert names() == names(lora_name="", salt="")


def test_generated_blocks_continue_the_chain() -> None:
    """A growing chain has the same hashes as one that had all tokens at the start."""
    chain = Chain(token_ids(TOKENS[:20]), 16)

    chain.tokens.extend(TOKENS[20:])
    chain.name_blocks(2, 16)

    assert names() == chain.hashes


@pytest.mark.parametrize("bad", [[-1], [1 << 32], ["a"], [1.5]])
def test_not_a_token_id(bad: list[object]) -> None:
    """Values other than unsigned 32-bit integers are rejected."""
    with pytest.raises((OverflowError, TypeError)):
        token_ids(bad)  # type: ignore[arg-type]
