"""The errors of Cohere's API, whose requests are only passed on.

Below /cohere/ they are {"message", "id"}, as in vLLM 0.33. On /v2/embed, /v1/rerank and /v2/rerank vLLM
answers with OpenAI's object, and Cohere's own service with this one: clients of both find theirs.
"""

from __future__ import annotations

import msgspec

from kvrouter.bodies.openai import error_details, error_message
from kvrouter.errors import KvRouterError


def error_body(error: KvRouterError, request_id: str = "") -> bytes:
    """The JSON that Cohere's clients expect with a status of 400 and above."""
    return msgspec.json.encode(_body(error, request_id))


def shared_error_body(error: KvRouterError, request_id: str = "") -> bytes:
    """The same and OpenAI's object in one: vLLM answers with the latter on these paths."""
    return msgspec.json.encode({**_body(error, request_id), "error": error_details(error)})


def error_event(error: KvRouterError) -> bytes:
    """The last event of a chat, with the reason ERROR."""
    delta = {"finish_reason": "ERROR", "error": error_message(error)}
    return b"data: " + msgspec.json.encode({"type": "message-end", "delta": delta}) + b"\n\n"


def _body(error: KvRouterError, request_id: str) -> dict[str, str]:
    body = {"message": error_message(error)}
    return {**body, "id": request_id} if request_id else body
