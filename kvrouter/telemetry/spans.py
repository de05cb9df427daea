"""The spans of requests, with OpenTelemetry's SDK. Imported by tracing.py only, when tracing is on.

    Trace ──ended spans──> Queue, at most 2,048 ──thread──> Exporter ──OTLP/HTTP──> collector

A collector that is slow or away costs spans and nothing else: a full queue drops and counts them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from kvrouter.errors import ConfigError
from kvrouter.telemetry.metrics import Sample
from kvrouter.version import __version__

log = structlog.get_logger()

QUEUE_SPANS = 2048  # the default of OTEL_BSP_MAX_QUEUE_SIZE
TRACES_PATH = "/v1/traces"
_W3C = TraceContextTextMapPropagator()

Facts = Mapping[str, AttributeValue]


class Trace:
    """The spans of one request. `receive`, the root, continues the client's trace if that has one.

    Times are readings of `time.perf_counter`.
    """

    __slots__ = ("_context", "_offset_ns", "_root", "_tracer", "id", "is_recorded")

    def __init__(self, tracer: Tracer, fields: Sequence[tuple[str, str]], began: float) -> None:
        """`fields`: the request's headers."""
        self._tracer = tracer
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        parent, kind = _context_of(fields), SpanKind.SERVER
        self._root = tracer.start_span("receive", parent, kind, start_time=self._ns(began))
        self._context = set_span_in_context(self._root, Context())
        self.id = f"{self._root.get_span_context().trace_id:032x}"
        self.is_recorded = self._root.is_recording()
        """Whether it is sampled; if not, it has ids only, for the headers."""

    def step(
        self, name: str, began: float, ended: float, facts: Facts | None = None, *, under: Span | None = None
    ) -> None:
        """A step that has ended, below the root or another span."""
        context = self._context if under is None else set_span_in_context(under, Context())
        span = self._tracer.start_span(name, context, attributes=facts, start_time=self._ns(began))
        span.end(self._ns(ended))

    def upstream(self, began: float, facts: Facts) -> Span:
        """An attempt at a worker, which is going on."""
        kind = SpanKind.CLIENT
        return self._tracer.start_span("upstream", self._context, kind, facts, start_time=self._ns(began))

    def event(self, span: Span, name: str, at: float) -> None:
        span.add_event(name, timestamp=self._ns(at))

    def end(
        self, span: Span | None, ended: float, facts: Facts, error: str = "", bug: BaseException | None = None
    ) -> None:
        """End an attempt, None: the root. `error`: why it failed; empty: it did not."""
        span = self._root if span is None else span
        span.set_attributes(facts)
        if bug is not None:
            span.record_exception(bug)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self._ns(ended))

    def headers(self, span: Span | None) -> str:
        """The lines of a request's head that name an attempt as the parent; None: the root."""
        context = (self._root if span is None else span).get_span_context()
        line = f"traceparent: 00-{self.id}-{context.span_id:016x}-{context.trace_flags:02x}\r\n"
        return f"{line}tracestate: {context.trace_state.to_header()}\r\n" if context.trace_state else line

    def _ns(self, at: float) -> int:
        return self._offset_ns + int(at * 1e9)


def _context_of(fields: Sequence[tuple[str, str]]) -> Context:
    """The client's trace (W3C), from exactly one `traceparent`; else an empty context."""
    found: dict[str, list[str]] = {}
    for name, value in fields:
        if name in {"traceparent", "tracestate"}:
            found.setdefault(name, []).append(value)
    return _W3C.extract(found, Context()) if len(found.get("traceparent", ())) == 1 else Context()


class Counts:
    """How many spans became what. Each number is written by one thread only."""

    def __init__(self) -> None:
        self.taken = self.dropped = 0  # by the event loop
        self.sent = self.failed = 0  # by the exporter's thread

    @property
    def waiting(self) -> int:
        return self.taken - self.sent - self.failed


class Tracing:
    """Makes traces, and counts what becomes of their spans."""

    def __init__(self, provider: TracerProvider, exporter: Exporter, counts: Counts) -> None:
        self._tracer = provider.get_tracer("kvrouter", __version__)
        self.shut_down = provider.shutdown
        """Sends what waits. Takes as long as the collector does, until `give_up` is called."""
        self.give_up = exporter.shutdown
        self.counts = counts

    def begin(self, fields: Sequence[tuple[str, str]], began: float) -> Trace:
        return Trace(self._tracer, fields, began)

    def samples(self) -> Iterator[Sample]:
        counts, _text = (
            self.counts,
            "Spans sent, not taken by the collector, and dropped as the queue was full",
        )
        for outcome, count in (("sent", counts.sent), ("failed", counts.failed), ("dropped", counts.dropped)):
            yield "kvrouter_spans_total", {"outcome": outcome}, count


def new_tracing(
    endpoint: str | None, ratio: float | None, instance: str, environ: Mapping[str, str]
) -> Tracing:
    """`endpoint`, `ratio`: None: as OpenTelemetry's variables say. Raises ConfigError if they are wrong."""
    facts = {"service.version": __version__, "service.instance.id": instance}
    of_resource = environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not environ.get("OTEL_SERVICE_NAME") and "service.name=" not in of_resource:
        facts["service.name"] = "kvrouter"
    provider = TracerProvider(
        sampler=None if ratio is None else ParentBasedTraceIdRatio(ratio),
        resource=Resource.create(facts),
        shutdown_on_exit=False,
    )
    counts = Counts()
    exporter = Exporter(
        OTLPSpanExporter(endpoint=None if endpoint is None else _traces_url(endpoint)), counts
    )
    most = environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
    try:
        queue = Queue(exporter, int(most) if most.isdecimal() else QUEUE_SPANS, counts)
    except ValueError as error:
        raise ConfigError(f"OTEL_BSP_…: {error}") from error
    provider.add_span_processor(queue)
    return Tracing(provider, exporter, counts)


def _traces_url(endpoint: str) -> str:
    """As OpenTelemetry makes it of OTEL_EXPORTER_OTLP_ENDPOINT; a URL that has the path already stays."""
    base = endpoint.rstrip("/")
    return base if base.endswith(TRACES_PATH) else base + TRACES_PATH


class Queue(BatchSpanProcessor):
    """Counts what it drops when it is full. The SDK alone (1.45) logs a line for each instead."""

    def __init__(self, exporter: SpanExporter, most: int, counts: Counts) -> None:
        super().__init__(exporter, max_queue_size=most)
        self._most, self._counts = most, counts

    def on_end(self, span: ReadableSpan) -> None:
        """Called from the event loop: nothing here waits."""
        if self._counts.waiting >= self._most:
            self._counts.dropped += 1
            return
        self._counts.taken += 1
        super().on_end(span)


class _LastWords(logging.Handler):
    """Keeps what the SDK logged last: an exporter returns no reason."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.startswith("Shutdown"):  # at the end it says only that it stops trying
            self.text = text


class Exporter(SpanExporter):
    """Counts, and logs the first failure and the end of failures, where the SDK logs each attempt."""

    def __init__(self, inner: SpanExporter, counts: Counts) -> None:
        self._inner = inner
        self._counts = counts
        self._is_failing = False
        self._words = _LastWords(logging.WARNING)
        sdk = logging.getLogger("opentelemetry")
        sdk.handlers, sdk.propagate = [self._words], False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Called from the processor's thread. Tries for OTEL_EXPORTER_OTLP_TIMEOUT, 10 s."""
        try:
            result = self._inner.export(spans)
        except Exception as error:  # an unreachable collector, in the SDK's 1.30
            result, self._words.text = SpanExportResult.FAILURE, str(error)
        if result is SpanExportResult.SUCCESS:
            self._counts.sent += len(spans)
            self._succeeded()
        else:
            self._counts.failed += len(spans)
            self._failed()
        return result

    def _succeeded(self) -> None:
        if self._is_failing:
            self._is_failing = False
            log.info("tracing.exports_again")

    def _failed(self) -> None:
        if not self._is_failing:
            self._is_failing = True
            log.warning("tracing.export_failed", reason=self._words.text[:500])

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)
