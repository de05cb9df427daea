"""Chats of gpt-oss in OpenAI's Harmony format, as the chat route of vLLM 0.33 writes them.

    system message       identity, date, effort
    developer message    the instructions of a leading system or developer message, and the tools
    messages             reasoning in the channel analysis, calls and their results in commentary

The format and its vocabulary are those of the package oss-harmony, which vLLM uses. The vocabulary is in the
package: the older openai-harmony would download it.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from threading import Lock
from typing import Any, NamedTuple, Self

import msgspec
from xxhash import xxh3_128_digest

from kvrouter.errors import BadRequestError
from kvrouter.tokens.messages import Message

_HEADER = re.compile(r"assistant<\|channel\|>(.+?) to=(.+) <\|constrain\|>(.+)")
# Of messages that come again with each turn: the package holds the GIL for 3 ms per 1,000 tokens.
KEPT_BYTES = 32 * 1024 * 1024
# The key, the entry, and the array of the ids.
_ENTRY_BYTES = 250


class _Said(NamedTuple):
    """One message of the format."""

    role: str
    texts: tuple[str, ...]
    channel: str = ""
    recipient: str = ""
    name: str = ""
    content_type: str = ""


class Harmony:
    """Writes chats. Thread-safe."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._encoding = library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)
        self._start, self._message = self._encode("<|start|><|message|>")
        self._answer = self._encode("<|start|>assistant")
        self._efforts = {str(effort.value).lower(): effort for effort in library.ReasoningEffort}
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()
        self.held_bytes = 0
        self._lock = Lock()

    @classmethod
    def load(cls) -> tuple[Self | None, str]:
        """Read the package's vocabulary, which takes seconds; None without the package, and the remedy."""
        try:
            version("oss-harmony")
            import openai_harmony
        except (PackageNotFoundError, ImportError):
            return None, (
                "vLLM writes chats of gpt-oss in Harmony, not by the chat template: install "
                "kvrouter[harmony], or let the engines tokenize them"
            )
        return cls(openai_harmony), ""

    def ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        effort: str | None = None,
        is_response: bool = False,
    ) -> list[int]:
        """The token ids of a chat, up to where the assistant begins.

        `is_response`: the messages were made of items of /v1/responses. Raises BadRequestError for what
        cannot be written.
        """
        instructions = None
        try:
            if messages and messages[0]["role"] in {"system", "developer"}:
                instructions, messages = _flat(messages[0].get("content")), messages[1:]
            ids = self._preamble(instructions, tools, effort)
            for said in _without_old_analysis([*_said(messages, is_response=is_response)]):
                ids.extend(self._kept_ids(said, partial(self._written, said)))
        except Exception as error:  # pydantic's, the library's own, and those of a body of another shape
            raise BadRequestError(f"Harmony cannot write this chat: {error}", param="messages") from error
        return [*ids, *self._answer]

    def _preamble(
        self, instructions: str | None, tools: Sequence[Mapping[str, Any]] | None, effort: str | None
    ) -> array[int]:
        """The system message, and the developer message if there is anything to say in it."""
        date = datetime.now().strftime("%Y-%m-%d")

        def write() -> list[int]:
            system = self._library.SystemContent.new().with_conversation_start_date(date)
            if effort is not None:
                system = system.with_reasoning_effort(self._efforts[effort])
            messages = [self._library.Message.from_role_and_content("system", system)]
            if instructions or tools:
                messages.append(self._developer_message(instructions, tools))
            conversation = self._library.Conversation.from_messages(messages)
            ids: list[int] = self._encoding.render_conversation(conversation)
            return ids

        return self._kept_ids([date, effort, instructions, tools], write)[:]

    def _developer_message(self, instructions: str | None, tools: Sequence[Mapping[str, Any]] | None) -> Any:
        content = self._library.DeveloperContent.new()
        if instructions is not None:
            content = content.with_instructions(instructions)
        if tools:
            content = content.with_function_tools([self._described(tool["function"]) for tool in tools])
        return self._library.Message.from_role_and_content("developer", content)

    def _described(self, function: Mapping[str, Any]) -> Any:
        name, about = function["name"], function.get("description") or ""
        return self._library.ToolDescription.new(name, about, function.get("parameters"))

    def _written(self, said: _Said) -> list[int]:
        library = self._library
        if said.role == "developer":
            message = self._developer_message(said.texts[0], None)
        else:
            author = library.Author(role=library.Role(said.role), name=said.name or None)
            message = library.Message(
                author=author,
                content=[library.TextContent(text=text) for text in said.texts],
                channel=said.channel or None,
                recipient=said.recipient or None,
                content_type=said.content_type or None,
            )
        return self._with_trained_header(self._encoding.render(message))

    def _with_trained_header(self, ids: list[int]) -> list[int]:
        """A call with its recipient before the channel, as gpt-oss was trained, and as vLLM changes it.

        The package puts it behind the channel since 0.0.10.
        """
        end = ids.index(self._message)
        header = _HEADER.fullmatch(self._encoding.decode(ids[1:end]))
        if header is None:
            return ids
        channel, recipient, kind = header.groups()
        return self._encode(f"<|start|>assistant to={recipient}<|channel|>{channel} {kind}") + ids[end:]

    def _kept_ids(self, key: object, write: Callable[[], list[int]]) -> array[int]:
        digest = xxh3_128_digest(msgspec.json.encode(key))
        with self._lock:
            if (found := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
                return found
        written = array("I", write())
        with self._lock:
            if digest not in self._kept:  # another thread may have written it meanwhile
                self._kept[digest] = written
                self.held_bytes += _bytes(written)
            while self.held_bytes > KEPT_BYTES:
                self.held_bytes -= _bytes(self._kept.popitem(last=False)[1])
        return written

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode(text, allowed_special="all")
        return ids


def _bytes(ids: array[int]) -> int:
    return len(ids) * ids.itemsize + _ENTRY_BYTES


def _said(messages: Sequence[Message], *, is_response: bool) -> Iterator[_Said]:
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    names = {call.get("id"): call["function"].get("name") for call in calls}
    for message in messages:
        match message["role"]:
            case "assistant" if is_response:
                yield from _of_items(message)
            case "assistant":
                yield from _of_assistant(message)
            case "tool":
                name = f"functions.{names.get(message.get('tool_call_id', ''), '')}"
                text = _flat(message.get("content")) or ""
                yield _Said("tool", (text,), "commentary", "assistant", name)
            case "system" | "developer":
                if (instructions := _flat(message.get("content"))) is not None:
                    yield _Said("developer", (instructions,))
            case role:
                yield _Said(role, _texts(message))


def _of_assistant(message: Message) -> Iterator[_Said]:
    reasoning, calls = message.get("reasoning"), message.get("tool_calls")
    if reasoning is None:
        reasoning = message.get("reasoning_content")  # the field's older name
    text, texts = _flat(message.get("content")), _texts(message)
    if calls and text:
        yield _Said("assistant", (text,), "commentary")
    if reasoning:
        yield _Said("assistant", (reasoning,), "analysis")
    yield from map(_call, calls or ())
    if not calls and texts and texts[0]:
        yield _Said("assistant", texts, "final")


def _of_items(message: Message) -> Iterator[_Said]:
    """In the order in which an engine makes the items of a response."""
    if (reasoning := message.get("reasoning")) is not None:
        yield _Said("assistant", (reasoning,), "analysis")
    if (text := _flat(message.get("content"))) is not None:
        yield _Said("assistant", (text,), "final")
    yield from map(_call, message.get("tool_calls") or ())


def _call(call: Mapping[str, Any]) -> _Said:
    function = call["function"]
    arguments, name = function.get("arguments") or "", function.get("name", "")
    return _Said("assistant", (arguments,), "commentary", f"functions.{name}", content_type="json")


def _texts(message: Message) -> tuple[str, ...]:
    content = message.get("content") or ""
    return (content,) if isinstance(content, str) else tuple(part.get("text", "") for part in content)


def _flat(content: object) -> str | None:
    """All text of a content; None if it has none."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part if isinstance(part, str) else part.get("text") for part in parts]
    kept = [text for text in texts if text is not None]
    return "".join(kept) if kept else None


def _without_old_analysis(said: list[_Said]) -> list[_Said]:
    """Reasoning is dropped once its final answer is there."""
    finals = [place for place, each in enumerate(said) if each.channel == "final"]
    last = finals[-1] if finals else -1
    return [each for place, each in enumerate(said) if each.channel != "analysis" or place >= last]
