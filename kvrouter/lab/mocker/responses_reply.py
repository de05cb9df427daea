"""Answers of /v1/responses in the shapes of vLLM 0.32: `vllm/entrypoints/openai/responses/protocol.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvrouter.lab.mocker.messages_reply import event
from kvrouter.lab.mocker.replies import Choice, Json, Reply, token_logprob


@dataclass(frozen=True, slots=True)
class ResponsesReply(Reply):
    """A response with one item, a message or the demanded call; before a message its reasoning, if any."""

    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Of the events of the stream, from 0 on."""

    def start(self, choices: Sequence[Choice]) -> bytes:
        response = self._response([], "in_progress", None)
        created = [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]
        return b"".join([*created, self._opened(choices[0], is_thought=bool(self.thinks))])

    def piece(self, index: int, choice: Choice, text: str, token: int | None) -> bytes:
        if self.tool is not None or not text:
            return b""
        if not self.text_of(choice) and self.thinks:
            return self._content("response.reasoning_text.delta", is_thought=True, delta=text)
        begun = b""
        if self.begins_text(choice):
            begun = self._closed(choice, is_thought=True) + self._opened(choice, is_thought=False)
        logprobs = [token_logprob(text)] if self.shows_logprobs else []
        return begun + self._content("response.output_text.delta", delta=text, logprobs=logprobs)

    def end(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        is_thought = bool(self.thinks) and not self.text_of(choice)
        closed = self._closed(choice, is_thought=is_thought)  # in this order: each event has the next number
        response = self.whole(choices)
        return closed + self._event(f"response.{response['status']}", response=response)

    def whole(self, choices: Sequence[Choice]) -> Json:
        (choice,) = choices
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        output = [self._item(choice, is_thought=True)] if self.thinks else []
        if not self.thinks or self.text_of(choice):
            output.append(self._item(choice))
        return self._response(output, status, self._usage(choice)) | self.handed_over(choices)

    def _opened(self, choice: Choice, *, is_thought: bool) -> bytes:
        """An item begins."""
        item = {**self._item(choice, is_thought=is_thought, is_done=False), "status": "in_progress"}
        at = self._named(is_thought=is_thought)["output_index"]
        added = self._event("response.output_item.added", output_index=at, item=item)
        return added + self._part("added", "", is_thought=is_thought)

    def _closed(self, choice: Choice, *, is_thought: bool) -> bytes:
        """It is complete."""
        named = self._named(is_thought=is_thought)
        text = self.thought(choice) if is_thought else self.text_of(choice)
        if is_thought:
            done = self._content("response.reasoning_text.done", is_thought=True, text=text)
        elif self.tool is None:
            done = self._content("response.output_text.done", text=text, logprobs=[])
        else:
            done = self._event("response.function_call_arguments.delta", **named, delta=self.arguments)
            kind = "response.function_call_arguments.done"
            done += self._event(kind, **named, arguments=self.arguments, name=self.tool)
        done += self._part("done", text, is_thought=is_thought)
        item, at = self._item(choice, is_thought=is_thought), named["output_index"]
        return done + self._event("response.output_item.done", output_index=at, item=item)

    def _named(self, *, is_thought: bool = False) -> Json:
        """By which its events name an item: the reasoning is the first one."""
        kind = "rs" if is_thought else "msg" if self.tool is None else "fc"
        return {"item_id": f"{kind}_{self.id}", "output_index": int(bool(self.thinks) and not is_thought)}

    def _item(self, choice: Choice, *, is_thought: bool = False, is_done: bool = True) -> Json:
        item_id = self._named(is_thought=is_thought)["item_id"]
        if is_thought:
            content = [{"type": "reasoning_text", "text": self.thought(choice)}]
            more = {"content": content} if is_done else {}
            return {"type": "reasoning", "id": item_id, "summary": [], **more, "status": "completed"}
        if self.tool is not None:
            arguments = self.arguments if is_done else ""
            called = {"call_id": f"call_{self.id}", "name": self.tool, "arguments": arguments}
            return {"type": "function_call", "id": item_id, **called, "status": "completed"}
        texts = choice.texts[self.thinks :]
        logprobs = [token_logprob(one) for one in texts] if self.shows_logprobs else None
        parts = [{"type": "output_text", "text": "".join(texts), "annotations": [], "logprobs": logprobs}]
        return {
            "type": "message",
            "id": item_id,
            "role": "assistant",
            "status": "completed",
            "content": parts if is_done else [],
        }

    def _part(self, what: str, text: str, *, is_thought: bool) -> bytes:
        """The event that opens or closes the part with the text; calls have none."""
        if self.tool is not None:
            return b""
        part: Json = {"type": "reasoning_text", "text": text}
        if not is_thought:
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return self._content(f"response.content_part.{what}", is_thought=is_thought, part=part)

    def _content(self, kind: str, *, is_thought: bool = False, **fields: object) -> bytes:
        return self._event(kind, **self._named(is_thought=is_thought), content_index=0, **fields)

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

    def _usage(self, choice: Choice) -> Json:
        prompt, answer = len(choice.prompt), len(choice.tokens)
        thought = min(self.thinks, answer)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": choice.cached_tokens,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": thought, "tool_output_tokens": 0},
            "total_tokens": prompt + answer,
        }
