"""Token ids computed by an engine, over HTTP.

    /tokenize                       the tokenizer, and for chats the template
    /v1/chat/completions/render     what the chat route makes of a chat; vLLM has it where it is switched on
    /v1/chat/completions            the same, of a chat that is served: `return_token_ids`

The chat route does not always do what the template says: vLLM writes chats of gpt-oss in Harmony, and an
engine may map the efforts that clients ask for.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import aiohttp
import msgspec

from kvrouter.bounded_answers import (
    MOST_BYTES,
    UNPACKED,
    address_below,
    engine_connector,
    no_answer,
    read_answer,
)
from kvrouter.core.wire.addresses import Network
from kvrouter.core.wire.ops import UNREADABLE
from kvrouter.core.wire.values import TokenId
from kvrouter.errors import KvRouterError
from kvrouter.tls import tls_trouble, trusting
from kvrouter.tokens.prompt import ChatPrompt, TextPrompt, TokenIds

# Then a request is routed without tokens: a wrong placement costs less than a longer wait.
REQUEST_TIMEOUT_S = 0.5
# Of probes and comparisons, which no client waits for.
TIMEOUT_S = 2.0
# Of a chat that waits for its turn in an engine.
SERVED_TIMEOUT_S = 30.0
TOKENIZE, RENDER = "tokenize", "v1/chat/completions/render"
_SERVED = "v1/chat/completions"
# A byte of a prompt is at most about one token, of 8 digits and a comma; a template adds its own text.
_ANSWER_BYTES_PER_BYTE = 16
_ANSWER_BYTES = 64 * 1024
# How pydantic says that a chat is not what this route takes. In the first bytes only: what follows repeats
# the client's words, and vLLM, which takes both, names the kind of request in between.
_LACKS_PROMPT = b"'loc': ('body', 'prompt')"
_FIRST_LOCATION = 120
# Concurrent calls, to all engines together. Another one raises BusyError instead of waiting.
MOST_CALLS = 64


class EngineTokenizerError(KvRouterError):
    """The engine did not answer with tokens."""


class RefusedError(EngineTokenizerError):
    """The engine does not tokenize this prompt, or does not serve this model."""


class PromptRejectedError(RefusedError):
    """The engine rejects the prompt (400, 413, 422), so any engine should reject the request as well."""


class NoTokenizeRouteError(EngineTokenizerError):
    """The engine has no `/tokenize`, or hides it."""


class SlowError(EngineTokenizerError):
    """The engine did not answer in time."""


class _Choice(msgspec.Struct, frozen=True):
    prompt_token_ids: list[TokenId] | None = None


class _IdsResponse(msgspec.Struct, frozen=True):
    tokens: list[TokenId] | None = None
    """Of /tokenize."""
    token_ids: list[TokenId] | None = None
    """Of a render route."""
    prompt_token_ids: list[TokenId] | None = None
    """Of a chat that was served by vLLM."""
    choices: list[_Choice] = []
    """Of a chat that was served by SGLang: its choices have the ids of the prompt."""

    def of_served(self) -> list[TokenId] | None:
        if self.prompt_token_ids is None and self.choices:
            return self.choices[0].prompt_token_ids
        return self.prompt_token_ids


_decode = msgspec.json.Decoder(_IdsResponse).decode


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
    async def open(
        cls,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        networks: Sequence[Network] = (),
    ) -> AsyncIterator[Self]:
        """A session for all engines; the key is sent as a bearer token.

        `tls`: the certificate authorities to trust for https:// URLs; None: the system's.
        """
        timeout = aiohttp.ClientTimeout(total=None)  # `answers` has one
        connector = engine_connector(tls or trusting(None), limit=MOST_CALLS, networks=networks)
        async with aiohttp.ClientSession(
            headers=UNPACKED, timeout=timeout, connector=connector, auto_decompress=False
        ) as session:
            yield cls(session, api_key)

    def use_key(self, api_key: str | None) -> bool:
        """Send this key from now on; returns whether it is another one."""
        changed, self._api_key = api_key != self._api_key, api_key
        return changed

    async def tokenize(
        self, url: str, model: str | None, prompt: ChatPrompt | TextPrompt, timeout_s: float = TIMEOUT_S
    ) -> list[TokenIds]:
        """The ids of each prompt as computed by the engine at `url`. Raises EngineTokenizerError."""
        found = await self.answers(url, tokenize_bodies(model, prompt), timeout_s)
        kept = prompt.kept_tokens
        return found if kept is None else [ids[kept] for ids in found]

    async def chat_ids(
        self, url: str, model: str | None, prompt: ChatPrompt | TextPrompt
    ) -> tuple[TokenIds, str]:
        """The ids that the chat route makes of a chat, and the route that says so; none if none says it.

        The engine computes one token, if it has no render route. Raises BusyError.
        """
        (body,) = tokenize_bodies(model, prompt, RENDER)
        served = msgspec.json.encode(msgspec.json.decode(body) | _ONE_TOKEN)
        for route, asked, limit_s in ((RENDER, body, TIMEOUT_S), (_SERVED, served, SERVED_TIMEOUT_S)):
            try:
                return (await self.answers(url, [asked], limit_s, route))[0], route
            except BusyError:
                raise
            except EngineTokenizerError:
                pass  # render is off in nearly all engines, and older ones show no ids
        return [], ""

    async def served_ids(self, url: str, prompt: ChatPrompt) -> TokenIds:
        """The ids that the chat route makes of a chat. Raises EngineTokenizerError if it shows none."""
        ids, _ = await self.chat_ids(url, None, prompt)
        if not ids:
            raise EngineTokenizerError(f"{url}/{_SERVED} shows no token ids of this chat")
        return ids

    async def reference(self, url: str, model: str | None, prompt: ChatPrompt | TextPrompt) -> TokenIds:
        """The ids with which an engine serves a prompt, if it shows them. Raises EngineTokenizerError."""
        if isinstance(prompt, ChatPrompt) and prompt.kept_tokens is None:
            ids, _ = await self.chat_ids(url, model, prompt)
            if ids:
                return ids
        (ids,) = await self.tokenize(url, model, prompt)
        return ids

    async def answers(
        self, url: str, bodies: list[bytes], timeout_s: float, route: str = TOKENIZE
    ) -> list[TokenIds]:
        """The ids of each body of `tokenize_bodies`. Raises EngineTokenizerError."""
        if self._calls + len(bodies) > MOST_CALLS:
            raise BusyError(f"{MOST_CALLS} calls to engines for tokens are in flight")
        self._calls += len(bodies)
        try:
            async with asyncio.timeout(timeout_s):
                if len(bodies) == 1:
                    return [await self._call(url, route, bodies[0])]
                async with asyncio.TaskGroup() as calls:
                    tasks = [calls.create_task(self._call(url, route, body)) for body in bodies]
        except ExceptionGroup as errors:
            # not except*: before Python 3.11.4 it wraps the exception raised inside in another group
            raise errors.exceptions[0] from None
        except TimeoutError:
            raise SlowError(f"{url}/{route}: no answer within {round(timeout_s, 2):g} s") from None
        finally:
            self._calls -= len(bodies)
        return [task.result() for task in tasks]

    async def _call(self, url: str, route: str, body: bytes) -> TokenIds:
        headers = {"content-type": "application/json"}
        if self._api_key:
            headers["authorization"] = f"Bearer {self._api_key}"
        try:
            where = address_below(url, route)
            posted = self._session.post(where, data=body, headers=headers, allow_redirects=False)
            async with posted as response:
                most = min(MOST_BYTES, _ANSWER_BYTES + _ANSWER_BYTES_PER_BYTE * len(body))
                answer = await read_answer(response, most)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            reason = tls_trouble(error.__cause__) or no_answer(error)
            raise EngineTokenizerError(f"{url}/{route}: {reason}") from None
        if response.status in {400, 422} and _LACKS_PROMPT in answer[:_FIRST_LOCATION]:
            raise NoTokenizeRouteError(
                f"{url}/{route} takes texts only, as in older versions of SGLang: chats need --model-path"
                " or --tokenizer-root"
            )
        if response.status != 200:
            text = answer[:200].decode("utf-8", "replace")
            raise _error_of(response.status, answer)(f"{url}/{route} answered {response.status}: {text}")
        try:
            found = _decode(answer)
        except UNREADABLE as error:
            raise EngineTokenizerError(f"{url}/{route} answered without tokens: {error}") from None
        tokens = {TOKENIZE: found.tokens, RENDER: found.token_ids, _SERVED: found.of_served()}[route]
        if tokens is None:
            raise EngineTokenizerError(f"{url}/{route} answered without token ids")
        if not tokens:
            raise RefusedError(f"{url}/{route} answered no token")
        return tokens


_ONE_TOKEN = {"max_tokens": 1, "temperature": 0, "return_token_ids": True}


def _error_of(status: int, answer: bytes) -> type[EngineTokenizerError]:
    # vLLM answers 404 both to a model that it does not serve and, like every FastAPI, to unknown routes;
    # from 0.30 on it hides some routes behind a flag, with 403
    if status in {400, 413, 422}:
        return PromptRejectedError
    if status == 404 and b"does not exist" in answer:
        return RefusedError
    return NoTokenizeRouteError if status in {403, 404, 405, 501} else EngineTokenizerError


def tokenize_bodies(model: str | None, prompt: ChatPrompt | TextPrompt, route: str = TOKENIZE) -> list[bytes]:
    """One request body for each prompt, with vLLM's field names. Raises RefusedError.

    `/tokenize` does not know the effort and the choice of a tool: it gets the template's variables.
    """
    fields: dict[str, Any] = {"model": model, "add_special_tokens": prompt.add_special_tokens}
    if isinstance(prompt, TextPrompt):
        return [_encode({**fields, "prompt": text}) for text in prompt.texts]
    fields |= {
        "messages": list(prompt.messages),
        "tools": list(prompt.tools) if prompt.tools else None,
        # its default is true; SGLang serves chats without the field, and tokenizes others with it
        "add_generation_prompt": None if prompt.add_generation_prompt else False,
        "continue_final_message": prompt.continue_final_message,
    }
    if route == TOKENIZE:
        return [_encode({**fields, "chat_template_kwargs": prompt.variables() or None})]
    fields |= {
        "chat_template_kwargs": dict(prompt.chat_template_kwargs) or None,
        "reasoning_effort": prompt.effort,
        "tool_choice": prompt.tool_choice if prompt.tools else None,
    }
    return [_encode(fields)]


def _encode(fields: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
    except UnicodeEncodeError as error:
        raise PromptRejectedError(f"the prompt is not valid Unicode: {error}") from None
