"""Token ids computed by an engine, over HTTP: vLLM's `/tokenize`."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any, Self

import aiohttp
import msgspec

from kvrouter.bounded_answers import UNPACKED, engine_connector, read_answer
from kvrouter.core.wire.ops import UNREADABLE
from kvrouter.core.wire.values import TokenId
from kvrouter.errors import KvRouterError
from kvrouter.tls import tls_trouble, trusting
from kvrouter.tokens.prompt import ChatPrompt, TextPrompt, TokenIds

# Then the request is routed without tokens: a wrong placement costs less than a longer wait.
TIMEOUT_S = 2.0
# Concurrent calls, to all engines together. Another one raises BusyError instead of waiting.
MOST_CALLS = 64


class EngineTokenizerError(KvRouterError):
    """The engine did not answer with tokens."""


class RefusedError(EngineTokenizerError):
    """The engine rejects this prompt (400), so it will reject the request as well."""


class _Answer(msgspec.Struct, frozen=True):
    tokens: list[TokenId]


_decode = msgspec.json.Decoder(_Answer).decode


class BusyError(EngineTokenizerError):
    """MOST_CALLS calls are already in flight."""


class EngineTokenizer:
    """Requests the token ids of prompts from engines. Open it with `async with`."""

    def __init__(self, session: aiohttp.ClientSession, api_key: str | None = None) -> None:
        self._session = session
        self._api_key = api_key
        self._calls = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, api_key: str | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator[Self]:
        """A session for all engines; the key is sent as a bearer token.

        `tls`: the certificate authorities to trust for https:// URLs; None: the system's.
        """
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = engine_connector(tls or trusting(None), limit=MOST_CALLS)
        async with aiohttp.ClientSession(
            headers=UNPACKED, timeout=timeout, connector=connector, auto_decompress=False
        ) as session:
            yield cls(session, api_key)

    def use_key(self, api_key: str | None) -> bool:
        """Send this key from now on; returns whether it is another one."""
        changed, self._api_key = api_key != self._api_key, api_key
        return changed

    async def tokenize(self, url: str, model: str | None, prompt: ChatPrompt | TextPrompt) -> list[TokenIds]:
        """The ids of each prompt as computed by the engine at `url`. Raises EngineTokenizerError."""
        bodies = _bodies(model, prompt)
        if self._calls + len(bodies) > MOST_CALLS:
            raise BusyError(f"{MOST_CALLS} calls to /tokenize are in flight")
        self._calls += len(bodies)
        try:
            async with asyncio.TaskGroup() as calls:
                tasks = [calls.create_task(self._call(url, body)) for body in bodies]
        except ExceptionGroup as errors:
            # not except*: before Python 3.11.4 it wraps the exception raised inside in another group
            raise errors.exceptions[0] from None
        finally:
            self._calls -= len(bodies)
        kept = prompt.kept_tokens
        return [task.result() if kept is None else task.result()[kept] for task in tasks]

    async def _call(self, url: str, body: bytes) -> TokenIds:
        headers = {"content-type": "application/json"}
        if self._api_key:
            headers["authorization"] = f"Bearer {self._api_key}"
        try:
            async with self._session.post(
                f"{url.rstrip('/')}/tokenize", data=body, headers=headers
            ) as response:
                answer = await read_answer(response)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            reason = tls_trouble(error.__cause__) or str(error) or type(error).__name__
            raise EngineTokenizerError(f"{url}/tokenize: {reason}") from None
        if response.status != 200:
            text = answer[:200].decode("utf-8", "replace")
            kind = RefusedError if response.status == 400 else EngineTokenizerError
            raise kind(f"{url}/tokenize answered {response.status}: {text}")
        try:
            return _decode(answer).tokens
        except UNREADABLE as error:
            raise EngineTokenizerError(f"{url}/tokenize answered without tokens: {error}") from None


def _bodies(model: str | None, prompt: ChatPrompt | TextPrompt) -> list[bytes]:
    """One request body for each prompt, with vLLM's field names."""
    fields: dict[str, Any] = {"model": model, "add_special_tokens": prompt.add_special_tokens}
    if isinstance(prompt, TextPrompt):
        return [_encode({**fields, "prompt": text}) for text in prompt.texts]
    fields |= {
        "messages": list(prompt.messages),
        "tools": list(prompt.tools) if prompt.tools else None,
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
        "chat_template_kwargs": dict(prompt.chat_template_kwargs) or None,
    }
    return [_encode(fields)]


def _encode(fields: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
    except UnicodeEncodeError as error:
        raise RefusedError(f"the prompt is not valid Unicode: {error}") from None
