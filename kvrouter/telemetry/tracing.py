"""Switches traces of requests on, and ends them. Off, nothing of OpenTelemetry is imported (spans.py).

On by `--otlp-endpoint`, or by the variables of OpenTelemetry (OTEL_…), which hold as its SDK reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

import structlog

from kvrouter.errors import ConfigError

if TYPE_CHECKING:
    from kvrouter.telemetry.spans import Tracing

log = structlog.get_logger()

# The end of a process waits this long for its last spans.
FLUSH_S = 3.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_EXTRA = "pip install 'kvrouter[otel]'"


@contextlib.asynccontextmanager
async def open_tracing(
    endpoint: str | None, ratio: float | None, instance: str, environ: Mapping[str, str] = os.environ
) -> AsyncIterator[Tracing | None]:
    """None: tracing is off. Leaving it sends what waits, within FLUSH_S.

    `endpoint`: the collector's URL. `ratio`: the share to sample of the traces that begin here. None: as the
    environment says. Raises ConfigError if the SDK is missing.
    """
    tracing = _new(endpoint, ratio, instance, environ) if _is_wanted(endpoint, environ) else None
    try:
        yield tracing
    finally:
        if tracing is not None:
            await _flush(tracing)


def _is_wanted(endpoint: str | None, environ: Mapping[str, str]) -> bool:
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if endpoint is not None:
        return True
    exporters = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if "otlp" not in exporters or not any(environ.get(name) for name in _ENDPOINTS):
        return False
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), _HTTP)
    if protocol != _HTTP:
        remedy = f"set it to {_HTTP}, with the collector's port for it (4318), or give --otlp-endpoint"
        log.warning("tracing.off", reason=f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}", remedy=remedy)
    return protocol == _HTTP


def _new(
    endpoint: str | None, ratio: float | None, instance: str, environ: Mapping[str, str]
) -> Tracing | None:
    try:
        from kvrouter.telemetry.spans import new_tracing
    except ImportError as error:
        if endpoint is not None:
            raise ConfigError(f"--otlp-endpoint needs the extra otel: {_EXTRA} ({error})") from error
        # the variables may be those of the whole host, so this is no mistake of this command
        log.warning("tracing.off", reason=f"the extra otel is not installed: {error}", remedy=_EXTRA)
        return None
    return new_tracing(endpoint, ratio, instance, environ)


async def _flush(tracing: Tracing) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def shut_down() -> None:
        tracing.shut_down()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(done.set)

    # A thread that the end of the process does not wait for: asyncio waits for those of to_thread.
    threading.Thread(target=shut_down, name="tracing", daemon=True).start()
    try:
        async with asyncio.timeout(FLUSH_S):
            await done.wait()
    except TimeoutError:
        tracing.give_up()
    counts = tracing.counts
    if lost := counts.waiting + counts.failed + counts.dropped:
        log.warning("tracing.spans_lost", lost=lost, sent=counts.sent)
