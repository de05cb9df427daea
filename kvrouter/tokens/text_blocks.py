"""Routing by text, for models without a tokenizer: blocks of characters take the place of blocks of tokens.

    text    | 4 × block_size characters | 4 × block_size characters | rest
    hashes    s[0]                        s[1]

Engines publish hashes of tokens, which never match these. These hashes match only earlier requests in the
approximate index, and requests in flight.
"""

from __future__ import annotations

import json

from xxhash import xxh3_64_intdigest

from kvrouter.core.routing.policy import Prompt as HashedPrompt
from kvrouter.core.wire.hashes import block_seed, sequence_hashes
from kvrouter.core.wire.ids import BlockHash
from kvrouter.tokens.messages import as_string, conversation
from kvrouter.tokens.prompt import ChatPrompt, TextPrompt

# For English text. Other languages have fewer, so their prompts are estimated too short.
CHARACTERS_PER_TOKEN = 4

# Added to the seed, so that hashes of text never equal hashes of tokens.
_TEXT_SEED = xxh3_64_intdigest(b"text", 0)


def text_blocks(
    prompt: ChatPrompt | TextPrompt, block_size: int, *, lora_name: str | None, salt: str | None
) -> list[HashedPrompt]:
    """The hashes of each prompt's text, and its estimated length in tokens.

    Raises BadRequestError for malformed messages.
    """
    texts = prompt.texts if isinstance(prompt, TextPrompt) else [_chat_text(prompt)]
    seed = (block_seed(lora_name, salt) + _TEXT_SEED) % 2**64
    return [_hashed(text, block_size, seed) for text in texts]


def _hashed(text: str, block_size: int, seed: int) -> HashedPrompt:
    step = CHARACTERS_PER_TOKEN * block_size
    blocks = [text[start : start + step] for start in range(0, len(text) - step + 1, step)]
    hashes = [BlockHash(xxh3_64_intdigest(block.encode("utf-8", "surrogatepass"), seed)) for block in blocks]
    isl = max(1, len(text) // CHARACTERS_PER_TOKEN)
    return HashedPrompt(sequence_hashes(hashes), isl, True, block_size, is_text=True)


def _chat_text(prompt: ChatPrompt) -> str:
    """Tools, then messages: the order in which most templates print them."""
    messages = conversation(prompt.messages, as_string)
    return "\n".join([*map(_dump, prompt.tools or ()), *map(_message_text, messages)])


def _message_text(message: dict[str, object]) -> str:
    more = {name: value for name, value in message.items() if name not in {"role", "content"}}
    return f"{message['role']}\n{message['content']}\n{_dump(more) if more else ''}"


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
