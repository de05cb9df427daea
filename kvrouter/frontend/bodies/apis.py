"""The APIs that are served: how each one's bodies are read, and how it reports errors and usage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from msgspec import Struct

from kvrouter.core.tables.predictions import Usage
from kvrouter.errors import KvRouterError
from kvrouter.frontend.bodies import messages, openai, responses
from kvrouter.relay.answer import Answer, error_headers
from kvrouter.relay.engine_answers import find_usage

Parse: TypeAlias = Callable[[bytes], openai.CompletionRequest]


class Api(Struct, frozen=True):
    parse: Parse | None
    """None for the routes of passthrough.py: their prompts are not read."""
    error_body: Callable[[KvRouterError], bytes] = openai.error_body
    error_event: Callable[[KvRouterError], bytes] = openai.error_event
    """The last event of a stream whose status was sent already."""
    find_usage: Callable[[bytes], Usage] = find_usage
    """Finds prompt tokens and cached tokens in the last bytes of an answer."""
    converted: Literal["messages", "responses"] | None = None
    """The name of an API whose requests are converted to chats."""

    is_native: bool = False
    """Whether every engine has the route and takes the prompt as it is. Then a 404 means that the engine does
    not serve the model, and the engine, too, rejects what the chat template rejects."""

    @property
    def has_end(self) -> bool:
        """Whether a good stream of this API has a finish reason or a last event."""
        return self.parse is not None

    def error_answer(self, error: KvRouterError, request_id: str) -> Answer:
        return Answer(error.status, self.error_body(error), error_headers(error, request_id))


CHAT = Api(openai.parse_chat, is_native=True)
COMPLETION = Api(openai.parse_completion, is_native=True)
MESSAGES = Api(messages.parse, messages.error_body, messages.error_event, messages.find_usage, "messages")
RESPONSES = Api(responses.parse, openai.error_body, responses.error_event, responses.find_usage, "responses")
PASSED_ON = Api(None)

BY_PATH = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}
