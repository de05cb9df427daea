"""An engine whose tokens are the bytes of one long text, so that many of them are parts of a character.

The next token depends on how many there are, prompt included: whoever goes on with an answer, goes on with
the same text. As vLLM does, it shows no text of its prompt, not even the end of a character that begins
there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.frontend.workers import LAST_CHUNK, Received, Script, Wire, chunk

TEXT = "Grüße, 漢字 and 🎉 are here: naïve ☕ — “quotes”. ".encode()
DONE = b"data: [DONE]\n\n"


def save_tokenizer(directory: Path) -> Path:
    """A tokenizer whose token ids are bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text("{}")
    return directory


def text_of(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def prompt_of(body: Any) -> list[int]:
    """The ids of a prompt; a chat is its last message, and of several prompts it is the first."""
    prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    text = prompt if isinstance(prompt, str) else prompt[0]
    return list(text.encode()) if isinstance(text, str) else prompt


def events_of(received: Received, created: int) -> Iterator[bytes]:
    """The events of a stream, one for each token."""
    body, is_chat = received.json, b"/chat/" in received.head.split(b"\r\n")[0]
    prompt, shows = prompt_of(body), body.get("return_token_ids")
    ids, most = list(prompt), body.get("max_tokens") or 16
    (name,) = received.headers("x-request-id")
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    head = {"id": f"cmpl-{name}", "object": kind, "created": created, "model": body["model"]}

    def event(choices: list[Any], **more: Any) -> bytes:
        written = json.dumps(head | {"choices": choices} | more, separators=(",", ":"))
        return b"data: " + written.encode() + b"\n\n"

    if is_chat:
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield event([role], **({"prompt_token_ids": prompt} if shows else {}))
    shown = len(text_of(prompt))
    for number in range(1, most + 1):
        ids.append(TEXT[len(ids) % len(TEXT)])
        whole, is_last = text_of(ids), number == most
        new = whole[shown:] if is_last or not whole.endswith("\N{REPLACEMENT CHARACTER}") else ""
        shown += len(new)
        choice: Any = {"index": 0, "logprobs": None, "finish_reason": "length" if is_last else None}
        choice |= {"delta": {"content": new}} if is_chat else {"text": new}
        if shows:
            choice |= {"token_ids": ids[-1:]}
            choice |= {} if is_chat else {"prompt_token_ids": prompt if number == 1 else None}
        yield event([choice])
    if (body.get("stream_options") or {}).get("include_usage"):
        counts = {"prompt_tokens": len(prompt), "completion_tokens": most, "total_tokens": len(prompt) + most}
        yield event([], usage=counts)
    yield DONE


def whole_of(received: Received, created: int, *, is_chunked: bool = True) -> bytes:
    """The bytes of an answer."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    events = list(events_of(received, created))
    if not is_chunked:
        return head + b"connection: close\r\n\r\n" + b"".join(events)
    return head + b"transfer-encoding: chunked\r\n\r\n" + b"".join(map(chunk, events)) + LAST_CHUNK


def engine(created: int, *, is_chunked: bool = True) -> Script:
    """Answers to the end."""

    async def script(received: Received, wire: Wire) -> None:
        await wire.send(whole_of(received, created, is_chunked=is_chunked))
        if not is_chunked:
            wire.close()

    return script


def dying(
    created: int,
    at: int = 0,
    *,
    events: int = 0,
    piece: int = 1 << 20,
    first: int = 0,
    last: bytes = b"",
    is_chunked: bool = True,
    stalls: bool = False,
) -> Script:
    """Sends the first `at` bytes or `events` in pieces, then `last`; then it is killed, or hangs.

    `piece`: bytes of one; 0: one chunk of the answer each, behind `first` bytes.
    """

    async def script(received: Received, wire: Wire) -> None:
        data = whole_of(received, created, is_chunked=is_chunked)
        ends = [end.end() for end in re.finditer(rb"\n\n(\r\n)?", data)]
        data = data[: ends[events - 1] if events else at]
        pieces = [data[start : start + piece] for start in range(0, len(data), piece or 1)]
        if not piece:
            pieces = [one + b"\n\n\r\n" for one in data[first:].split(b"\n\n\r\n")]
            pieces = [data[:first], *pieces[:-1], pieces[-1].removesuffix(b"\n\n\r\n")]
        await wire.send(*pieces, *([last] if last else []))
        if stalls:
            await wire.until_left()
        elif is_chunked:
            wire.reset()
        else:
            wire.close()

    return script
