"""Text for the simulated model, which knows only token ids: the tokenizer of a model directory.

Answers consist of whole words, ` like these`, that the tokenizer turns back into the same tokens. So a client
that sends an answer back in its next turn hits its blocks in the cache, as with a real model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvrouter.errors import BadRequestError
from kvrouter.lab.mocker.answers import Vocabulary
from kvrouter.lab.mocker.hashing import EnginePrompt, token_ids
from kvrouter.tokens.media import VisionModel
from kvrouter.tokens.prompt import Prompt, PromptEncoder, has_media
from kvrouter.tokens.template import ChatTemplate
from kvrouter.tokens.tokenizer import Tokenizer

# Only the first ids are searched for words: in most vocabularies they are the most frequent tokens.
SCANNED_IDS = 16_384

_WORD = re.compile(r" [a-z]+")
# Decoded in front of a token, because some tokenizers drop a leading space.
_ANCHOR = " the"


@dataclass(frozen=True, slots=True)
class Text:
    """How text becomes tokens and tokens become text."""

    encoder: PromptEncoder
    vocabulary: Vocabulary
    of_token: Callable[[int], str]
    model: str = ""
    """The model's name in the hashes of images, as in vLLM: the directory it was loaded from."""

    @classmethod
    @contextmanager
    def load(cls, model_path: Path | None) -> Iterator[Text]:
        """Read a model directory; without one, only prompts of token ids can be served."""
        if model_path is None:
            yield cls(PromptEncoder.load(None), Vocabulary(), lambda token: f" t{token}")
            return
        tokenizer = Tokenizer.load(model_path)
        template, vision = ChatTemplate.load(model_path), VisionModel.load(model_path)
        with PromptEncoder(tokenizer, template, vision) as encoder:
            words = spoken_words(tokenizer)
            vocabulary = Vocabulary(tuple(words), end=_end_token(model_path))
            yield cls(encoder, vocabulary, lambda token: words.get(token, ""), str(model_path))

    async def encode(self, prompt: Prompt) -> list[EnginePrompt]:
        """Each prompt as token ids. Raises BadRequestError without a tokenizer.

        An image becomes as many tokens as in vLLM, if the model is of a kind that tokens/media.py knows.
        """
        model = self.model if has_media(prompt) else None
        encoded = await self.encoder.encode_known(prompt, may_estimate=False, engine_model=model)
        if encoded is None:
            raise BadRequestError(
                "this mocker has no tokenizer: send token ids as the prompt of /v1/completions, "
                "or start it with --model-path"
            )
        return [EnginePrompt(token_ids(each.ids), each.media) for each in encoded]


def spoken_words(tokenizer: Tokenizer) -> dict[int, str]:
    """The tokens that are one word after a space and survive a round trip: token -> text.

    A tokenizer without such words (of characters, of bytes, of another script) gets all tokens that have a
    text, although that text may be encoded differently; if there are none, token 0 with an empty text.
    """
    anchor = tokenizer.encode_now(_ANCHOR, add_special_tokens=False)
    start = len(tokenizer.decode(anchor))
    texts = {
        token: tokenizer.decode([*anchor, token])[start:]
        for token in range(min(SCANNED_IDS, tokenizer.vocabulary_size))
    }
    words = {token: text for token, text in texts.items() if _WORD.fullmatch(text)}
    # A token may decode to a word that the tokenizer splits differently: such a token would miss the cache.
    again = tokenizer.encode_all_now([_ANCHOR + text for text in words.values()], add_special_tokens=False)
    spoken = {
        token: text
        for (token, text), ids in zip(words.items(), again, strict=True)
        if ids == [*anchor, token]
    }
    return spoken or {token: text for token, text in texts.items() if text} or {0: ""}


def _end_token(model_path: Path) -> int:
    """`eos_token_id` of generation_config.json, the first if there are several; 0 if it has none."""
    file = model_path / "generation_config.json"
    named = json.loads(file.read_text("utf-8")).get("eos_token_id") if file.is_file() else None
    return int((named[0] if isinstance(named, list) else named) or 0)
