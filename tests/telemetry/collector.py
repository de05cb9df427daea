"""An OTLP/HTTP receiver: it decodes the protobufs that a collector gets."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Span(NamedTuple):
    """A received span; ids in hex, an empty parent for a root."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    begun_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    events: list[str]
    has_failed: bool
    why: str
    resource: dict[str, Any]


class Collector:
    """Keeps what it receives. `status`: its answer."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.status = 200
        self.url = ""

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Span:
        (span,) = self.named(name)
        return span

    async def take(self, http: web.Request) -> web.Response:
        data = await http.read()
        if http.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        assert "application/x-protobuf" == http.content_type
        if self.status == 200:
            self.spans += _spans(ExportTraceServiceRequest.FromString(data))
        return web.Response(status=self.status)


def _spans(message: ExportTraceServiceRequest) -> list[Span]:
    return [
        Span(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.kind,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _values(span.attributes),
            [event.name for event in span.events],
            span.status.code == 2,
            span.status.message,
            _values(of_process.resource.attributes),
        )
        for of_process in message.resource_spans
        for scope in of_process.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A collector on a free port."""
    collector, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()
