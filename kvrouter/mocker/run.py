"""One HTTP request at work: outputs of the engine become pieces of the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvrouter.mocker.bodies import StreamOptions
from kvrouter.mocker.engine import EngineRequest, Output
from kvrouter.mocker.rank import Mailbox
from kvrouter.mocker.replies import DONE, Choice, Json, Reply, sse, usage
from kvrouter.mocker.text import Text


class Run:
    """The prompts of one request, each with the answer it has so far."""

    def __init__(self, requests: Sequence[EngineRequest], mailbox: Mailbox, reply: Reply, text: Text) -> None:
        self._choices = [Choice(request.prompt) for request in requests]
        self._index = {request.id: index for index, request in enumerate(requests)}
        self._mailbox = mailbox
        self._reply = reply
        self._text = text

    async def whole(self) -> Json:
        """The answer, when all of it is there."""
        async for outputs in self._outputs():
            for output in outputs:
                self._add(output)
        return self._reply.whole(self._choices)

    async def stream(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """The answer as server-sent events: what came at once goes out at once."""
        is_open = False
        async for outputs in self._outputs():
            opening = b"" if is_open else self._opening(options)
            is_open = True
            yield opening + b"".join([sse(self._chunk(output, options)) for output in outputs])
        yield self._ending(options)

    async def _outputs(self) -> AsyncIterator[list[Output]]:
        """Until every choice has ended."""
        unfinished = len(self._choices)
        while unfinished:
            outputs = await self._mailbox.take()
            unfinished -= sum(output.finish_reason is not None for output in outputs)
            yield outputs

    def _add(self, output: Output) -> tuple[int, str]:
        """Take an output in; returns its choice's index and its text."""
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
