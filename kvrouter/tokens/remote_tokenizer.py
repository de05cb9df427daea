"""An engine's own tokenizer, over HTTP: vLLM's `/tokenize`."""

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

# Longer than this a request does not wait for its tokens.
TIMEOUT_S = 2.0
# At once, to all engines together.
MOST_CALLS = 64


class EngineTokenizerError(KvRouterError):
    """The engine did not answer, or not with tokens."""


class RefusedError(EngineTokenizerError):
    """The engine refuses this prompt (400): it will refuse the request, too."""


class _Answer(msgspec.Struct, frozen=True):
    tokens: list[TokenId]


_decode = msgspec.json.Decoder(_Answer).decode


class BusyError(EngineTokenizerError):
    """As many calls as there may be are under way."""


class EngineTokenizer:
    """Asks engines for the token ids of prompts. Open it with `async with`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._calls = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, api_key: str | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator[Self]:
        """A session for all engines; the key is sent as a bearer token.

        `tls`: whom to trust behind https:// URLs; None: the system's authorities.
        """
        headers = {**UNPACKED, "authorization": f"Bearer {api_key}"} if api_key else UNPACKED
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = engine_connector(tls or trusting(None), limit=MOST_CALLS)
        async with aiohttp.ClientSession(
            headers=headers, timeout=timeout, connector=connector, auto_decompress=False
        ) as session:
            yield cls(session)

    async def tokenize(self, url: str, model: str | None, prompt: ChatPrompt | TextPrompt) -> list[TokenIds]:
        """The ids of each prompt as the engine at `url` sees it. Raises EngineTokenizerError."""
        bodies = _bodies(model, prompt)
        if self._calls + len(bodies) > MOST_CALLS:
            raise BusyError(f"{MOST_CALLS} calls to /tokenize are under way")
        self._calls += len(bodies)
        try:
            async with asyncio.TaskGroup() as calls:
                asked = [calls.create_task(self._ask(url, body)) for body in bodies]
        except ExceptionGroup as errors:  # not except*: Python before 3.11.4 puts what it raises in a group
            raise errors.exceptions[0] from None
        finally:
            self._calls -= len(bodies)
        kept = prompt.kept_tokens
        return [call.result() if kept is None else call.result()[kept] for call in asked]

    async def _ask(self, url: str, body: bytes) -> TokenIds:
        headers = {"content-type": "application/json"}
        try:
            async with self._session.post(
                f"{url.rstrip('/')}/tokenize", data=body, headers=headers
            ) as response:
                answer = await read_answer(response)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            reason = tls_trouble(error.__cause__) or str(error) or type(error).__name__
            raise EngineTokenizerError(f"{url}/tokenize: {reason}") from None
        if response.status != 200:
            said = answer[:200].decode("utf-8", "replace")
            kind = RefusedError if response.status == 400 else EngineTokenizerError
            raise kind(f"{url}/tokenize answered {response.status}: {said}")
        try:
            return _decode(answer).tokens
        except UNREADABLE as error:
            raise EngineTokenizerError(f"{url}/tokenize answered no tokens: {error}") from None


def _bodies(model: str | None, prompt: ChatPrompt | TextPrompt) -> list[bytes]:
    """One request for each prompt; the names are those of the engine."""
    asked: dict[str, Any] = {"model": model, "add_special_tokens": prompt.add_special_tokens}
    if isinstance(prompt, TextPrompt):
        return [_json({**asked, "prompt": text}) for text in prompt.texts]
    asked |= {
        "messages": list(prompt.messages),
        "tools": list(prompt.tools) if prompt.tools else None,
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
        "chat_template_kwargs": dict(prompt.chat_template_kwargs) or None,
    }
    return [_json(asked)]


def _json(asked: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode({name: value for name, value in asked.items() if value is not None})
    except UnicodeEncodeError as error:
        raise RefusedError(f"the prompt is not valid Unicode: {error}") from None
