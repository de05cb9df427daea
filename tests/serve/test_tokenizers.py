"""The tokenizer of each model, and its line in the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvrouter.prompts.settings import TokenOptions
from kvrouter.serve.tokenizers import Tokenizers, tokenizer_of
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.engines.http import Models
from kvrouter.worker.engines.metrics import Scrape
from kvrouter.worker.options import AgentOptions

AGENT = AgentOptions("http://e:1", "e-1")


@pytest.fixture
def directories(tmp_path: Path) -> dict[str, Path]:
    """Model directories by name."""
    found = {name: tmp_path / name for name in ("one", "two", "three")}
    for path in found.values():
        path.mkdir()
        (path / "tokenizer.json").touch()
    return found


def engine(name: str, path: Path | str, *aliases: str) -> EngineFacts:
    """An engine that reports a model and its path."""
    return EngineFacts(Models((name, *aliases), ()), "", Scrape(), tokenizer=str(path))


def learnt(tokens: TokenOptions, *engines: EngineFacts) -> Tokenizers:
    """The tokenizers after these engines' reports."""
    tokenizers = Tokenizers(tokens)
    for facts in engines:
        tokenizers.learn(AGENT, facts)
    return tokenizers


def test_directory(tmp_path: Path) -> None:
    """The engine's model directory is used if it exists here and has a tokenizer."""
    facts = engine("m", tmp_path)

    assert tokenizer_of(facts) is None
    (tmp_path / "tokenizer.json").touch()
    assert tmp_path == tokenizer_of(facts)


def test_named_even_if_alone(directories: dict[str, Path]) -> None:
    """A directory found for a model is used for this model only, not for a later one."""
    one, two = engine("one", directories["one"]), engine("two", directories["two"])
    tokenizers = learnt(TokenOptions(way="local"), one)

    assert [f"--model-path=one={directories['one']}"] == tokenizers.flags()

    tokenizers.learn(AGENT, two)
    late = tokenizers.of(AGENT, two)
    assert str(directories["one"]) == tokenizers.of(AGENT, one).text
    assert "none" == late.text
    assert "tokenizer of two is not in use" in late.lack
    assert late.lack.endswith(f"restart kvrouter serve, or give --model-path two={directories['two']}")


def test_some_named_by_hand(directories: dict[str, Path]) -> None:
    """A path given for one model does not change other models' paths."""
    tokens = TokenOptions((("one", "/by/hand"),), way="local")
    one, two, far = engine("one", directories["one"]), engine("two", directories["two"]), engine("far", "O/R")
    tokenizers = learnt(tokens, one, two, far)

    assert [f"--model-path=two={directories['two']}"] == tokenizers.flags()
    assert "/by/hand" == tokenizers.of(AGENT, one).text
    assert "/by/hand" == tokenizers.of(AGENT, engine("other", "", "one")).text
    assert str(directories["two"]) == tokenizers.of(AGENT, two).text
    assert "'O/R' is not a model directory on this machine; give --model-path far=DIR" in (
        tokenizers.of(AGENT, far).lack
    )


def test_default_by_hand(directories: dict[str, Path]) -> None:
    """A path given without a name is used for all models."""
    one = engine("one", directories["one"])
    tokenizers = learnt(TokenOptions((("", "/by/hand"),), way="local"), one)

    assert [] == tokenizers.flags()
    assert ("/by/hand", "") == (tokenizers.of(AGENT, one).text, tokenizers.of(AGENT, one).lack)


def test_two_engines_of_a_model(directories: dict[str, Path]) -> None:
    """The first directory stays, also if a later engine reports a missing or another one."""
    here, far = engine("one", directories["one"]), engine("one", "/not/here")
    tokenizers = learnt(TokenOptions(way="local"), here, far, engine("one", directories["three"]))

    assert [f"--model-path=one={directories['one']}"] == tokenizers.flags()
    assert (str(directories["one"]), "") == (
        tokenizers.of(AGENT, far).text, tokenizers.of(AGENT, far).lack,
    )  # fmt: skip


def test_pool_named_by_hand(directories: dict[str, Path]) -> None:
    """`model=` replaces the engine's model name."""
    agent, tokenizers = replace(AGENT, model="pool"), Tokenizers(TokenOptions(way="local"))
    tokenizers.learn(agent, engine("one", directories["one"]))

    assert [f"--model-path=pool={directories['one']}"] == tokenizers.flags()


def test_found_by_the_frontends(directories: dict[str, Path]) -> None:
    """The frontends may read what cards name, also later; without a directory the engine tokenizes."""
    tokenizers = learnt(TokenOptions(), engine("one", directories["one"]))

    assert ["--tokenizer-root=/"] == tokenizers.flags()
    late = tokenizers.of(AGENT, engine("late", directories["two"]))
    assert (f"{directories['two']}, if its ids are the engine's; else its /tokenize", "") == (
        late.text, late.lack,
    )  # fmt: skip
    far = tokenizers.of(AGENT, engine("far", "O/R"))
    assert ("the engine's own /tokenize", "") == (far.text, far.lack)
    assert [] == learnt(TokenOptions(root=directories["one"])).flags()


@pytest.mark.parametrize(("way", "shown"), [("remote", "/tokenize"), ("none", "routed by text")])
def test_other_ways(way: str, shown: str, directories: dict[str, Path]) -> None:
    """With --tokenizer remote or none the directory is not used, so nothing is missing."""
    one = engine("one", directories["one"])
    tokenizers = learnt(TokenOptions(way=way), one)  # type: ignore[arg-type]  # pytest gives strings

    assert [] == tokenizers.flags()
    assert shown in tokenizers.of(AGENT, one).text
    assert "" == tokenizers.of(AGENT, one).lack
