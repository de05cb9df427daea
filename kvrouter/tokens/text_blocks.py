"""Routing by text, for models without a tokenizer: blocks of characters take the place of blocks of tokens.

    text    | 4 × block_size characters | 4 × block_size characters | rest
    hashes    s[0]                        s[1]

What an engine announces are hashes of tokens, so these match none of it: they only meet what was assumed
after earlier requests (the approximate index), and requests in flight.
"""

from __future__ import annotations

import json

from xxhash import xxh3_64_intdigest

from kvrouter.core.routing.cost import Prompt as HashedPrompt
from kvrouter.core.wire.hashes import block_seed, sequence_hashes
from kvrouter.core.wire.ids import BlockHash
from kvrouter.tokens.messages import as_string, conversation
from kvrouter.tokens.prompt import ChatPrompt, TextPrompt

# English text; other languages have fewer, and are charged too little.
CHARACTERS_PER_TOKEN = 4

# Keeps these hashes apart from those of tokens.
_TEXT_SEED = xxh3_64_intdigest(b"text", 0)


def text_blocks(
    prompt: ChatPrompt | TextPrompt, block_size: int, *, lora_name: str | None, salt: str | None
) -> list[HashedPrompt]:
    """The hashes of each prompt's text, and its length in tokens, estimated.

    Raises BadRequestError for messages that are none.
    """
    texts = prompt.texts if isinstance(prompt, TextPrompt) else [_chat_text(prompt)]
    seed = (block_seed(lora_name, salt) + _TEXT_SEED) % 2**64
    return [_hashed(text, block_size, seed) for text in texts]


def _hashed(text: str, block_size: int, seed: int) -> HashedPrompt:
    step = CHARACTERS_PER_TOKEN * block_size
    blocks = [text[start : start + step] for start in range(0, len(text) - step + 1, step)]
    hashes = [BlockHash(xxh3_64_intdigest(block.encode("utf-8", "surrogatepass"), seed)) for block in blocks]
    isl = max(1, len(text) // CHARACTERS_PER_TOKEN)
    return HashedPrompt(sequence_hashes(hashes), isl, is_estimate=True, block_size=block_size)


def _chat_text(prompt: ChatPrompt) -> str:
    """What a template would turn into a prompt, in the order in which most of them do."""
    messages = conversation(prompt.messages, as_string)
    return "\n".join([*map(_json, prompt.tools or ()), *map(_message_text, messages)])


def _message_text(message: dict[str, object]) -> str:
    more = {name: value for name, value in message.items() if name not in {"role", "content"}}
    return f"{message['role']}\n{message['content']}\n{_json(more) if more else ''}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
