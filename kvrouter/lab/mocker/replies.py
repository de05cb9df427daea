"""Answers in vLLM's JSON shapes: `vllm/entrypoints/openai/*/protocol.py`, 0.32.

Events of a stream omit fields that are not set; whole answers contain them as null.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from kvrouter.lab.mocker.bodies import StreamOptions
from kvrouter.lab.mocker.engine import EngineOutput, EngineRequest
from kvrouter.lab.mocker.fitting import vector
from kvrouter.lab.mocker.hashing import EnginePrompt, TokenIds
from kvrouter.lab.mocker.rank import Mailbox
from kvrouter.lab.mocker.text import Text

Json: TypeAlias = dict[str, Any]

encode = msgspec.json.Encoder().encode

# The parameters for the decode engine, of the request with this number.
Lend: TypeAlias = Callable[[int], Json | None]

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
    kv_transfer_params: Json | None = None
    """What the decode engine gets to know, once the choice has ended."""


@dataclass(frozen=True, slots=True)
class Reply(ABC):
    """One answer in the shape of its API. The fields are those that all its parts share."""

    id: str
    model: str
    created: int
    shows_token_ids: bool = False  # the client set `return_token_ids`
    options: StreamOptions = StreamOptions()  # noqa: RUF009  it is frozen
    tool: str | None = None
    """The function that the client demands (`tool_choice`)."""
    arguments: str = "{}"
    """What it is called with, as JSON."""
    said: Sequence[str] = ()
    """The text, by token, if it is not words of the vocabulary."""
    thinks: int = 0
    """Tokens of reasoning before the text."""
    shows_logprobs: bool = False
    answers: int = 1
    """Choices for each prompt (`n`)."""

    def thought(self, choice: Choice) -> str:
        """Its reasoning, as far as it is generated."""
        return "".join(choice.texts[: self.thinks])

    def text_of(self, choice: Choice) -> str:
        """Its text, without the reasoning."""
        return "".join(choice.texts[self.thinks :])

    def begins_text(self, choice: Choice) -> bool:
        """Whether its latest token is the first with text, behind reasoning."""
        return self.thinks > 0 and not any(choice.texts[self.thinks : -1])

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

    def handed_over(self, choices: Sequence[Choice]) -> Json:
        """`kv_transfer_params` of an answer that omits what is not set."""
        params = choices[0].kv_transfer_params
        return {} if params is None else {"kv_transfer_params": params}

    def ids(self, tokens: Sequence[int]) -> list[int] | None:
        """Token ids, if the client asked for them."""
        return list(tokens) if self.shows_token_ids else None

    def reason(self, choice: Choice) -> str | None:
        """Why the choice ended: for a demanded call its end, unless it was cut off."""
        return "tool_calls" if self.tool and choice.finish_reason == "stop" else choice.finish_reason


class ChunkReply(Reply):
    """An answer whose events are chunks: usage comes on demand, and `[DONE]` last."""

    object = chunk_object = "text_completion"

    @abstractmethod
    def part(self, index: int, choice: Choice, text: str, token: int | None) -> Json:
        """The choice in the chunk of one token."""

    @abstractmethod
    def whole_choice(self, index: int, choice: Choice) -> Json:
        """The choice in a whole answer."""

    @abstractmethod
    def all_logprobs(self, texts: Sequence[str]) -> Json:
        """The logprobs of tokens."""

    def start(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def piece(self, index: int, choice: Choice, text: str, token: int | None) -> bytes:
        return self.chunk(choice, self.part(index, choice, text, token), **self.handed_over([choice]))

    def end(self, choices: Sequence[Choice]) -> bytes:
        """Cached tokens are those of the first prompt, as in vLLM."""
        counts = usage(choices, cached_tokens=choices[0].cached_tokens, answers=self.answers)
        last = sse({**self._head(self.chunk_object), "choices": [], "usage": counts})
        return (last if self.options.include_usage else b"") + DONE

    def whole(self, choices: Sequence[Choice]) -> Json:
        return {
            **self._head(self.object),
            "choices": [self.whole_choice(index, choice) for index, choice in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": full_usage(choices, self.answers),
            **self.whole_more(choices),
            "kv_transfer_params": choices[0].kv_transfer_params,
        }

    def whole_more(self, choices: Sequence[Choice]) -> Json:
        """What else a whole answer has."""
        return {}

    def chunk(self, choice: Choice, part: Json, **more: Any) -> bytes:
        """The event with one choice."""
        data = {**self._head(self.chunk_object), "choices": [part], **more}
        if self.options.continuous_usage_stats and self.options.include_usage:
            data["usage"] = usage([choice])
        return sse(data)

    def logprobs(self, texts: Sequence[str]) -> Json | None:
        return self.all_logprobs(texts) if self.shows_logprobs else None

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class ChatReply(ChunkReply):
    """/v1/chat/completions."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def start(self, choices: Sequence[Choice]) -> bytes:
        """Of each choice the role, with empty content or the name of the function."""
        delta: Json = {"role": "assistant", "content": ""}
        if self.tool is not None:
            delta["tool_calls"] = [{"index": 0, **self._call("")}]
        parts = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(len(choices))
        ]
        return b"".join(
            self.chunk(choice, part, prompt_token_ids=self.ids(choice.prompt))
            for choice, part in zip(choices, parts, strict=True)
        )

    def part(self, index: int, choice: Choice, text: str, token: int | None) -> Json:
        delta: Json = {"content" if len(choice.tokens) > self.thinks else "reasoning": text}
        if self.tool is not None:  # the arguments come with the end of the answer
            is_last = choice.finish_reason is not None
            called = {"index": 0, "function": {"arguments": self.arguments}}
            delta = {"tool_calls": [called]} if is_last else {}
        return {
            "index": index,
            "delta": delta,
            "logprobs": self.logprobs([text]),
            "finish_reason": self.reason(choice),
            **({} if choice.finish_reason is None else {"stop_reason": None}),
            "token_ids": self.ids([] if token is None else [token]),
        }

    def all_logprobs(self, texts: Sequence[str]) -> Json:
        return {"content": [token_logprob(text) for text in texts]}

    def whole_more(self, choices: Sequence[Choice]) -> Json:
        ids = self.ids(choices[0].prompt)
        return {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}

    def whole_choice(self, index: int, choice: Choice) -> Json:
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": None if self.tool else self.text_of(choice),
                **({"tool_calls": [self._call(self.arguments)]} if self.tool else {}),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": self.thought(choice) or None,
            },
            "logprobs": self.logprobs(choice.texts),
            "finish_reason": self.reason(choice),
            "stop_reason": None,
            "token_ids": self.ids(choice.tokens),
        }

    def _call(self, arguments: str) -> Json:
        called = {"name": self.tool, "arguments": arguments}
        return {"id": f"call_{self.id}", "type": "function", "function": called}


class CompletionReply(ChunkReply):
    """/v1/completions."""

    def part(self, index: int, choice: Choice, text: str, token: int | None) -> Json:
        is_first = len(choice.tokens) == 1
        return {
            "index": index,
            "text": text,
            "logprobs": self.logprobs([text]),
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "prompt_token_ids": self.ids(choice.prompt) if is_first else None,
            "token_ids": self.ids([] if token is None else [token]),
        }

    def all_logprobs(self, texts: Sequence[str]) -> Json:
        return {
            "text_offset": [sum(map(len, texts[:number])) for number in range(len(texts))],
            "token_logprobs": [LOGPROB] * len(texts),
            "tokens": list(texts),
            "top_logprobs": [{text: LOGPROB} for text in texts],
        }

    def whole_choice(self, index: int, choice: Choice) -> Json:
        return {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": self.logprobs(choice.texts),
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


def embedded(prompts: Sequence[EnginePrompt], model: str, dimensions: int, *, is_packed: bool) -> Json:
    """The answer of /v1/embeddings. `is_packed`: in base64."""
    vectors = [vector(prompt.tokens, dimensions) for prompt in prompts]
    shown = [b64encode(one.tobytes()).decode() if is_packed else one.tolist() for one in vectors]
    data = [{"index": n, "object": "embedding", "embedding": one} for n, one in enumerate(shown)]
    counts = usage([Choice(prompt.tokens) for prompt in prompts])
    return {"object": "list", "model": model, "data": data, "usage": counts}


def full_usage(choices: Sequence[Choice], answers: int) -> Json:
    """The same in a whole answer; cached tokens are those of the last prompt, as in vLLM."""
    counts = usage(choices, cached_tokens=choices[-1].cached_tokens, answers=answers)
    counts["prompt_tokens_details"] |= {"created_cache_tokens": None, "multimodal_tokens": None}
    return {**counts, "completion_tokens_details": None}


class ReplyRun:
    """One request at work: turns outputs of the engine into pieces of the answer."""

    def __init__(
        self, requests: Sequence[EngineRequest], mailbox: Mailbox, reply: Reply, text: Text, lend: Lend
    ) -> None:
        """`lend` makes the parameters of a hand-over when a request has ended."""
        self._lend = lend
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

    async def _outputs(self) -> AsyncIterator[list[EngineOutput]]:
        """The outputs of each step, until every choice has ended."""
        unfinished = len(self.choices)
        while unfinished:
            outputs = await self._mailbox.take()
            unfinished -= sum(output.finish_reason is not None for output in outputs)
            yield outputs

    def _add(self, output: EngineOutput) -> tuple[int, str]:
        """Add an output to its choice; returns the choice's index and the text."""
        index = self._index[output.id]
        choice = self.choices[index]
        choice.finish_reason = output.finish_reason
        if output.token is None:
            return index, ""
        choice.cached_tokens = output.cached_tokens
        if output.finish_reason is not None and (params := self._lend(index)) is not None:
            cached = {"remote_prefill_cached_tokens": output.cached_tokens}
            choice.kv_transfer_params = params | cached
        choice.tokens.append(output.token)
        said, place = self._reply.said, len(choice.tokens) - 1 - self._reply.thinks
        if said and place == len(said) - 1:  # it is whole, so it is not cut off by `max_tokens`
            choice.finish_reason = output.finish_reason and "stop"
        choice.texts.append(said[place] if said and place >= 0 else self._text.of_token(output.token))
        return index, choice.texts[-1]

    def _piece(self, output: EngineOutput) -> bytes:
        index, text = self._add(output)
        return self._reply.piece(index, self.choices[index], text, output.token)
