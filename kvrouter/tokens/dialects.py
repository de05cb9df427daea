"""How an engine prints a chat. All that differs between engines with one chat template is here.

    ChatTemplate.dialect ──> Vllm      messages.py,        content_format.py
                         └─> Sglang    sglang_messages.py

A template starts with vLLM's dialect. The start comparison with an engine chooses (`PromptEncoder.settle`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jinja2.ext
from jinja2 import nodes
from msgspec import Struct, field

from kvrouter.errors import BadRequestError
from kvrouter.tokens import content_format, messages, sglang_messages
from kvrouter.tokens.messages import ContentFormat, Message
from kvrouter.tokens.template_limits import LimitedEnvironment, TemplateLimitError

# Appended to the text to continue, and searched for in the prompt. If the template trims the text, the final
# space is missing there.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Searched for in a prompt with a later system message, which some templates leave out.
_LATER = "later-system-message"


class Asked(Struct, frozen=True):
    """A chat to print, and what the request says about it."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    names_first: bool = False
    """See `messages.conversation`."""


class Compiled(Protocol):
    """One compiled template."""

    text: str
    tree: nodes.Template

    def render(self, chat: list[Message], variables: Mapping[str, Any]) -> str:
        """Raises BadRequestError if the template rejects the chat."""
        ...


class Dialect(Protocol):
    """One engine's way, with the templates of one model."""

    has_own_chats: bool
    """Whether it makes other chats of clients' bodies than vLLM: `ChatPrompt.for_sglang`."""

    @property
    def wants_system_first(self) -> bool:
        """Whether system messages between others are to be merged into the first."""
        ...

    def render(self, asked: Asked) -> str:
        """The prompt. Raises BadRequestError and TemplateLimitError."""
        ...


class Vllm:
    """As vLLM 0.32 does it."""

    has_own_chats = False

    def __init__(
        self,
        default: Compiled,
        tool_use: Compiled | None,
        special_tokens: Mapping[str, str],
        *,
        follows_namespaces: bool = True,
    ) -> None:
        """`follows_namespaces`: see `content_format.wants_parts`."""
        read = functools.partial(_VllmTemplate, follows_namespaces=follows_namespaces)
        self._default = read(default)
        self._tool_use = read(tool_use) if tool_use is not None else self._default
        self._special_tokens = special_tokens
        self._texts = {default.text, (tool_use or default).text}

    @functools.cached_property
    def wants_system_first(self) -> bool:
        """Only /v1/messages asks. vLLM tries each template in a plain sandbox, without `raise_exception`."""
        return any(_with_later_system(text) is None for text in self._texts)

    def render(self, asked: Asked) -> str:
        template = self._tool_use if asked.tools else self._default
        chat = messages.conversation(asked.messages, template.content_format, names_first=asked.names_first)
        if not template.knows_developer:
            chat = messages.developer_as_system(chat)
        variables = {
            "documents": None,
            "tools": [messages.tool_definition(tool) for tool in asked.tools] if asked.tools else None,
            **self._special_tokens,
            **asked.chat_template_kwargs,
            "add_generation_prompt": asked.add_generation_prompt,
        }
        if not asked.continue_final_message:
            return template.compiled.render(chat, variables)
        return _cut_at_tag(template.compiled.render(_tagged(chat), variables))


class _VllmTemplate:
    def __init__(self, compiled: Compiled, *, follows_namespaces: bool) -> None:
        self.compiled = compiled
        self.content_format: ContentFormat = messages.as_string
        if content_format.wants_parts(compiled.tree, follows_namespaces=follows_namespaces):
            self.content_format = messages.as_parts
        self.knows_developer = '"developer"' in compiled.text or "'developer'" in compiled.text


class Sglang:
    """As SGLang 0.5.23 does it. It has one template, also for requests with tools."""

    has_own_chats = True

    def __init__(self, template: Compiled, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self._special_tokens = special_tokens
        self._in_parts = sglang_messages.wants_parts(template.text, template.tree)

    @functools.cached_property
    def wants_system_first(self) -> bool:
        """Also if the template leaves later ones out. /v1/messages and /v1/responses ask."""
        return _LATER not in (_with_later_system(self._template.text) or "")

    def render(self, asked: Asked) -> str:
        chat = sglang_messages.conversation(asked.messages, in_parts=self._in_parts)
        continued = ""
        last = chat[-1]
        if last["role"] == "assistant" and isinstance(last["content"], str):
            chat.pop()
            if asked.continue_final_message:
                continued = last["content"]
            else:
                chat.append({"role": "user", "content": last["content"]})
        tools = [sglang_messages.tool_definition(tool) for tool in asked.tools or ()]
        try:
            return self._rendered(asked, chat, tools) + continued
        except BadRequestError:
            if not tools:
                raise
        # Mistral's templates take functions without the object around them.
        return self._rendered(asked, chat, [tool["function"] for tool in tools]) + continued

    def _rendered(self, asked: Asked, chat: list[Message], tools: list[dict[str, Any]]) -> str:
        variables = {
            "documents": None,
            "tools": tools or None,
            **self._special_tokens,
            **asked.chat_template_kwargs,
            "add_generation_prompt": True,
        }
        return self._template.render(chat, variables)


def _with_later_system(text: str) -> str | None:
    """The prompt of a chat with a later system message; None if the template rejects it."""
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.begin()
    turns = [("system", "t"), ("user", "t"), ("system", _LATER), ("user", "t")]
    chat = [{"role": role, "content": content} for role, content in turns]
    try:
        return environment.limited(text).render(messages=chat, add_generation_prompt=False)
    except (jinja2.TemplateError, TemplateLimitError):
        return None
    except Exception:
        return ""  # with this template vLLM itself does not start


def _tagged(chat: list[Message]) -> list[Message]:
    """The chat with the tag appended to the last text of its last message."""
    content = chat[-1]["content"]
    if isinstance(content, str):
        tagged: str | list[dict[str, Any]] = content + _CONTINUE_TAG
    elif texts := [index for index, part in enumerate(content) if "text" in part]:
        last = texts[-1]
        text = {**content[last], "text": content[last]["text"] + _CONTINUE_TAG}
        tagged = [*content[:last], text, *content[last + 1 :]]
    else:
        raise BadRequestError("continue_final_message: the final message has no text", param="messages")
    return [*chat[:-1], {**chat[-1], "content": tagged}]


def _cut_at_tag(prompt: str) -> str:
    at = prompt.rfind(_CONTINUE_TAG.rstrip())
    if at < 0:
        raise BadRequestError(
            "continue_final_message: the template drops the final message", param="messages"
        )
    return prompt[:at] if prompt.startswith(_CONTINUE_TAG, at) else prompt[:at].rstrip()
