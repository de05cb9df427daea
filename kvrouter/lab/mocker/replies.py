"""Answers in vLLM's JSON shapes: `vllm/entrypoints/openai/*/protocol.py`, 0.32.

Events of a stream omit fields that are not set; whole answers contain them as null.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from kvrouter.lab.mocker.bodies import StreamOptions
from kvrouter.lab.mocker.engine import EngineRequest, Output
from kvrouter.lab.mocker.hashing import TokenIds
from kvrouter.lab.mocker.rank import Mailbox
from kvrouter.lab.mocker.text import Text

Json: TypeAlias = dict[str, Any]

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"

# Of every token: the mocker computes no probabilities.
LOGPROB = 0.0


def sse(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(data) + b"\n\n"


@dataclass(slots=True)
class Choice:
    """One answer, as far as it is generated."""

    prompt: TokenIds
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reply(ABC):
    """One answer in the shape of its API. The fields are those that all its parts share."""

    id: str
    model: str
    created: int
    shows_token_ids: bool = False  # the client set `return_token_ids`
    options: StreamOptions = StreamOptions()  # noqa: RUF009  it is frozen
    tool: str | None = None
    """The function that the client demands (`tool_choice`): it is called without arguments."""
    shows_logprobs: bool = False
    answers: int = 1
    """Choices for each prompt (`n`)."""

    @abstractmethod
    def start(self, choices: Sequence[Choice]) -> bytes:
        """The events before the first token."""

    @abstractmethod
    def piece(self, index: int, choice: Choice, text: str, token: int | None) -> bytes:
        """The events of one token of a stream, already part of `choice`."""

    @abstractmethod
    def end(self, choices: Sequence[Choice]) -> bytes:
        """The events after the last token."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice]) -> Json:
        """The answer to a request without `stream`."""

    def ids(self, tokens: Sequence[int]) -> list[int] | None:
        """Token ids, if the client asked for them."""
        return list(tokens) if self.shows_token_ids else None

    def reason(self, choice: Choice) -> str | None:
        """Why the choice ended: for a demanded call its end, unless it was cut off."""
        return "tool_calls" if self.tool and choice.finish_reason == "stop" else choice.finish_reason


class ChunkReply(Reply):
    """An answer whose events are chunks: usage comes on demand, and `[DONE]` last."""

    @abstractmethod
    def opening(self, index: int, choice: Choice) -> Json | None:
        """The chunk before the first token; completions have none."""

    @abstractmethod
    def chunk(self, index: int, choice: Choice, text: str, token: int | None) -> Json:
        """The chunk of one token."""

    @abstractmethod
    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        """The chunk after the last token, if `stream_options.include_usage` is set."""

    def start(self, choices: Sequence[Choice]) -> bytes:
        chunks = [(self.opening(index, choice), choice) for index, choice in enumerate(choices)]
        return b"".join(sse(self._with_usage(chunk, one)) for chunk, one in chunks if chunk is not None)

    def piece(self, index: int, choice: Choice, text: str, token: int | None) -> bytes:
        return sse(self._with_usage(self.chunk(index, choice, text, token), choice))

    def end(self, choices: Sequence[Choice]) -> bytes:
        return (sse(self.usage_chunk(choices)) if self.options.include_usage else b"") + DONE

    def _with_usage(self, chunk: Json, choice: Choice) -> Json:
        if self.options.continuous_usage_stats and self.options.include_usage:
            chunk["usage"] = usage([choice])
        return chunk


class ChatReply(ChunkReply):
    """/v1/chat/completions."""

    def _chunk(self, choices: list[Json], **more: object) -> Json:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }

    def opening(self, index: int, choice: Choice) -> Json:
        """The role, with empty content or the name of the function."""
        delta: Json = {"role": "assistant", "content": ""}
        if self.tool is not None:
            called = {"name": self.tool, "arguments": ""}
            delta["tool_calls"] = [
                {"index": 0, "id": f"call_{self.id}", "type": "function", "function": called}
            ]
        return self._chunk(
            [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}],
            prompt_token_ids=self.ids(choice.prompt),
        )

    def chunk(self, index: int, choice: Choice, text: str, token: int | None) -> Json:
        """A content delta."""
        data: Json = {
            "index": index,
            "delta": {"content": text} if self.tool is None else self._call_delta(choice),
            "logprobs": self._logprobs([text]),
            "finish_reason": self.reason(choice),
        }
        if choice.finish_reason is not None:
            data["stop_reason"] = None
        data["token_ids"] = self.ids([] if token is None else [token])
        return self._chunk([data])

    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        """Usage and no choices."""
        cached = choices[0].cached_tokens
        return self._chunk([], usage=usage(choices, cached_tokens=cached, answers=self.answers))

    def _call_delta(self, choice: Choice) -> Json:
        """The arguments come with the end of the answer."""
        if choice.finish_reason is None:
            return {}
        return {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}

    def _logprobs(self, texts: Sequence[str]) -> Json | None:
        if not self.shows_logprobs:
            return None
        return {"content": [token_logprob(text) for text in texts]}

    def whole(self, choices: Sequence[Choice]) -> Json:
        """One message."""
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": full_usage(choices, self.answers),
            "prompt_logprobs": None,
            "prompt_token_ids": self.ids(choices[0].prompt),
            "prompt_text": None,
            "kv_transfer_params": None,
        }

    def _whole_choice(self, index: int, choice: Choice) -> Json:
        called = {"id": f"call_{self.id}", "type": "function"}
        calls = [{**called, "function": {"name": self.tool, "arguments": "{}"}}] if self.tool else []
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": None if calls else "".join(choice.texts),
                **({"tool_calls": calls} if calls else {}),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": self._logprobs(choice.texts),
            "finish_reason": self.reason(choice),
            "stop_reason": None,
            "token_ids": self.ids(choice.tokens),
        }


class CompletionReply(ChunkReply):
    """/v1/completions."""

    def _head(self) -> Json:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def opening(self, index: int, choice: Choice) -> None:
        return

    def chunk(self, index: int, choice: Choice, text: str, token: int | None) -> Json:
        """A piece of text."""
        is_first = len(choice.tokens) == 1
        data = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs([text]),
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "prompt_token_ids": self.ids(choice.prompt) if is_first else None,
            "token_ids": self.ids([] if token is None else [token]),
        }
        return {**self._head(), "choices": [data]}

    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        """Usage and no choices; cached tokens are those of the first prompt, as in vLLM."""
        return {
            **self._head(),
            "choices": [],
            "usage": usage(choices, cached_tokens=choices[0].cached_tokens, answers=self.answers),
        }

    def _logprobs(self, texts: Sequence[str]) -> Json | None:
        if not self.shows_logprobs:
            return None
        return {
            "text_offset": [sum(map(len, texts[:number])) for number in range(len(texts))],
            "token_logprobs": [LOGPROB] * len(texts),
            "tokens": list(texts),
            "top_logprobs": [{text: LOGPROB} for text in texts],
        }

    def whole(self, choices: Sequence[Choice]) -> Json:
        """One choice for each prompt."""
        return {
            **self._head(),
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": full_usage(choices, self.answers),
            "kv_transfer_params": None,
        }

    def _whole_choice(self, index: int, choice: Choice) -> Json:
        return {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": self._logprobs(choice.texts),
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "token_ids": self.ids(choice.tokens),
            "prompt_logprobs": None,
            "prompt_token_ids": self.ids(choice.prompt),
        }


def token_logprob(text: str) -> Json:
    """One token of an answer in a chat: the only one that was possible."""
    return {"token": text, "logprob": LOGPROB, "bytes": list(text.encode()), "top_logprobs": []}


def usage(choices: Sequence[Choice], *, cached_tokens: int | None = None, answers: int = 1) -> Json:
    """The UsageInfo of vLLM without null fields, over all prompts. `answers`: choices for each prompt."""
    prompt_tokens = sum(len(choice.prompt) for choice in choices[::answers])
    completion_tokens = sum(len(choice.tokens) for choice in choices)
    counts: Json = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return counts


def full_usage(choices: Sequence[Choice], answers: int) -> Json:
    """The same in a whole answer; cached tokens are those of the last prompt, as in vLLM."""
    counts = usage(choices, cached_tokens=choices[-1].cached_tokens, answers=answers)
    counts["prompt_tokens_details"] |= {"created_cache_tokens": None, "multimodal_tokens": None}
    return {**counts, "completion_tokens_details": None}


class Run:
    """One request at work: turns outputs of the engine into pieces of the answer."""

    def __init__(self, requests: Sequence[EngineRequest], mailbox: Mailbox, reply: Reply, text: Text) -> None:
        self.choices = [Choice(request.prompt) for request in requests]
        self._index = {request.id: index for index, request in enumerate(requests)}
        self._mailbox = mailbox
        self._reply = reply
        self._text = text

    async def whole(self) -> Json:
        """The complete answer."""
        async for outputs in self._outputs():
            for output in outputs:
                self._add(output)
        return self._reply.whole(self.choices)

    async def stream(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events. Outputs of one engine step are one piece."""
        is_open = False
        async for outputs in self._outputs():
            opening = b"" if is_open else self._reply.start(self.choices)
            is_open = True
            yield opening + b"".join([self._piece(output) for output in outputs])
        yield self._reply.end(self.choices)

    async def _outputs(self) -> AsyncIterator[list[Output]]:
        """The outputs of each step, until every choice has ended."""
        unfinished = len(self.choices)
        while unfinished:
            outputs = await self._mailbox.take()
            unfinished -= sum(output.finish_reason is not None for output in outputs)
            yield outputs

    def _add(self, output: Output) -> tuple[int, str]:
        """Add an output to its choice; returns the choice's index and the text."""
        index = self._index[output.id]
        choice = self.choices[index]
        choice.finish_reason = output.finish_reason
        if output.token is None:
            return index, ""
        choice.cached_tokens = output.cached_tokens
        choice.tokens.append(output.token)
        choice.texts.append(self._text.of_token(output.token))
        return index, choice.texts[-1]

    def _piece(self, output: Output) -> bytes:
        index, text = self._add(output)
        return self._reply.piece(index, self.choices[index], text, output.token)
