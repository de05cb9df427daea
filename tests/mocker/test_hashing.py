"""Engine hashes name a block and what is before it."""

from __future__ import annotations

import pytest

from kvrouter.mocker.cache import Chain
from kvrouter.mocker.hashing import token_ids

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
    """Another LoRA or salt gives every block another name: one by its hash, one by the chain."""
    assert not set(names()) & set(names(**keys))


def test_empty_salt_counts_as_absent() -> None:
    """An empty salt or LoRA name changes nothing."""
    assert names() == names(lora_name="", salt="")


def test_generated_blocks_continue_the_chain() -> None:
    """A chain that grows names its blocks as if the tokens had been there from the start."""
    chain = Chain(token_ids(TOKENS[:20]), 16)

    chain.tokens.extend(TOKENS[20:])
    chain.name_blocks(2, 16)

    assert names() == chain.hashes


@pytest.mark.parametrize("bad", [[-1], [1 << 32], ["a"], [1.5]])
def test_not_a_token_id(bad: list[object]) -> None:
    """What is not an unsigned 32-bit integer is refused."""
    with pytest.raises((OverflowError, TypeError)):
        token_ids(bad)  # type: ignore[arg-type]
