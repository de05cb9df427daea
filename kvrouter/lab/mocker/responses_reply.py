"""Answers of /v1/responses in the shapes of vLLM 0.32: `vllm/entrypoints/openai/responses/protocol.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvrouter.lab.mocker.messages_reply import event
from kvrouter.lab.mocker.replies import Choice, Json, Reply, token_logprob


@dataclass(frozen=True, slots=True)
class ResponsesReply(Reply):
    """A response with one item: a message, or the demanded call of a function."""

    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Of the events of the stream, from 0 on."""

    def start(self, choices: Sequence[Choice]) -> bytes:
        response = self._response([], "in_progress", None)
        created = [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]
        item = {**self._item(choices[0], is_done=False), "status": "in_progress"}
        added = self._event("response.output_item.added", output_index=0, item=item)
        return b"".join([*created, added, self._part("added", "")])

    def piece(self, index: int, choice: Choice, text: str, token: int | None) -> bytes:
        if self.tool is not None or not text:
            return b""
        logprobs = [token_logprob(text)] if self.shows_logprobs else []
        return self._content("response.output_text.delta", delta=text, logprobs=logprobs)

    def end(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        text = "".join(choice.texts)
        if self.tool is None:
            done = self._content("response.output_text.done", text=text, logprobs=[])
        else:
            named = {"item_id": self._item_id, "output_index": 0}
            done = self._event("response.function_call_arguments.delta", **named, delta=self.arguments)
            kind = "response.function_call_arguments.done"
            done += self._event(kind, **named, arguments=self.arguments, name=self.tool)
        done += self._part("done", text)  # in this order: every event has the next number
        item = self._item(choice, is_done=True)
        item_done = self._event("response.output_item.done", output_index=0, item=item)
        response = self.whole(choices)
        ended = self._event(f"response.{response['status']}", response=response)
        return b"".join([done, item_done, ended])

    def whole(self, choices: Sequence[Choice]) -> Json:
        (choice,) = choices
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        response = self._response([self._item(choice, is_done=True)], status, _usage(choice))
        return response | self.handed_over(choices)

    @property
    def _item_id(self) -> str:
        return f"{'msg' if self.tool is None else 'fc'}_{self.id}"

    def _item(self, choice: Choice, *, is_done: bool) -> Json:
        if self.tool is not None:
            arguments = self.arguments if is_done else ""
            called = {"call_id": f"call_{self.id}", "name": self.tool, "arguments": arguments}
            return {"type": "function_call", "id": self._item_id, **called, "status": "completed"}
        text = "".join(choice.texts)
        logprobs = [token_logprob(one) for one in choice.texts] if self.shows_logprobs else None
        parts = [{"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}]
        return {
            "type": "message",
            "id": self._item_id,
            "role": "assistant",
            "status": "completed",
            "content": parts if is_done else [],
        }

    def _part(self, what: str, text: str) -> bytes:
        """The event that opens or closes the part with the text; calls have none."""
        if self.tool is not None:
            return b""
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return self._content(f"response.content_part.{what}", part=part)

    def _content(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        return event({"type": kind, "sequence_number": next(self.numbers), **fields})

    def _response(self, output: list[Json], status: str, usage: Json | None) -> Json:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "created_at": self.created,
            "incomplete_details": incomplete,
            "instructions": None,
            "metadata": None,
            "model": self.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "background": False,
            "status": status,
            "truncation": "disabled",
            "usage": usage,
            "user": None,
        }


def _usage(choice: Choice) -> Json:
    prompt, answer = len(choice.prompt), len(choice.tokens)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": choice.cached_tokens,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
        "total_tokens": prompt + answer,
    }
