"""Which tokenizer serves which model."""

from __future__ import annotations

import json
from pathlib import Path

from kvrouter.core.fleet.pool import Pool
from kvrouter.frontend.prompt_blocks import Encoders
from kvrouter.tokens.prompt import PromptEncoder, TextPrompt
from kvrouter.tokens.tiny import build_tiny_model
from tests.core.worlds import card, new_pool
from tests.frontend.fleet import Fleet, FleetOf
from tests.frontend.test_passthrough import join_second_pool
from tests.frontend.workers import OK, says, stream


def small_model(path: Path) -> Path:
    """A model whose tokenizer knows hardly any merges, so that its prompts are longer."""
    build_tiny_model(path)
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


async def test_encoder_of_a_pool(tmp_path: Path) -> None:
    """By the model's own name or one that it is served by; else the one without a name."""
    build_tiny_model(tmp_path / "tiny")
    paths = {"qwen": str(small_model(tmp_path / "small"))}
    prompt = TextPrompt(["a longer word or two"])
    with Encoders.load(read, str(tmp_path / "tiny"), paths) as encoders:
        lengths = [
            len(ids[0])
            for pool in (pool_of("qwen"), pool_of("/models/q", "qwen"), pool_of("llama"))
            if (ids := await encoders.of(pool).encode(prompt)) is not None
        ]
    assert lengths[0] == lengths[1] > lengths[2] > 0

    with Encoders.load(read, None, paths) as encoders:
        assert not encoders.of(pool_of("llama")).can_encode_text
        assert encoders.of(pool_of("qwen")).can_encode_text


async def test_each_pool_its_own(fleet_of: FleetOf, tmp_path: Path) -> None:
    """Two models behind one frontend: the same text has the tokens of each one's own tokenizer."""
    build_tiny_model(tmp_path / "tiny")
    small = small_model(tmp_path / "small")
    flags = ["--router-mode", "kv", "--model-path", str(tmp_path / "tiny"), "--model-path", f"other={small}"]
    async with fleet_of(*flags, scripts=(OK, says(stream("a")))) as fleet:
        await join_second_pool(fleet)
        body = {"prompt": "one and the same text " * 9}
        await fleet.ask(body | {"model": "m"})
        of_one = await prompt_tokens(fleet)
        await fleet.ask(body | {"model": "other"})

        assert 9 <= of_one < await prompt_tokens(fleet) - of_one


async def prompt_tokens(fleet: Fleet) -> float:
    """Prompt tokens routed so far."""
    page = (await fleet.get("/metrics")).body.decode()
    return float(page.split("\nkvrouter_prompt_tokens_total ")[1].split("\n")[0])
