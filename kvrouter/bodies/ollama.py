"""The errors of Ollama's API, which SGLang has, and whose requests are only passed on."""

from __future__ import annotations

import msgspec

from kvrouter.bodies.openai import error_message
from kvrouter.errors import KvRouterError


def error_body(error: KvRouterError, _request_id: str = "") -> bytes:
    """The JSON that Ollama's clients expect with a status of 400 and above."""
    return msgspec.json.encode({"error": error_message(error)})


def error_event(error: KvRouterError) -> bytes:
    """The same as a line: a stream of this API is JSON lines."""
    return error_body(error) + b"\n"
