"""What an engine says over HTTP about itself: models, version, metrics, health."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import msgspec
from msgspec import Struct

from kvrouter.errors import KvRouterError
from kvrouter.worker.load import Scrape, read_metrics

TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 1.0


class EngineError(KvRouterError):
    """The engine does not answer, or not as an engine would."""


@dataclass(frozen=True, slots=True)
class Models:
    """What an engine serves: the ids of its base model, and of the LoRA adapters on it."""

    served_names: tuple[str, ...]
    lora_names: tuple[str, ...]
    max_model_len: int = 0


class _Model(Struct, frozen=True):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _ModelList(Struct, frozen=True):
    data: list[_Model]


class _Version(Struct, frozen=True):
    version: str = ""


_decode_models = msgspec.json.Decoder(_ModelList).decode
_decode_version = msgspec.json.Decoder(_Version).decode


def read_models(body: bytes) -> Models:
    """Read /v1/models: an entry with a parent is a LoRA adapter. Raises EngineError."""
    try:
        entries = _decode_models(body).data
    except msgspec.DecodeError as error:
        raise EngineError(f"/v1/models is not what an OpenAI server answers: {error}") from None
    base = [entry for entry in entries if entry.parent is None]
    if not base:
        raise EngineError("/v1/models names no base model")
    loras = tuple(entry.id for entry in entries if entry.parent is not None)
    return Models(tuple(entry.id for entry in base), loras, base[0].max_model_len or 0)


class EngineHttp:
    """An engine's HTTP server, as a client. Open it with `async with`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, url: str, api_key: str | None = None) -> AsyncIterator[EngineHttp]:
        """A session for the engine at `url`; the key is sent as a bearer token."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(url.rstrip("/") + "/", headers=headers, timeout=timeout) as session:
            yield cls(session)

    async def models(self) -> Models:
        """What the engine serves. Raises EngineError."""
        return read_models(await self._get("v1/models"))

    async def version(self) -> str:
        """The engine's version; empty if it does not tell."""
        try:
            return _decode_version(await self._get("version")).version
        except (EngineError, msgspec.DecodeError):
            return ""

    async def scrape(self) -> Scrape:
        """The engine's metrics. Raises EngineError."""
        text = (await self._get("metrics")).decode(errors="replace")
        try:
            return read_metrics(text)
        except ValueError as error:
            raise EngineError(f"/metrics is not in Prometheus' text format: {error}") from None

    async def is_healthy(self) -> bool:
        """Whether /health answers in time with anything but a server error."""
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
            async with self._session.get("health", timeout=timeout) as response:
                return response.status < 500
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _get(self, path: str) -> bytes:
        try:
            async with self._session.get(path) as response:
                body = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineError(f"/{path}: {error or type(error).__name__}") from None
        if response.status != 200:
            raise EngineError(f"/{path} answered {response.status}")
        return body
