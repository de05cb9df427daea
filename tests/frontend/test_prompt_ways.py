"""Hashes of prompts do not depend on what the prefix caches hold; and which tokenizer a pool has."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.fleet.pool import Pool, PoolSettings
from kvrouter.core.native import versions
from kvrouter.core.wire.hashes import block_hashes, block_seed, seeded_prompt_hashes, sequence_hashes
from kvrouter.core.wire.ids import PoolId
from kvrouter.prompts.ways import Encoders, LocalWay, Naming, named
from kvrouter.tokens import prefix_hashes
from kvrouter.tokens.prefix_hashes import PrefixHashes
from kvrouter.tokens.prefix_tokens import CacheSettings, Encoded
from kvrouter.tokens.prompt import ChatPrompt, Prompt, PromptEncoder, TextPrompt, TokenPrompt
from tests.core.worlds import card, new_pool
from tests.frontend.fleet import Fleet, FleetOf
from tests.frontend.test_passthrough import join_second_pool
from tests.frontend.workers import OK, says, stream
from tests.long import examples

SENTENCES = [f"Sentence number {number} says something of its own. " * 12 for number in range(3)]
pools = {size: Pool(PoolId("p"), PoolSettings(block_size=size)) for size in (1, 16)}

texts = st.lists(st.sampled_from(SENTENCES), min_size=1, max_size=5)
kept = st.sampled_from([None, None, slice(-100, None), slice(None, 100), slice(-9999, None)])
prompts = st.one_of(
    st.builds(lambda parts, kept: TextPrompt(["".join(parts)], kept_tokens=kept), texts, kept),
    st.builds(lambda parts: TextPrompt(["".join(parts), "".join(parts[::-1]), "short"]), texts),
    st.builds(
        lambda parts, kept: ChatPrompt(
            [{"role": "user", "content": part} for part in parts], kept_tokens=kept
        ),
        texts,
        kept,
    ),
    st.builds(lambda kept: TokenPrompt([list(range(300))], kept_tokens=kept), kept),
)
asked = st.tuples(
    prompts, st.sampled_from(list(pools)), st.sampled_from([None, "lora"]), st.sampled_from([None, "salt"])
)


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Iterator[PromptEncoder]:
    """An encoder without a prefix cache."""
    with PromptEncoder.load(tiny) as encoder:
        yield encoder


@examples(300, 6)
@given(st.lists(asked, min_size=3, max_size=10), st.sampled_from([None, 0.5]), st.sampled_from([3, 1000]))
@pytest.mark.usefixtures("core")
def test_same_hashes(
    tiny: Path, plain: PromptEncoder, history: list[Any], enough: float | None, most: int
) -> None:
    """Texts, chats and ids with common prefixes, truncated, with other names and block sizes."""

    async def ask_all() -> None:
        for prompt, size, lora_name, salt in history:
            found = await blocks.hashes(prompt, Naming(pools[size], "m", lora_name, salt))
            ids = await plain.encode(prompt)
            assert ids is not None
            for each, whole in zip(found or (), ids, strict=True):
                fresh = sequence_hashes(block_hashes(whole, size, lora_name=lora_name, salt=salt))
                if each.is_estimate:
                    assert fresh[: len(each.hashes)] == list(each.hashes)
                else:
                    assert (fresh, len(whole)) == (list(each.hashes), each.isl)

    with PromptEncoder.load(tiny, cache=CacheSettings(enough=enough)) as encoder:
        known = PrefixHashes(least_tokens=0, near_tokens=0, most=most)
        blocks = LocalWay(Encoders(encoder), lambda *_: None, known)
        asyncio.run(ask_all())
        known.check()


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("kept", [slice(-200, None), slice(None, 200)], ids=str)
async def test_truncated(tiny: Path, plain: PromptEncoder, kept: slice) -> None:
    """A truncated prompt has its own hashes, before and after the whole text."""
    text = ["".join(SENTENCES)]
    with PromptEncoder.load(tiny, cache=CacheSettings()) as encoder:
        blocks = LocalWay(Encoders(encoder), lambda *_: None, PrefixHashes(least_tokens=0, near_tokens=0))
        for prompt in (TextPrompt(text, kept_tokens=kept), TextPrompt(text)) * 3:
            (found,) = await blocks.hashes(prompt, Naming(pools[16], "m")) or ()
            (ids,) = await plain.encode(prompt) or [[]]

            assert sequence_hashes(block_hashes(ids, 16)) == list(found.hashes)
            assert len(ids) == found.isl


async def test_what_goes_on_is_not_hashed_again(tiny: Path) -> None:
    """Of texts and chats with a known prefix only the rest is hashed; of token ids everything."""
    with PromptEncoder.load(tiny, cache=CacheSettings()) as encoder:
        known = PrefixHashes(least_tokens=0)
        blocks = LocalWay(Encoders(encoder), lambda *_: None, known)
        naming = Naming(pools[16], "m")
        messages = [{"role": "user", "content": part} for part in SENTENCES]
        told: list[Prompt] = [
            ChatPrompt(messages[:3]),
            ChatPrompt(messages[:4]),
            TokenPrompt([list(range(300))]),
            TokenPrompt([list(range(300))]),
        ]
        (short,), (long,), (ids,), _ = [await blocks.hashes(prompt, naming) or () for prompt in told]

    assert len(short.hashes) - known.counters.known_blocks in range(9)
    assert len(short.hashes) + len(long.hashes) == known.counters.known_blocks + known.counters.hashed_blocks
    assert sequence_hashes(block_hashes(range(300), 16)) == list(ids.hashes)


async def test_shown(fleet_of: FleetOf, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/workers has entries, known blocks and hashed blocks."""
    monkeypatch.setattr(prefix_hashes, "LEAST_TOKENS", dict.fromkeys(versions.CORES, 0))
    body = {"model": "m", "prompt": "".join(SENTENCES)}
    async with fleet_of("--model-path", str(tiny), "--router-mode", "kv") as fleet:
        for _ in range(2):
            await fleet.ask(body)

        view = await tokens_view(fleet)
        assert view["known_blocks"] > 0.8 * (view["known_blocks"] + view["hashed_blocks"]) / 2
        assert (1, 0) == (view["entries"], view["evicted"])


async def tokens_view(fleet: Fleet) -> Any:
    return (await fleet.get("/workers")).json["tokens"]["prefix_hashes"]


async def test_room_is_shared_with_the_tokens(fleet_of: FleetOf, tiny: Path) -> None:
    """--prefix-store-mib limits tokens and hashes together."""
    flags = ("--model-path", str(tiny), "--router-mode", "kv", "--prefix-store-mib", "1")
    async with fleet_of(*flags) as fleet:
        tokens = fleet.frontend.tokens

        of_tokens, of_hashes = [one._max_bytes for one in (tokens.store, tokens.hashes)]
        assert 1 << 20 == of_tokens + of_hashes
        assert of_hashes > 1 << 16


def small_model(tiny: Path, path: Path) -> Path:
    """A model whose tokenizer knows hardly any merges, so that its prompts are longer."""
    shutil.copytree(tiny, path)
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:10]
    file.write_text(json.dumps(tokenizer))
    return path


def read(path: str | None) -> PromptEncoder:
    """As a frontend does, with one thread."""
    return PromptEncoder.load(Path(path) if path else None, threads=1)


def pool_of(model: str, *served_names: str) -> Pool:
    """A pool of one worker."""
    return new_pool(card(model=model, served_names=served_names))


async def test_encoder_of_a_pool(tiny: Path, tmp_path: Path) -> None:
    """The encoder is found by the model's name or a served name; else it is the default one."""
    paths = {"qwen": str(small_model(tiny, tmp_path / "small"))}
    prompt = TextPrompt(["a longer word or two"])
    with Encoders.load(read, str(tiny), paths) as encoders:
        lengths = [
            len(ids[0])
            for pool in (pool_of("qwen"), pool_of("/models/q", "qwen"), pool_of("llama"))
            if (ids := await encoders.of(pool).encode(prompt)) is not None
        ]
    assert lengths[0] == lengths[1] > lengths[2] > 0

    with Encoders.load(read, None, paths) as encoders:
        assert not encoders.of(pool_of("llama")).can_encode_text
        assert encoders.of(pool_of("qwen")).can_encode_text


VLLM = {"engine": "vllm", "engine_version": "0.32.0+cpu", "tokenizer": "org/model"}


@pytest.mark.parametrize(
    ("cards", "name"),
    [
        ([VLLM], "org/model"),
        ([VLLM, VLLM | {"engine_version": "1.0"}], "org/model"),
        ([VLLM, VLLM | {"tokenizer": "/models/model"}], ""),
        ([VLLM, VLLM | {"engine_version": "0.31.2"}], ""),
        ([VLLM | {"engine_version": ""}], ""),
        ([VLLM | {"engine": "sglang"}], ""),
        ([VLLM | {"tokenizer": ""}], ""),
        ([], ""),
    ],
)
def test_engine_model(cards: list[dict[str, Any]], name: str) -> None:
    """The name in the hashes of images, if all workers name their model alike and hash as vLLM 0.32."""
    pool = new_pool(*(card(f"w{number}", **facts) for number, facts in enumerate(cards)))

    assert name == Naming(pool, "m").engine_model()


@pytest.mark.parametrize(("engine", "is_apart"), [("sglang", True), ("vllm", False)])
def test_extra_key(engine: str, is_apart: bool) -> None:
    """SGLang's extra key keeps a request's blocks apart from plain requests' blocks; vLLM ignores it."""
    pool, ids = new_pool(card("w1", engine=engine)), list(range(64))
    keys = (None, "a", "a", "b")
    hashes = [named([Encoded(ids, 64)], Naming(pool, "m", extra_key=key))[0].hashes for key in keys]

    plain, first, again, other = hashes
    assert first == again
    assert (3 if is_apart else 1) == len({tuple(each) for each in (plain, first, other)})


async def test_each_pool_has_its_own_tokenizer(fleet_of: FleetOf, tiny: Path, tmp_path: Path) -> None:
    """With two models behind one frontend, a text is tokenized by the tokenizer of its model."""
    small = small_model(tiny, tmp_path / "small")
    flags = ["--router-mode", "kv", "--model-path", str(tiny), "--model-path", f"other={small}"]
    async with fleet_of(*flags, scripts=(OK, says(stream("a")))) as fleet:
        await join_second_pool(fleet)
        body = {"prompt": "one and the same text " * 9}
        await fleet.ask(body | {"model": "m"})
        of_one = await prompt_tokens(fleet)
        await fleet.ask(body | {"model": "other"})

        assert 9 <= of_one < await prompt_tokens(fleet) - of_one


async def prompt_tokens(fleet: Fleet) -> float:
    """Prompt tokens routed so far, of all models."""
    page = (await fleet.get("/metrics")).body.decode()
    lines = [line for line in page.splitlines() if line.startswith('kvrouter_tokens_total{kind="prompt"')]
    return sum(float(line.split()[-1]) for line in lines)


def test_longer_than_any_context() -> None:
    """Ids behind the longest context are not hashed: millions of them would hold up all other requests."""
    pool = new_pool(card("w1", max_model_len=100), card("w2", max_model_len=50))
    ids = list(range(100_000))

    (found,) = named([Encoded(ids, len(ids))], Naming(pool, "m"))

    assert seeded_prompt_hashes(ids[:100], 16, block_seed()) == found.hashes
    assert (100_000, False) == (found.isl, found.is_estimate)
