"""What an engine reports over HTTP about itself: models, version, metrics, health."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta, Struct

from kvrouter.bounded_answers import (
    MOST_BYTES,
    NOT_IMPLEMENTED,
    UNPACKED,
    address_below,
    engine_connector,
    is_alive,
    no_answer,
    read_answer,
)
from kvrouter.core.wire.ops import UNREADABLE
from kvrouter.core.wire.values import MOST_NAMES, Amount, Line, Text
from kvrouter.errors import KvRouterError
from kvrouter.tls import tls_trouble, trusting
from kvrouter.worker.engines.metrics import Scrape, read_metrics

TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 1.0
# Of an answer that comes only once. 30,000 blocks of TensorRT-LLM's events have about as much.
MOST_TAKEN_BYTES = 64 * 1024 * 1024
# What an engine says in an answer with an error status, for one line of a log.
_MOST_SAID_BYTES = 512
_URL_FLAGS = "kvrouter worker --engine-url, kvrouter serve --engine"
MODELS_PATH = "v1/models"
HEALTH_PATH = "health"
# The note on a card that gives the reason begins with it.
DOWN = "down: "
# The server is there: only the agent's key, or its number of questions, is not as it wants.
_NOT_ABOUT_THE_ENGINE = {401, 403, 429}
_MOST_REASON = 160
# Request Timeout, Too Early, Too Many Requests: of a path that exists.
_NOT_NOW = frozenset({408, 425, 429})


class EngineError(KvRouterError):
    """The engine does not answer, or its answer is not an engine's."""


def reason_of(error: EngineError) -> str:
    """The text of an error, which may quote the engine, as a report may print it."""
    return "".join(one if one.isprintable() else "?" for one in str(error)[:_MOST_REASON])


def half_of_a_pair(shown_by: str, remedy: str) -> str:
    """Why an engine that only prefills or only decodes is not used."""
    return f"the engine is one half of a prefill/decode pair ({shown_by}): {remedy}"


class EngineGoneError(EngineError):
    """The engine's port is closed."""


class EngineStatusError(EngineError):
    """The engine answers with a status that is an error. `text`: what it says about it."""

    def __init__(self, path: str, status: int, text: str = "") -> None:
        super().__init__(f"/{path} answered {status}{': ' if text else ''}{text}")
        self.status = status


def remedy_of(error: EngineError) -> str:
    """What to do about an engine that does not answer as one."""
    match error:
        case EngineGoneError():
            return f"start the engine, or correct its URL ({_URL_FLAGS})"
        case EngineStatusError(status=401 | 403):
            return "give the engine's key: --engine-api-key-file"
        case EngineStatusError(status=404):
            return (
                f"give the URL of an OpenAI-compatible engine ({_URL_FLAGS}); of data-parallel ranks with a "
                "server each that of each rank, not of their supervisor"
            )
        case EngineStatusError():
            return "look at the engine's log: it loads its model, scales, or has failed"
    return "correct what the reason names, or look at the engine's log"


class HiddenPathError(EngineStatusError):
    """The engine, or a gateway before it, does not show this path, and will not when asked again."""


@dataclass(frozen=True, slots=True)
class Models:
    """What an engine serves: the ids of its base model, and of the LoRA adapters on it.

    `root` is the path or hub name that the engine loaded the model from; `owner` names the kind of engine.
    """

    served_names: tuple[str, ...]
    lora_names: tuple[str, ...]
    max_model_len: int = 0
    root: str = ""
    owner: str = ""


class _Model(Struct, frozen=True):
    id: Line
    parent: str | None = None
    max_model_len: Amount | None = None
    root: Text | None = None
    owned_by: Text | None = None


class _ModelList(Struct, frozen=True):
    data: Annotated[list[_Model], Meta(max_length=MOST_NAMES)]


class _Version(Struct, frozen=True):
    version: Text = ""


class _Usage(Struct, frozen=True):
    prompt_tokens_details: dict[str, Any] | None = None


class _Completion(Struct, frozen=True):
    usage: _Usage = _Usage()


_decode_models = msgspec.json.Decoder(_ModelList).decode
_decode_version = msgspec.json.Decoder(_Version).decode
_decode_completion = msgspec.json.Decoder(_Completion).decode


def read_models(body: bytes) -> Models:
    """Read /v1/models: an entry with a parent is a LoRA adapter. Raises EngineError."""
    try:
        entries = _decode_models(body).data
    except UNREADABLE as error:
        raise EngineError(f"/v1/models is not in OpenAI's format: {error}") from None
    base = [entry for entry in entries if entry.parent is None]
    if not base:
        raise EngineError("/v1/models lists no base model")
    loras = tuple(entry.id for entry in entries if entry.parent is not None)
    return Models(
        tuple(entry.id for entry in base),
        loras,
        base[0].max_model_len or 0,
        base[0].root or "",
        base[0].owned_by or "",
    )


class EngineHttp:
    """An engine's HTTP server, as a client. Open it with `async with`."""

    def __init__(self, session: aiohttp.ClientSession, extra_metrics: Mapping[str, str]) -> None:
        self.health_path = HEALTH_PATH
        self.metrics_path = "metrics"
        self._extra_metrics = extra_metrics
        self._session = session
        self._has_listed_models = False

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        url: str,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        extra_metrics: Mapping[str, str] | None = None,
    ) -> AsyncIterator[EngineHttp]:
        """A session for the engine at `url`; the key is sent as a bearer token. Raises ConfigError.

        `tls`: for an https:// URL; None: the system's authorities are trusted. `extra_metrics`: additional
        series of /metrics to read (flag --metric): report name -> series.
        """
        headers = {**UNPACKED, "Authorization": f"Bearer {api_key}"} if api_key else UNPACKED
        async with aiohttp.ClientSession(
            address_below(url),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            connector=engine_connector(tls or trusting(None)),
            auto_decompress=False,  # some kilobytes could become gigabytes; UNPACKED asks for plain answers
        ) as session:
            yield cls(session, extra_metrics or {})

    async def models(self) -> Models:
        """The models that the engine serves. Raises EngineError."""
        models = read_models(await self._get(MODELS_PATH))
        self._has_listed_models = True
        return models

    async def version(self) -> str:
        """The engine's version; empty if it reports none."""
        try:
            return _decode_version(await self._get("version")).version
        except (EngineError, *UNREADABLE):
            return ""

    async def scrape(self) -> Scrape:
        """The engine's metrics. Raises EngineError."""
        text = (await self._get(self.metrics_path)).decode(errors="replace")
        try:
            return read_metrics(text, self._extra_metrics)
        except ValueError as error:
            raise EngineError(f"/metrics is not in Prometheus' text format: {error}") from None

    async def trouble(self) -> EngineError | None:
        """Why requests to the engine would fail; None if they would not.

        /health alone does not show it: a data-parallel rank of vLLM that scales or is retired answers 200
        there, and 503 everywhere else. So /v1/models is asked as well, if it has ever answered: it costs the
        engine nothing.
        """
        paths = [self.health_path, *([MODELS_PATH] if self._has_listed_models else [])]
        for path in dict.fromkeys(paths):
            if found := await self._trouble_at(path):
                return found
        return None

    async def _trouble_at(self, path: str) -> EngineError | None:
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
            async with self._session.get(path, timeout=timeout) as response:
                status = response.status
                # a health path that is missing, or wants a key, is that of an engine that is alive
                is_lost = path == MODELS_PATH and status not in _NOT_ABOUT_THE_ENGINE
                if status < 400 or (is_alive(status) and not is_lost):
                    return None
                return EngineStatusError(path, status, await _said(response))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return _no_answer(path, error)

    async def scrape_if_any(self) -> tuple[Scrape, str]:
        """The engine's metrics; or an empty scrape, and why there are none. Raises EngineGoneError."""
        try:
            return await self.scrape(), ""
        except EngineGoneError:
            raise
        except EngineError as error:
            return Scrape(), reason_of(error)

    async def find(self, path: str) -> bytes | None:
        """The body at this path; None if the engine has no such path. Raises EngineError."""
        status, body = await self._answer("GET", path)
        if status == 404:
            return None
        if status == 200:
            return body
        may_change = status in _NOT_NOW or (status >= 500 and status != NOT_IMPLEMENTED)
        raise (EngineStatusError if may_change else HiddenPathError)(path, status)

    async def find_if_shown(self, path: str) -> bytes | None:
        """`find`, with None also where the engine, or a gateway before it, refuses to show this path."""
        try:
            return await self.find(path)
        except HiddenPathError:
            return None

    async def take(self, path: str) -> bytes:
        """What the engine returns once, and then no more, by a POST. Raises EngineError."""
        # a longer answer would be lost
        status, body = await self._answer("POST", path, most_bytes=MOST_TAKEN_BYTES)
        if status != 200:
            raise EngineStatusError(path, status)
        return body

    async def reports_cached_tokens(self, model: str) -> bool | None:
        """Whether answers report the number of cached prompt tokens; None if the engine does not answer.

        The test request has two tokens in and one out: it fills no block, so the cache stays unchanged.
        One token in would end a vLLM 0.33 with ExampleConnector (docs/prefill-decode.md).
        """
        answer = await self.complete(model, [1, 1])
        try:
            usage = _decode_completion(answer).usage if answer is not None else None
        except UNREADABLE:
            return None
        return usage.prompt_tokens_details is not None if usage is not None else None

    async def complete(self, model: str, prompt: Sequence[int]) -> bytes | None:
        """The answer to a completion of one token; None if the engine does not give one."""
        body = {"model": model, "prompt": prompt, "max_tokens": 1}
        try:
            status, answer = await self._answer("POST", "v1/completions", body)
        except EngineError:
            return None
        return answer if status == 200 else None

    async def _get(self, path: str) -> bytes:
        body = await self.find(path)
        if body is None:
            raise EngineStatusError(path, 404)
        return body

    async def _answer(
        self, method: str, path: str, body: object = None, most_bytes: int = MOST_BYTES
    ) -> tuple[int, bytes]:
        try:
            async with self._session.request(method, path, json=body) as response:
                return response.status, await read_answer(response, most_bytes)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _no_answer(path, error) from None


def _no_answer(path: str, error: BaseException) -> EngineError:
    is_gone = isinstance(error, aiohttp.ClientConnectorError) and not tls_trouble(error.__cause__)
    reason = tls_trouble(error.__cause__) or no_answer(error)
    return (EngineGoneError if is_gone else EngineError)(f"/{path}: {reason}")


async def _said(response: aiohttp.ClientResponse) -> str:
    """The beginning of an answer, in one line."""
    try:
        beginning = await response.content.read(_MOST_SAID_BYTES)
    except (aiohttp.ClientError, OSError, TimeoutError):
        return ""
    line = " ".join(beginning.decode(errors="replace").split())
    return "".join(character for character in line if character.isprintable())
