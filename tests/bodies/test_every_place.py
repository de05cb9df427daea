"""Bodies of each API with any value at any place: read, or refused with a message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvrouter.bodies.apis import BY_PATH
from kvrouter.errors import BadRequestError
from kvrouter.tokens import sglang_messages
from kvrouter.tokens.media import estimated_tokens
from kvrouter.tokens.messages import (
    as_string,
    conversation,
    developer_as_system,
    tool_definition,
    without_media,
)
from kvrouter.tokens.prompt import ChatPrompt, has_media, plain_text, text_characters
from tests.bodies import test_messages, test_openai_fuzz, test_responses

VALUES: list[Any] = [None, True, -1, 0.5, 2**70, "", "x", [], [[]], [None], ["x"], {}, {"type": []}, {"": {}}]
_MESSAGES = [message for given, _ in test_messages.CHATS.values() for message in given]
_ITEMS = [item for given, _ in test_responses.CHATS.values() if isinstance(given, list) for item in given]
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [test_openai_fuzz.CHAT],
    "/v1/completions": test_openai_fuzz.COMPLETIONS,
    "/v1/messages": [{"model": "m", "messages": [one], "tools": [test_messages.TOOL]} for one in _MESSAGES],
    "/v1/responses": [{"model": "m", "input": [one], "tools": [test_responses.TOOL]} for one in _ITEMS],
}


def replaced(value: Any) -> Iterator[Any]:
    """The value with each of VALUES at each of its places."""
    yield from VALUES
    places = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for place in places:
        for other in replaced(value[place]):
            copied = value.copy()
            copied[place] = other
            yield copied


@pytest.mark.parametrize("path", BODIES)
def test_every_place(path: str) -> None:
    """Nothing but BadRequestError is raised, neither by the body nor by the conversation that it has."""
    parse = BY_PATH[path].parse
    assert parse is not None
    bodies = {json.dumps(one): one for body in BODIES[path] for one in replaced(body)}
    read = 0
    for text in bodies:
        try:
            prompt = parse(text.encode()).prompt
            if isinstance(prompt, ChatPrompt):
                _look_at(prompt)
        except BadRequestError:
            continue
        read += 1

    assert 0 < read < len(bodies)


def _look_at(prompt: ChatPrompt) -> None:
    """All that is done with a chat without a template."""
    has_media(prompt), plain_text(prompt), text_characters(prompt)
    estimated_tokens(prompt.messages)
    for messages in (prompt.messages, without_media(prompt.messages)):
        developer_as_system(conversation(messages, as_string, names_first=prompt.names_first))
    for tool in prompt.tools or ():
        tool_definition(tool)
    assert prompt.for_sglang is not None
    own = prompt.for_sglang()
    for in_parts in (True, False):
        for chat in (own.messages, own.system_first or ()):
            sglang_messages.conversation(chat, in_parts=in_parts)
    for tool in own.tools or ():
        sglang_messages.tool_definition(tool)
