"""Answers in vLLM's JSON shapes: `vllm/entrypoints/openai/*/protocol.py`, 0.32.

Events of a stream omit fields that are not set; whole answers contain them as null.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from kvrouter.errors import BadRequestError, KvRouterError
from kvrouter.mocker.bodies import StreamOptions
from kvrouter.mocker.engine import EngineRequest, Output
from kvrouter.mocker.hashing import TokenIds
from kvrouter.mocker.rank import Mailbox
from kvrouter.mocker.text import Text

Json: TypeAlias = dict[str, Any]

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


def sse(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(data) + b"\n\n"


def error_body(error: KvRouterError) -> Json:
    """An error in the shape of vLLM's ErrorResponse."""
    param = error.param if isinstance(error, BadRequestError) else None
    return {"error": {"message": str(error), "type": error.type, "param": param, "code": error.status}}


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
    """The fields that all parts of one answer share."""

    id: str
    model: str
    created: int
    shows_token_ids: bool  # the client set `return_token_ids`

    @abstractmethod
    def opening(self, choice: Choice) -> Json | None:
        """The chunk before the first token; completions have none."""

    @abstractmethod
    def chunk(self, index: int, choice: Choice, text: str, token: int | None) -> Json:
        """One token of a stream, already part of `choice`."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice]) -> Json:
        """The answer to a request without `stream`."""

    @abstractmethod
    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        """The chunk after the last token, if `stream_options.include_usage` is set."""

    def ids(self, tokens: Sequence[int]) -> list[int] | None:
        """Token ids, if the client asked for them."""
        return list(tokens) if self.shows_token_ids else None


class ChatReply(Reply):
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

    def opening(self, choice: Choice) -> Json:
        """The role, with empty content."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk(
            [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}],
            prompt_token_ids=self.ids(choice.prompt),
        )

    def chunk(self, index: int, choice: Choice, text: str, token: int | None) -> Json:
        """A content delta."""
        data: Json = {
            "index": index,
            "delta": {"content": text},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason is not None:
            data["stop_reason"] = None
        data["token_ids"] = self.ids([] if token is None else [token])
        return self._chunk([data])

    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        """Usage and no choices."""
        return self._chunk([], usage=usage(choices, cached_tokens=choices[0].cached_tokens))

    def whole(self, choices: Sequence[Choice]) -> Json:
        """One message."""
        (choice,) = choices
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._whole_choice(choice)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": full_usage(choices),
            "prompt_logprobs": None,
            "prompt_token_ids": self.ids(choice.prompt),
            "prompt_text": None,
            "kv_transfer_params": None,
        }

    def _whole_choice(self, choice: Choice) -> Json:
        return {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "".join(choice.texts),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "token_ids": self.ids(choice.tokens),
        }


class CompletionReply(Reply):
    """/v1/completions."""

    def _head(self) -> Json:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def opening(self, choice: Choice) -> None:
        return

    def chunk(self, index: int, choice: Choice, text: str, token: int | None) -> Json:
        """A piece of text."""
        is_first = len(choice.tokens) == 1
        data = {
            "index": index,
            "text": text,
            "logprobs": None,
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
            "usage": usage(choices, cached_tokens=choices[0].cached_tokens),
        }

    def whole(self, choices: Sequence[Choice]) -> Json:
        """One choice for each prompt."""
        return {
            **self._head(),
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": full_usage(choices),
            "kv_transfer_params": None,
        }

    def _whole_choice(self, index: int, choice: Choice) -> Json:
        return {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "token_ids": self.ids(choice.tokens),
            "prompt_logprobs": None,
            "prompt_token_ids": self.ids(choice.prompt),
        }


def usage(choices: Sequence[Choice], *, cached_tokens: int | None = None) -> Json:
    """The UsageInfo of vLLM without null fields, over all prompts."""
    prompt_tokens = sum(len(choice.prompt) for choice in choices)
    completion_tokens = sum(len(choice.tokens) for choice in choices)
    counts: Json = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return counts


def full_usage(choices: Sequence[Choice]) -> Json:
    """The same in a whole answer; cached tokens are those of the last prompt, as in vLLM."""
    counts = usage(choices, cached_tokens=choices[-1].cached_tokens)
    counts["prompt_tokens_details"] |= {"created_cache_tokens": None, "multimodal_tokens": None}
    return {**counts, "completion_tokens_details": None}


class Run:
    """One request at work: turns outputs of the engine into pieces of the answer."""

    def __init__(self, requests: Sequence[EngineRequest], mailbox: Mailbox, reply: Reply, text: Text) -> None:
        self._choices = [Choice(request.prompt) for request in requests]
        self._index = {request.id: index for index, request in enumerate(requests)}
        self._mailbox = mailbox
        self._reply = reply
        self._text = text

    async def whole(self) -> Json:
        """The complete answer."""
        async for outputs in self._outputs():
            for output in outputs:
                self._add(output)
        return self._reply.whole(self._choices)

    async def stream(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """The answer as server-sent events. Outputs of one engine step are one piece."""
        is_open = False
        async for outputs in self._outputs():
            opening = b"" if is_open else self._opening(options)
            is_open = True
            yield opening + b"".join([sse(self._chunk(output, options)) for output in outputs])
        yield self._ending(options)

    async def _outputs(self) -> AsyncIterator[list[Output]]:
        """The outputs of each step, until every choice has ended."""
        unfinished = len(self._choices)
        while unfinished:
            outputs = await self._mailbox.take()
            unfinished -= sum(output.finish_reason is not None for output in outputs)
            yield outputs

    def _add(self, output: Output) -> tuple[int, str]:
        """Add an output to its choice; returns the choice's index and the text."""
        index = self._index[output.id]
        choice = self._choices[index]
        choice.finish_reason = output.finish_reason
        if output.token is None:
            return index, ""
        choice.cached_tokens = output.cached_tokens
        choice.tokens.append(output.token)
        choice.texts.append(self._text.of_token(output.token))
        return index, choice.texts[-1]

    def _opening(self, options: StreamOptions) -> bytes:
        chunk = self._reply.opening(self._choices[0])
        if chunk is None:
            return b""
        return sse(self._with_usage(chunk, self._choices[0], options))

    def _chunk(self, output: Output, options: StreamOptions) -> Json:
        index, text = self._add(output)
        choice = self._choices[index]
        return self._with_usage(self._reply.chunk(index, choice, text, output.token), choice, options)

    def _with_usage(self, chunk: Json, choice: Choice, options: StreamOptions) -> Json:
        if options.continuous_usage_stats and options.include_usage:
            chunk["usage"] = usage([choice])
        return chunk

    def _ending(self, options: StreamOptions) -> bytes:
        if not options.include_usage:
            return DONE
        return sse(self._reply.usage_chunk(self._choices)) + DONE
