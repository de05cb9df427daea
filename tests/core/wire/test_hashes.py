"""Hashes: known values of docs/concepts/design.md#identities, and values computed from its formulas."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from kvrouter.core.wire.hashes import (
    block_hashes,
    block_seed,
    chain_of,
    hashes_of,
    known_blocks,
    media_prompt_hashes,
    multimodal_id,
    pack_hashes,
    pool_token,
    prompt_hashes,
    sampled_hashes,
    seeded_block_hashes,
    seeded_prompt_hashes,
    sequence_hashes,
    union_of,
)
from kvrouter.core.wire.ids import BlockHash, SequenceHash
from kvrouter.errors import BadRequestError
from tests.core.forest import Forest, walk

pytestmark = pytest.mark.usefixtures("core")

TOKENS = list(range(100, 164))
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)
hashes = st.lists(st.integers(0, 2**64 - 1), max_size=20)
names = st.one_of(st.none(), st.text(max_size=8))


def expected_seed(lora_name: str | None, salt: str | None) -> int:
    """The formula of docs/concepts/design.md#identities."""
    lora = xxh3_64_intdigest(lora_name.encode(), seed=0) if lora_name else 0
    salted = xxh3_64_intdigest(salt.encode(), seed=1) if salt else 0
    return (1337 + lora + salted) % 2**64


def expected_block(block: Sequence[int], ids: Sequence[int], seed: int) -> int:
    """Tokens as little-endian u32, then the sorted ids of the items that touch the block as u64."""
    data = struct.pack(f"<{len(block)}I", *block) + struct.pack(f"<{len(ids)}Q", *sorted(ids))
    return xxh3_64_intdigest(data, seed=seed)


def expected_chain(blocks: Sequence[int]) -> list[int]:
    """`s[0] = b[0]`, then each block after the one before."""
    chain = list(blocks[:1])
    for block in blocks[1:]:
        chain.append(xxh3_64_intdigest(struct.pack("<QQ", chain[-1], block), seed=1337))
    return chain


def test_known_block_hashes() -> None:
    """Tokens 100..163 in blocks of 16 have the hashes of Dynamo's router."""
    assert [10823191264391160519, 1219978239041041138] == block_hashes(TOKENS, 16)[:2]


@pytest.mark.parametrize(
    ("lora_name", "salt", "first"),
    [
        ("adapterA", None, 17450569026293599780),
        (None, "saltX", 2646903855838583177),
        ("adapterA", "saltX", 6940242254714725692),
    ],
)
def test_known_seeded_hashes(lora_name: str | None, salt: str | None, first: int) -> None:
    """A LoRA name, a salt, and both together give the first block Dynamo's values."""
    assert first == block_hashes(TOKENS, 16, lora_name=lora_name, salt=salt)[0]


def test_known_chain() -> None:
    """The chain uses seed 1337 even if a salt has changed the seed of the blocks."""
    salted = block_hashes(TOKENS, 16, salt="saltX")

    chain = sequence_hashes(salted)

    assert [salted[0], 1220162084052436955] == chain[:2]


@given(tokens, st.integers(1, 20), names, names)
def test_block_hashes_follow_the_design(
    ids: list[int], block_size: int, lora: str | None, salt: str | None
) -> None:
    """Every full block is hashed from its own tokens and the seed; a partial last block is not."""
    seed = expected_seed(lora, salt)
    full = [ids[i : i + block_size] for i in range(0, len(ids) - block_size + 1, block_size)]

    computed = block_hashes(ids, block_size, lora_name=lora, salt=salt)

    assert [expected_block(block, [], seed) for block in full] == computed


@given(hashes)
def test_chain_follows_the_design(blocks: list[int]) -> None:
    """Each sequence hash is made of the one before and the block's hash."""
    assert expected_chain(blocks) == sequence_hashes([BlockHash(block) for block in blocks])
    assert array("Q", expected_chain(blocks)) == chain_of(array("Q", blocks))


@given(hashes, st.integers(0, 20))
def test_chain_may_be_continued(blocks: list[int], cut: int) -> None:
    """A chain computed in two parts is the chain computed at once."""
    named = [BlockHash(block) for block in blocks]
    head = sequence_hashes(named[:cut])

    tail = sequence_hashes(named[cut:], head[-1] if head else None)

    assert sequence_hashes(named) == head + tail


@given(tokens, st.integers(1, 20), st.integers(0, 70), names, st.sampled_from([list, partial(array, "I")]))
def test_prompts_continue_from_known_hashes(
    ids: list[int], block_size: int, known: int, salt: str | None, form: Callable[[list[int]], Sequence[int]]
) -> None:
    """Given hashes of the first blocks do not change the others."""
    whole = sequence_hashes(block_hashes(ids, block_size, salt=salt))
    first = array("Q", whole[:known])

    found = seeded_prompt_hashes(form(ids), block_size, block_seed(salt=salt), first)

    assert whole == list(found) == list(prompt_hashes(form(ids), block_size, salt=salt))
    assert whole[:known] == list(first)
    assert found is not first


@pytest.mark.parametrize("known", [array("Q", range(5)), array("I", range(2))], ids=repr)
def test_known_hashes_are_those_of_the_first_blocks(known: array[int]) -> None:
    """More hashes than the prompt has blocks, or another type, are an error."""
    with pytest.raises(ValueError, match="known must be"):
        seeded_prompt_hashes(TOKENS, 16, 1337, known)


def test_zero_is_a_parent_like_any_other() -> None:
    """A parent with hash 0 counts as a parent."""
    (chained,) = sequence_hashes([BlockHash(5)], SequenceHash(0))

    assert xxh3_64_intdigest(struct.pack("<QQ", 0, 5), seed=1337) == chained


def test_empty_strings_count_as_absent() -> None:
    """An empty LoRA name or salt changes nothing."""
    assert block_hashes(TOKENS, 16) == block_hashes(TOKENS, 16, lora_name="", salt="")
    assert 1337 == block_seed("", "") == block_seed()


def test_lora_name_and_salt_differ() -> None:
    """The same word as LoRA name and as salt makes different blocks."""
    assert block_seed("same", None) != block_seed(None, "same")


def test_multimodal_items_mark_the_blocks_they_touch() -> None:
    """Blocks under an item carry its id, all ids sorted; other blocks are unchanged."""
    item, other = "ff" * 32, "00000000000000aa" * 2
    ids = [[], [2**64 - 1], [2**64 - 1, 0xAA], []]

    computed = block_hashes(TOKENS, 16, multimodal=[(20, 40, item), (47, 48, other)])

    blocks = [TOKENS[i : i + 16] for i in range(0, 64, 16)]
    assert [expected_block(block, own, 1337) for block, own in zip(blocks, ids, strict=True)] == computed


def test_an_item_ends_before_its_end() -> None:
    """An item over [0, 16) does not touch the block that starts at 16."""
    assert block_hashes(TOKENS, 16)[1:] == block_hashes(TOKENS, 16, multimodal=[(0, 16, "a" * 16)])[1:]


def test_order_of_items_does_not_matter() -> None:
    """Items given in another order make the same blocks."""
    items = [(0, 4, "b" * 16), (2, 6, "a" * 16), (3, 64, "cat.png")]

    assert block_hashes(TOKENS, 16, multimodal=items) == block_hashes(TOKENS, 16, multimodal=items[::-1])


def test_items_and_seeds_combine() -> None:
    """A salt changes the seed of blocks with items too."""
    ids = [multimodal_id("cat.png")]

    computed = block_hashes(TOKENS[:16], 16, salt="s", multimodal=[(0, 1, "cat.png")])

    assert [expected_block(TOKENS[:16], ids, expected_seed(None, "s"))] == computed


def test_multimodal_ids() -> None:
    """A hex digest gives its first 16 digits, any other text its XXH3."""
    assert 0x0123456789ABCDEF == multimodal_id("0123456789abcdef" + "0" * 48)
    assert 0x0123456789ABCDEF == multimodal_id("0123456789ABCDEF")
    assert xxh3_64_intdigest(b"cat.png", seed=0) == multimodal_id("cat.png")
    assert xxh3_64_intdigest(b"abc123", seed=0) == multimodal_id("abc123")
    assert xxh3_64_intdigest(b"", seed=0) == multimodal_id("")


def test_seeded_block_hashes_takes_ids_in_any_order() -> None:
    """Ids of a block are sorted before they are hashed."""
    ascending = seeded_block_hashes(TOKENS, 16, 7, [[1, 2], [], [], []])

    assert ascending == seeded_block_hashes(TOKENS, 16, 7, [[2, 1], [], [], []])
    assert expected_block(TOKENS[:16], [1, 2], 7) == ascending[0]


@pytest.mark.parametrize("bad", [[-1] * 16, [2**32] * 16, ["1"] * 16, [1.5] * 16, [None] * 16])
def test_bad_tokens_are_the_clients_fault(bad: list[int]) -> None:
    """A token that is not a u32 makes a 400 that names the prompt, with and without items."""
    with pytest.raises(BadRequestError) as plain:
        block_hashes(bad, 16)
    with pytest.raises(BadRequestError):
        block_hashes(bad, 16, multimodal=[(0, 1, "x")])

    assert (400, "prompt") == (plain.value.status, plain.value.param)


@pytest.mark.parametrize("block_size", [0, -16])
def test_block_size_is_at_least_one(block_size: int) -> None:
    """A block size below 1 is an error."""
    with pytest.raises(ValueError, match="at least 1"):
        block_hashes(TOKENS, block_size)
    with pytest.raises(ValueError, match="at least 1"):
        seeded_prompt_hashes(TOKENS, block_size, 1337)


@given(hashes)
def test_packed_hashes_come_back(values: list[int]) -> None:
    """Packed hashes are little-endian u64 and unpack to the same numbers."""
    packed = pack_hashes(values)

    assert struct.pack(f"<{len(values)}Q", *values) == packed
    assert values == list(hashes_of(packed))


def test_half_a_hash_is_rejected() -> None:
    """Bytes that are not whole hashes do not unpack."""
    with pytest.raises(ValueError, match="multiple"):
        hashes_of(b"1234567")


def test_pool_token() -> None:
    """A pool's name is a slug of at most 40 characters, a dash, and 8 hex digits of the model's hash."""
    model = "meta-llama/Llama-3.1-70B-Instruct-" + "x" * 40
    slug, digits = pool_token(model)[:-9], pool_token(model)[-8:]

    assert "meta-llama-Llama-3-1-70B-Instruct-xxxxxx" == slug
    assert xxh3_64_digest(model.encode())[:4].hex() == digits
    assert pool_token("a/b") != pool_token("a.b")
    assert "-" == pool_token("модель.*>")[-9]
    assert pool_token("модель.*>")[:-9].strip("-") == ""


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 4), st.integers(0, 3), st.data())
def test_lookahead(tokens: list[int], size: int, ahead: int, data: st.DataObject) -> None:
    """A block's hash depends on it, on all before it and on the tokens behind it, and on no others."""
    hashes = media_prompt_hashes(tokens, size, 1, (), ahead)
    assert max(0, len(tokens) - ahead) // size == len(hashes)
    if not tokens:
        return
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = media_prompt_hashes([*tokens[:place], 10, *tokens[place + 1 :]], size, 1, (), ahead)

    same = max(0, place - ahead) // size
    assert [index < same for index in range(len(hashes))] == [
        one == two for one, two in zip(hashes, other, strict=True)
    ]


@given(st.integers(0, 3), st.integers(0, 20), st.integers(1, 6))
def test_media_behind_a_block(ahead: int, start: int, length: int) -> None:
    """An item that touches the tokens behind a block is part of its hash."""
    tokens, size, span = list(range(24)), 4, (start, start + length, 7)
    plain = media_prompt_hashes(tokens, size, 1, (), ahead)
    changed = media_prompt_hashes(tokens, size, 1, (span,), ahead)

    touched = [
        start < end + ahead and start + length > end - size
        for end in range(size, size * len(plain) + 1, size)
    ]
    first = touched.index(True) if any(touched) else len(plain)
    assert list(plain[:first]) == list(changed[:first])
    assert first == len(plain) or plain[first] != changed[first]


@given(st.integers(0, 2**32), st.lists(st.integers(0, 29), min_size=1, max_size=12))
def test_union_of_chains(seed: int, nodes: list[int]) -> None:
    """A chain repeats the blocks that it shares with chains before it: its first ones, and no other."""
    forest = Forest(seed, 30)
    chains = [forest.chain(node) for node in nodes]
    before = [{block for other in chains[:place] for block in other} for place in range(len(chains))]

    assert [walk(chain, held) for chain, held in zip(chains, before, strict=True)] == known_blocks(chains)
    union = list(dict.fromkeys(block for chain in chains for block in chain))
    assert union == list(union_of(chains)) == list(union_of([array("Q", chain) for chain in chains]))


def test_union_of_nothing() -> None:
    """Prompts without a full block have no union."""
    assert [0, 0, 0, 1] == known_blocks([[], [7], [], [7]])
    assert [7] == list(union_of([[], [7], [], [7]]))


@given(hashes, st.integers(0, 2**12 - 1))
def test_sampled_hashes(values: list[int], mask: int) -> None:
    """Those that are 0 where the mask is 1, of a list or an array."""
    wanted = [value for value in values if not value & mask]

    assert wanted == sampled_hashes(values, mask) == sampled_hashes(array("Q", values), mask)
