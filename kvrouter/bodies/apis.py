"""The APIs of clients: how each one's bodies are read, and how it reports errors and usage.

Each route of an API is in engine_routes.py, which says what the API of any path is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from kvrouter.bodies import cohere, messages, ollama, openai, responses
from kvrouter.core.tables.predictions import Usage
from kvrouter.errors import KvRouterError
from kvrouter.relay.answer import Answer, error_headers
from kvrouter.relay.engine_answers import find_usage

Parse: TypeAlias = Callable[[bytes], openai.CompletionRequest]


class ErrorBody(Protocol):
    def __call__(self, error: KvRouterError, request_id: str = "", /) -> bytes: ...


class Api(Struct, frozen=True):
    parse: Parse | None
    """None for the routes of passthrough.py: their prompts are not read."""
    error_body: ErrorBody = openai.error_body
    error_event: Callable[[KvRouterError], bytes] = openai.error_event
    """The last event of a stream whose status was sent already."""
    find_usage: Callable[[bytes], Usage] = find_usage
    """Finds prompt tokens and cached tokens in the last bytes of an answer."""
    converted: Literal["messages", "responses"] | None = None
    """The name of an API whose requests are converted to chats."""

    is_native: bool = False
    """Whether every engine has the route, so that a 404 means that the engine does not serve the model."""
    streams: bool = True
    """Whether `"stream": true` asks for server-sent events, in which the router may send comments."""
    error_schema: str = "Error"
    """The name of its error's schema (openapi.py)."""
    id_header: str = ""
    """Where its clients look for the request id of an error, besides `x-request-id`."""

    @property
    def has_end(self) -> bool:
        """Whether a good stream of this API has a finish reason or a last event."""
        return self.parse is not None

    def error_answer(self, error: KvRouterError, request_id: str) -> Answer:
        """The error as a whole answer."""
        headers = error_headers(error, request_id)
        if self.id_header:
            headers[self.id_header] = request_id
        return Answer(error.status, self.error_body(error, request_id), headers)


def unnamed(api: Api) -> Api:
    """The API for clients that may see neither workers nor peers: all its errors go through `for_clients`."""
    return _UNNAMED.get(id(api)) or _unnamed(api)


@cache
def _unnamed(api: Api) -> Api:

    def error_body(error: KvRouterError, request_id: str = "", /) -> bytes:
        return api.error_body(error.for_clients(), request_id)

    def error_event(error: KvRouterError) -> bytes:
        return api.error_event(error.for_clients())

    return replace(api, error_body=error_body, error_event=error_event)


CHAT = Api(openai.parse_chat, is_native=True)
COMPLETION = Api(openai.parse_completion, is_native=True)
MESSAGES = Api(
    messages.parse,
    messages.error_body,
    messages.error_event,
    messages.find_usage,
    "messages",
    error_schema="AnthropicError",
    id_header="request-id",
)
RESPONSES = Api(responses.parse, openai.error_body, responses.error_event, responses.find_usage, "responses")
PASSED_ON = Api(None, streams=False)
"""Of OpenAI's form, like all routes without an API of their own."""
STREAM_PASSED_ON = Api(None)
MESSAGES_PASSED_ON = Api(
    None,
    messages.error_body,
    messages.error_event,
    error_schema="AnthropicError",
    id_header="request-id",
    streams=False,
)
COHERE_CHAT = Api(None, cohere.error_body, cohere.error_event, error_schema="CohereError")
COHERE = replace(COHERE_CHAT, streams=False)
COHERE_OR_OPENAI = Api(None, cohere.shared_error_body, error_schema="CohereOrOpenAIError", streams=False)
OLLAMA = Api(None, ollama.error_body, ollama.error_event, error_schema="OllamaError", streams=False)
"""Its streams are lines of JSON."""

BY_PATH = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}
# By id, as all APIs live as long as the process: each request of a client with a key looks here.
_UNNAMED = {id(api): _unnamed(api) for api in list(vars().values()) if isinstance(api, Api)}
