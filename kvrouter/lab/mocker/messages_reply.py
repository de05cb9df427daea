"""Answers of /v1/messages in the shapes of vLLM 0.32: `vllm/entrypoints/anthropic/serving.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec.json import decode

from kvrouter.lab.mocker.replies import Choice, Json, Reply, encode

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}


def event(data: Json) -> bytes:
    """One server-sent event, named by its type."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), encode(data))


class MessagesReply(Reply):
    """A message with one block, text or the demanded call of a tool; before a text its reasoning, if any."""

    def start(self, choices: Sequence[Choice]) -> bytes:
        message = self._message([], None, {"input_tokens": len(choices[0].prompt), "output_tokens": 0})
        block = {"type": "thinking", "thinking": ""} if self.thinks else self._block("")
        return event({"type": "message_start", "message": message}) + _started(0, block)

    def piece(self, index: int, choice: Choice, text: str, token: int | None) -> bytes:
        if self.tool is not None or not text:
            return b""
        if not self.text_of(choice) and self.thinks:
            return _delta(0, {"type": "thinking_delta", "thinking": text})
        begun = self._ended(0) + _started(1, self._block("")) if self.begins_text(choice) else b""
        return begun + _delta(int(self.thinks > 0), {"type": "text_delta", "text": text})

    def end(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        is_call = self.tool is not None
        given = {"type": "input_json_delta", "partial_json": self.arguments}
        arguments = _delta(0, given) if is_call else b""
        stop = {"stop_reason": self._stop_reason(choice), "stop_sequence": None}
        return b"".join(
            (
                arguments,
                self._ended(int(bool(self.thinks and self.text_of(choice)))),
                event({"type": "message_delta", "delta": stop, "usage": _usage(choice)}),
                event({"type": "message_stop"}),
            )
        )

    def whole(self, choices: Sequence[Choice]) -> Json:
        (choice,) = choices
        content = [self._block(self.text_of(choice), decode(self.arguments))]
        if self.thinks:
            thought = {"type": "thinking", "thinking": self.thought(choice), "signature": self.id}
            content = [thought, *(content if self.text_of(choice) else [])]
        message = self._message(content, self._stop_reason(choice), _usage(choice))
        return message | self.handed_over(choices)

    def _message(self, content: list[Json], stop_reason: str | None, usage: Json) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.model,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": usage,
        }

    def _block(self, text: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> Json:
        if self.tool is not None:
            return {"type": "tool_use", "id": f"call_{self.id}", "name": self.tool, "input": dict(arguments)}
        return {"type": "text", "text": text}

    def _ended(self, index: int) -> bytes:
        """The block ends; one with reasoning has a signature."""
        is_thought = self.thinks and not index
        signed = _delta(index, {"type": "signature_delta", "signature": self.id}) if is_thought else b""
        return signed + event({"type": "content_block_stop", "index": index})

    def _stop_reason(self, choice: Choice) -> str | None:
        return _STOP_REASONS.get(self.reason(choice) or "")


def _started(index: int, block: Json) -> bytes:
    return event({"type": "content_block_start", "index": index, "content_block": block})


def _delta(index: int, delta: Json) -> bytes:
    return event({"type": "content_block_delta", "index": index, "delta": delta})


def _usage(choice: Choice) -> Json:
    """Cached tokens are not part of `input_tokens`."""
    return {
        "input_tokens": len(choice.prompt) - choice.cached_tokens,
        "output_tokens": len(choice.tokens),
        "cache_read_input_tokens": choice.cached_tokens,
    }
