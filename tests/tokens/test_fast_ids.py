"""fastokens beside the reference library: the same ids, or it is not used."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer as Model

from kvrouter.errors import BadRequestError
from kvrouter.tokens.fast_ids import DIFFERENT, EQUAL, FAILED, SAMPLED_EVERY, FastIds, Library
from kvrouter.tokens.prefix_tokens import CacheSettings, trial_texts
from kvrouter.tokens.tokenizer import FAST_INLINE_CHARACTERS, INLINE_CHARACTERS, Tokenizer
from tests.long import IS_LONG
from tests.tokens.kinds import AFTER_WORDS, bert, unigram

TEXT = "That is the question. "


class Same:
    """A library that has the reference's ids, until `change` makes others of them or raises an error."""

    def __init__(self, reference: Model) -> None:
        self._reference = reference
        self.change: Callable[[list[int]], list[int]] = list

    def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
        found = self._reference.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        ids = [self.change(each.ids) for each in found]
        ends = [0, *accumulate(map(len, ids))]
        flat = [one for each in ids for one in each]
        return struct.pack(f"<{len(flat)}I", *flat), struct.pack(f"<{len(ends)}Q", *ends)


def drop_one(ids: list[int]) -> list[int]:
    return ids[1:]


def fail(_: list[int]) -> list[int]:
    raise ValueError("pcre2: match limit")


class PanicException(BaseException):  # the name that Rust's binding gives it
    pass


def panic(_: list[int]) -> list[int]:
    raise PanicException


@pytest.fixture
def model(tiny: Path) -> Model:
    return Model.from_file(str(tiny / "tokenizer.json"))


@pytest.fixture
def opened() -> Iterator[list[FastIds]]:
    """What is closed after the test."""
    found: list[FastIds] = []
    yield found
    for one in found:
        one.close()


@pytest.fixture
def same(model: Model, opened: list[FastIds]) -> tuple[FastIds, Same]:
    """It is on, with a library that a test may break."""
    library = Same(model)
    fast = FastIds(model, lambda _: library)
    opened.append(fast)
    fast.compared.result(timeout=30)
    return fast, library


def ids_of(model: Model, texts: Sequence[str]) -> list[list[int]]:
    return [one.ids for one in model.encode_batch_fast(texts, add_special_tokens=False)]


@pytest.mark.parametrize("name", AFTER_WORDS)
def test_ids_of_real_kinds(name: str, opened: list[FastIds]) -> None:
    """Each kind of BPE that packages ship is on, and more texts than those of the start have equal ids."""
    model = AFTER_WORDS[name]()
    fast = FastIds(model)
    opened.append(fast)
    fast.compared.result(timeout=60)
    assert "" == fast.off_because

    for text in islice(trial_texts(model, Random(1)), 20_000 if IS_LONG else 150):
        found = fast.encode([text], add_special_tokens=False)
        assert found is not None
        assert [found[0].tolist()] == ids_of(model, [text])


@pytest.mark.parametrize("kind", [bert, unigram])
def test_models_that_it_refuses(kind: Callable[[], Model], opened: list[FastIds]) -> None:
    """What is no BPE is encoded by the reference library, with the reason."""
    fast = FastIds(kind())
    opened.append(fast)
    fast.compared.result(timeout=30)

    assert not fast.is_on
    assert fast.off_because
    assert fast.encode([TEXT], add_special_tokens=False) is None


def test_another_id_at_the_start(model: Model, opened: list[FastIds]) -> None:
    """A single text with another id is enough; the reason quotes it."""
    library = Same(model)
    library.change = drop_one
    fast = FastIds(model, lambda _: library)
    opened.append(fast)
    fast.compared.result(timeout=30)

    assert not fast.is_on
    assert "other ids than the reference library's for" in fast.off_because


def test_without_the_package(model: Model, opened: list[FastIds]) -> None:
    """It is an extra: the reason says how to get it."""

    def read(_: str) -> Library:
        raise ImportError("no module named fastokens")

    fast = FastIds(model, read)
    opened.append(fast)
    fast.compared.result(timeout=30)

    assert "fastokens is not installed (pip install 'kvrouter[fast]')" == fast.off_because


def test_several_texts(same: tuple[FastIds, Same], model: Model) -> None:
    """The ids of a batch are those of each text."""
    texts = ["to be", "", "or not to be"]
    found = same[0].encode(texts, add_special_tokens=False)

    assert found is not None
    assert [one.tolist() for one in found] == ids_of(model, texts)


def test_the_known_difference(same: tuple[FastIds, Same]) -> None:
    """A text with the letter whose ids may differ is left to the reference library."""
    assert same[0].encode(["t'\u017f'st"], add_special_tokens=False) is None
    assert same[0].encode([TEXT, "\u017f"], add_special_tokens=False) is None


@pytest.mark.parametrize("fault", [fail, panic], ids=["error", "panic"])
def test_a_fault_at_run_time(same: tuple[FastIds, Same], fault: Callable[[list[int]], list[int]]) -> None:
    """It ends with its text, which the reference library encodes, and is counted."""
    fast, library = same
    library.change = fault
    assert fast.encode([TEXT], add_special_tokens=False) is None
    library.change = list

    assert fast.encode([TEXT], add_special_tokens=False) is not None
    assert {FAILED: 1} == fast.checks


def test_one_text_in_a_thousand(same: tuple[FastIds, Same]) -> None:
    """It is compared again, and counted."""
    fast, _ = same
    for _ in range(2 * SAMPLED_EVERY):
        fast.encode([TEXT], add_special_tokens=False)
    fast.compared.result(timeout=30)

    assert {EQUAL: 2} == fast.checks
    assert fast.is_on


def test_a_difference_at_run_time(same: tuple[FastIds, Same]) -> None:
    """The first one turns it off, and says so."""
    fast, library = same
    library.change = drop_one
    for _ in range(SAMPLED_EVERY):
        fast.encode([TEXT], add_special_tokens=False)
    fast.compared.result(timeout=30)

    assert {DIFFERENT: 1} == fast.checks
    assert fast.encode([TEXT], add_special_tokens=False) is None
    assert "other ids than the reference library's" in fast.difference


def test_closed_during_the_comparison(model: Model) -> None:
    """A replica that ends does not wait for all texts, and nothing is on afterwards."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Same):
        def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
            begun.set()
            go_on.wait()
            return super().encode_batch_flat(texts, add_special_tokens)

    fast = FastIds(model, lambda _: Slow(model))
    begun.wait()
    fast.close(wait=False)
    go_on.set()
    fast.compared.result(timeout=30)

    assert not fast.is_on


def test_a_tokenizer_with_it(tiny: Path, model: Model) -> None:
    """Texts of any length have the ids of the reference library; longer ones are encoded inline."""
    with Tokenizer.load(tiny, threads=1, cache=CacheSettings(), is_fast=True) as tokenizer:
        assert tokenizer.fast is not None
        tokenizer.fast.compared.result(timeout=30)
        for text in (TEXT, TEXT * 400, TEXT + "\u017f"):
            (found,) = tokenizer.encode_known_now([text], add_special_tokens=False)
            assert [list(found.ids)] == ids_of(model, [text])
        assert FAST_INLINE_CHARACTERS == tokenizer.inline_characters
        with pytest.raises(BadRequestError, match="not valid Unicode"):
            tokenizer.encode_now("\ud800", add_special_tokens=False)
        assert {} == tokenizer.fast.checks


def test_what_only_the_cache_can(tiny: Path) -> None:
    """--min-prefix-overlap-ratio needs the prefix cache, so the reference library serves then."""
    with Tokenizer.load(tiny, threads=1, cache=CacheSettings(enough=0.8), is_fast=True) as tokenizer:
        assert tokenizer.fast is None
        assert INLINE_CHARACTERS == tokenizer.inline_characters
