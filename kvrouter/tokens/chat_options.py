"""What an engine makes of options of a chat that no template shows: learnt from chats that it serves.

    tool_choice: "none"    the tools stay in the prompt, or not (vLLM: --exclude-tools-when-tool-choice-none)
    reasoning_effort       the template gets another one (vLLM from 0.33 on: --reasoning-effort-map)

Each probe costs the engine one token. An option that changes nothing in this model's prompts is not probed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from kvrouter.errors import KvRouterError
from kvrouter.tokens.prompt import ChatPrompt, TokenIds

# What clients may ask for, as vLLM 0.33 lists it.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

Ids = Callable[[ChatPrompt], Awaitable[TokenIds]]
"""The ids of a chat. Raises KvRouterError if there are none."""

_PLAIN = ChatPrompt([{"role": "user", "content": "Hi"}])
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": _SCHEMA}}
# Nine letters and digits: Mistral's templates reject other ids.
_CALL = {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": '{"city": "Rome"}'}}
_TOOLS = ChatPrompt(
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Well.", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call12345", "content": "Sun"},
    ],
    tools=[_TOOL],
    tool_choice="none",
)


class ChatOptions(Struct, frozen=True):
    """What was learnt. Before that: what vLLM does without these flags."""

    leaves_tools_out: bool = False
    """Of chats with `tool_choice: none`."""
    knows_tools: bool = True
    """Whether the probe with tools had the ids that are made here, with or without them."""
    efforts: Mapping[str, str | None] = field(default_factory=dict)
    """The efforts that the engine replaces; None: by one with whose ids nothing here agrees."""

    def applied(self, prompt: ChatPrompt) -> ChatPrompt | None:
        """The chat as the engine reads it; None if that is unknown."""
        if prompt.tools and not self.knows_tools:
            return None
        if self.leaves_tools_out and prompt.tool_choice == "none":
            prompt = replace(prompt, tools=None)
        if prompt.effort is None or prompt.effort not in self.efforts:
            return prompt
        effort = self.efforts[prompt.effort]
        return None if effort is None else replace(prompt, effort=effort)

    def unknown(self) -> str:
        """Which chats are routed without tokens for it, in a sentence; empty: none."""
        kinds = ["chats with tools"] if not self.knows_tools else []
        if efforts := [asked for asked, used in self.efforts.items() if used is None]:
            kinds.append(f"chats with the reasoning effort {' or '.join(efforts)}")
        if not kinds:
            return ""
        return (
            f"{' and '.join(kinds)} have other token ids in the engine, though plain chats have not: they "
            "are routed without tokens; vLLM with --enable-scale-out tokenizes them for --tokenizer remote"
        )


async def learn(here: Ids, engine: Ids, *, by_template: bool = True) -> ChatOptions:
    """Compare the ids that are made `here` with those of chats that the `engine` serves.

    `by_template`: an effort without effect here has none there. vLLM's /tokenize of gpt-oss knows none.
    What the template or the engine rejects, or the engine does not answer, is not learnt.
    """
    keeps, leaves_out = await _of_tools(here, engine)
    return ChatOptions(leaves_out, keeps or leaves_out, await _replaced_efforts(here, engine, by_template))


async def _of_tools(here: Ids, engine: Ids) -> tuple[bool, bool]:
    """Whether the ids are those with the tools, and whether they are those without."""
    shown, hidden = await _ids(here, _TOOLS), await _ids(here, replace(_TOOLS, tools=None))
    if shown is None or hidden == shown:
        return True, False
    ids = await _ids(engine, _TOOLS)
    return ids is None or ids == shown, ids is not None and ids == hidden


async def _replaced_efforts(here: Ids, engine: Ids, by_template: bool) -> dict[str, str | None]:
    plain = await _ids(here, _PLAIN)
    own = await _by_effort(here)
    is_ignored = all(ids is None or ids == plain for ids in own.values())
    if is_ignored and (by_template or await _ids(engine, replace(_PLAIN, effort="low")) in (None, plain)):
        return {}
    return {
        effort: next((other for other in EFFORTS if own[other] == ids), None)
        for effort, ids in (await _by_effort(engine)).items()
        if ids is not None and ids != own[effort]
    }


async def _by_effort(source: Ids) -> dict[str, TokenIds | None]:
    chats = [replace(_PLAIN, effort=effort) for effort in EFFORTS]
    found = await asyncio.gather(*(_ids(source, chat) for chat in chats))
    return dict(zip(EFFORTS, found, strict=True))


async def _ids(source: Ids, prompt: ChatPrompt) -> TokenIds | None:
    try:
        return await source(prompt)
    except KvRouterError:
        return None
