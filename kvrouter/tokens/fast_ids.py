"""fastokens beside the library `tokenizers`, for the same ids in a twentieth of the time.

    load ──> texts by both, in a thread ──another id, an exception──> off, with the reason
                 │ all are equal: on
    text ──> has U+017F ───> not here: the reference library encodes it
          ├─> exception ───> not here, counted
          └─> ids ──1 of SAMPLED_EVERY──> by the reference too, in the thread ──another id──> off

vLLM, SGLang and Dynamo take the same library (`--tokenizer-backend fastokens`). It reads BPE only and refuses
other models at load. Over 595,129 texts and seven vocabularies four had other ids: patterns of o200k, where
U+017F, which folds to `s`, stands in a row of contractions.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import random
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import structlog
import tokenizers

from kvrouter.tokens.prefix_tokens import trial_texts

log = structlog.get_logger()

# Texts compared at load besides those of added tokens; 0.5 s of a background thread for most vocabularies.
TRIALS = 1500
# Added tokens in one text of the trial: some vocabularies have a thousand.
_ADDED_PER_TEXT = 4
# One long text: the library cuts these for threads of its own.
_LONG_CHARACTERS = 200_000
SAMPLED_EVERY = 1000
# Texts that wait for their comparison. More are not compared: clients must not fill memory with them.
_MOST_SAMPLES = 4
_KNOWN_DIFFERENCE = "\u017f"
EQUAL, DIFFERENT, FAILED = "equal", "different", "failed"
RESULTS = (EQUAL, DIFFERENT, FAILED)


class Library(Protocol):
    """What is used of `fastokens.Tokenizer`."""

    def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
        """Ids of all texts as uint32, and where each text's begin as uint64, and their end."""
        ...


class FastIds:
    """The fast library for one tokenizer, once it was compared. Thread-safe. Close it with `close`."""

    def __init__(self, reference: tokenizers.Tokenizer, read: Callable[[str], Library] | None = None) -> None:
        """Begins to compare, in a thread. `read`: makes the library of a tokenizer.json; None: fastokens."""
        self._reference = reference
        self._read = read or _read_fastokens
        self._library: Library | None = None
        self._turns = itertools.count(1)  # its next() is atomic, unlike +=
        self._samples = 0
        self._is_closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fastokens")
        self.off_because = "it is being compared with the reference library"
        """Why the reference library encodes; empty: this one does."""
        self.difference = ""
        """What turned it off after it was on."""
        self.checks: Counter[str] = Counter()
        """Texts whose ids were compared while it was on, or that raised an exception; by one of RESULTS."""
        self.compared = self._thread.submit(self._compare_at_load)
        """The latest comparison: done when it is."""

    @property
    def is_on(self) -> bool:
        return self._library is not None

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[array[int]] | None:
        """The ids of each text; None: the reference library has to encode them."""
        library = self._library
        if library is None or any(_KNOWN_DIFFERENCE in text for text in texts):
            return None
        try:
            found = _ids(library, texts, add_special_tokens)
        except UnicodeEncodeError:
            return None  # half a surrogate pair: the reference library refuses it, too
        except BaseException as error:
            if not _is_of_library(error):
                raise
            self.checks[FAILED] += 1
            log.warning("tokens.fastokens_failed", error=str(error)[:200], effect="slower for this text")
            return None
        if next(self._turns) % SAMPLED_EVERY == 0 and self._samples < _MOST_SAMPLES and not self._is_closing:
            self._samples += 1
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self.compared = self._thread.submit(
                    self._compare_sample, texts[0], add_special_tokens, found[0]
                )
        return found

    def close(self, *, wait: bool = True) -> None:
        """Compare no more. `wait`: for the comparison of one text, at most."""
        self._is_closing = True
        self._thread.shutdown(wait=wait, cancel_futures=True)

    def _compare_at_load(self) -> None:
        try:
            library = self._read(self._reference.to_str())
            different = next((text for text in self._trials() if not self._is_equal(library, text)), None)
        except ImportError:
            self.off_because = "fastokens is not installed (pip install 'kvrouter[fast]')"
            return
        except BaseException as error:
            if not _is_of_library(error):
                raise
            self.off_because = f"{type(error).__name__}: {error}"[:300]
        else:
            if different is None:
                self.off_because, self._library = "", library
                return
            self.off_because = f"other ids than the reference library's for {different[:100]!r}"
        if not self._is_closing:
            log.warning("tokens.fastokens_off", reason=self.off_because, effect="tokenizing takes longer")

    def _is_equal(self, library: Library, text: str) -> bool:
        """Whether both have the same ids; False if there is no time for it any more."""
        return not self._is_closing and all(
            _ids(library, [text], add)[0].tolist() == self._by_reference(text, add) for add in (False, True)
        )

    def _trials(self) -> Iterator[str]:
        """Each added token whole, cut, doubled; texts of the vocabulary and odd ones; a long one."""
        added = [token.content for token in self._reference.get_added_tokens_decoder().values()]
        for at in range(0, len(added), _ADDED_PER_TEXT):
            some = added[at : at + _ADDED_PER_TEXT]
            yield "".join(f"a{one}b {one}{one} {one[:-1]} {one[1:]}\n" for one in some)
        rng = random.Random(0)  # the same texts at every start, so that a difference can be reproduced
        texts = list(itertools.islice(trial_texts(self._reference, rng), TRIALS))
        texts = [text for text in texts if _KNOWN_DIFFERENCE not in text]
        yield from texts
        whole = "".join(texts)
        yield (whole * (_LONG_CHARACTERS // (len(whole) or 1) + 1))[:_LONG_CHARACTERS]

    def _compare_sample(self, text: str, add_special_tokens: bool, ids: array[int]) -> None:
        self._samples -= 1  # in this thread only, and `encode` may count one too many
        if ids.tolist() == self._by_reference(text, add_special_tokens):
            self.checks[EQUAL] += 1
            return
        self.checks[DIFFERENT] += 1
        self._library = None
        self.difference = self.off_because = (
            f"a prompt of {len(text)} characters has other ids than the reference library's"
        )
        log.error("tokens.fastokens_differs", reason=self.difference, effect="it is off until a restart")

    def _by_reference(self, text: str, add_special_tokens: bool) -> list[int]:
        (found,) = self._reference.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids


def _ids(library: Library, texts: Sequence[str], add_special_tokens: bool) -> list[array[int]]:
    flat, bounds = library.encode_batch_flat([*texts], add_special_tokens)
    ids = array("I", flat)
    if len(texts) == 1:
        return [ids]
    ends = array("Q", bounds)
    return [ids[start:end] for start, end in itertools.pairwise(ends)]


def _is_of_library(error: BaseException) -> bool:
    """A panic in Rust is no Exception, so that nobody catches it by chance. It ends one call only."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _read_fastokens(tokenizer_json: str) -> Library:
    """Raises ImportError without the package, ValueError for a model that it does not read."""
    # Its own threads gain nothing here, and take cores from other processes (measured on two cores).
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    if sys.byteorder != "little":
        raise ValueError("its ids are little-endian")
    library: Any = importlib.import_module("fastokens")
    tokenizer: Library = library.Tokenizer.from_json_str(tokenizer_json)
    return tokenizer
