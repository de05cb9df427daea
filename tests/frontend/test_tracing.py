"""Traces of requests, as a collector receives them."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from structlog.testing import capture_logs

from kvrouter.errors import ConfigError
from kvrouter.telemetry import tracing
from kvrouter.telemetry.spans import Counts, Exporter, Queue
from kvrouter.telemetry.tracing import open_tracing
from tests.frontend.fleet import BODY, STREAM, FleetOf
from tests.frontend.test_access_log import DIES, STREAMED, events
from tests.frontend.workers import (
    OK,
    SSE_HEAD,
    WAIT_S,
    chunk,
    event,
    in_turn,
    says_and_resets,
    says_and_stalls,
    until,
)
from tests.telemetry.collector import Collector, Span, collecting

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"traceparent: 00-{TRACE}-{PARENT}-01"
_SERVER, _CLIENT = 2, 3


def under(collector: Collector, parent: Span) -> list[str]:
    """The names of a span's children, in the order of their beginnings."""
    children = [span for span in collector.spans if span.parent == parent.id]
    return [span.name for span in sorted(children, key=lambda span: span.begun_ns)]


def head_of(received: Any, name: str) -> list[str]:
    """The values of this header in a request that a worker got."""
    return re.findall(rf"^{name}: (.*)\r$", received.head.decode(), re.MULTILINE | re.IGNORECASE)


async def test_one_request(fleet_of: FleetOf) -> None:
    """The client's trace goes on: a span for each step, the decision with its terms, the worker's parent."""
    async with collecting() as collector:
        flags = ("--otlp-endpoint", collector.url, "--router-mode", "kv", "--router-queue-threshold", "4")
        async with fleet_of(*flags, "--access-log", "all", scripts=(STREAMED, STREAMED)) as fleet:
            await fleet.ask(STREAM, SAMPLED, "tracestate: v=1", "x-request-id: r1")
            (received,) = [one for worker in fleet.workers for one in worker.requests]
            (logged,) = events(fleet)

        root, upstream, decide = map(collector.one, ("receive", "upstream", "decide"))
        assert (TRACE, PARENT, _SERVER) == (root.trace, root.parent, root.kind)
        assert {TRACE} == {span.trace for span in collector.spans}
        assert ["tokenize", "queue", "decide", "upstream"] == under(collector, root)
        assert ["stream"] == under(collector, upstream)
        assert (_CLIENT, ["first byte"]) == (upstream.kind, upstream.events)
        assert [f"00-{TRACE}-{upstream.id}-01"] == head_of(received, "traceparent")
        assert ["v=1"] == head_of(received, "tracestate")
        assert {"w0/0", "w1/0"} == {decide.attributes["kvrouter.choice"], decide.attributes["kvrouter.next"]}
        assert decide.attributes["kvrouter.terms.cost"] == decide.attributes["kvrouter.next_terms.cost"]
        assert ("r1", "ok", 200, "m", 64) == tuple(
            root.attributes[name]
            for name in (
                "kvrouter.request_id",
                "kvrouter.outcome",
                "http.response.status_code",
                "gen_ai.request.model",
                "gen_ai.usage.input_tokens",
            )
        )
        assert TRACE == logged["trace"]
        assert "kvrouter" == root.resource["service.name"]
        assert all(root.begun_ns <= one.begun_ns <= one.ended_ns <= root.ended_ns for one in collector.spans)


async def test_retries(fleet_of: FleetOf) -> None:
    """Each attempt is a decision and a span of its own, side by side; the failed one says why."""
    async with collecting() as collector:
        flags = ("--otlp-endpoint", collector.url, "--retries", "2")
        script = in_turn(DIES, OK)
        async with fleet_of(*flags, scripts=(script, script)) as fleet:
            await fleet.ask()
        root = collector.one("receive")
        first, second = sorted(collector.named("upstream"), key=lambda span: span.begun_ns)

        assert (True, "lost", 1) == (
            first.has_failed, first.attributes["error.type"], first.attributes["kvrouter.attempt"]
        )  # fmt: skip
        assert (False, 200, 2) == (
            second.has_failed,
            second.attributes["http.response.status_code"],
            second.attributes["kvrouter.attempt"],
        )
        assert ["decide", "upstream"] * 2 == under(collector, root)
        assert (False, 1) == (root.has_failed, root.attributes["kvrouter.retries"])


async def test_failures(fleet_of: FleetOf) -> None:
    """An answer that breaks off and a bug are errors; a client's mistake is not, but says what it was."""
    async with collecting() as collector:
        script = says_and_resets(SSE_HEAD, chunk(event("a")))
        async with fleet_of("--otlp-endpoint", collector.url, scripts=(script,)) as fleet:
            await fleet.ask(STREAM)
            await fleet.ask({"model": "x", "prompt": "p"})
            fleet.frontend.completions.accept.work = None  # type: ignore[assignment]
            await fleet.ask()
            fleet.trouble.logs.clear()
        roots = {span.attributes["http.response.status_code"]: span for span in collector.named("receive")}

        assert (True, "broken") == (roots[200].has_failed, roots[200].attributes["error.type"])
        assert roots[200].why.startswith("the worker broke off")
        assert (True, "broken") == (
            collector.one("upstream").has_failed,
            collector.one("upstream").attributes["error.type"],
        )
        assert (False, "refused") == (roots[404].has_failed, roots[404].attributes["kvrouter.outcome"])
        assert "model" in roots[404].attributes["kvrouter.error"]
        assert (True, ["exception"]) == (roots[500].has_failed, roots[500].events)


async def test_client_that_left(fleet_of: FleetOf) -> None:
    """Its spans end, with what there was until then."""
    async with collecting() as collector:
        script = says_and_stalls(SSE_HEAD, chunk(event("a")))
        async with fleet_of("--otlp-endpoint", collector.url, scripts=(script,)) as fleet:
            async with fleet.connected() as client:
                client.send(STREAM)
                await client.read_until(event("a"))
                client.leave()
                await fleet.until_free()
            await until(lambda: not fleet.frontend.completions.in_flight.count)

        assert {"tokenize", "decide", "receive", "upstream", "stream"} >= {
            one.name for one in collector.spans
        }
        assert "left" == collector.one("receive").attributes["kvrouter.outcome"]
        assert "cancelled" == collector.one("upstream").attributes["error.type"]
        assert 1 == collector.one("stream").attributes["kvrouter.events"]


@pytest.mark.parametrize(
    ("flags", "header", "flag"),
    [
        (("--trace-sample-ratio", "0"), "x-a: b", "00"),
        (("--trace-sample-ratio", "0"), SAMPLED, "01"),
        ((), f"traceparent: 00-{TRACE}-{PARENT}-00", "00"),
        ((), f"traceparent: 00-{TRACE}-zz-01", "01"),
    ],
)
async def test_sampling(fleet_of: FleetOf, flags: tuple[str, ...], header: str, flag: str) -> None:
    """The client's choice holds, else the ratio; a worker hears of it in either case."""
    async with collecting() as collector:
        async with fleet_of("--otlp-endpoint", collector.url, *flags, scripts=(OK,)) as fleet:
            await fleet.ask(BODY, header)
            (sent,) = head_of(fleet.workers[0].requests[0], "traceparent")

        found = re.fullmatch(r"00-([0-9a-f]{32})-[0-9a-f]{16}-0([0-3])", sent)
        assert found is not None
        assert int(flag) == int(found[2]) & 1
        assert (PARENT in header and "zz" not in header) == (TRACE == found[1])
        assert bool(int(flag)) == bool(collector.named("receive"))


async def test_off(fleet_of: FleetOf) -> None:
    """Without it the client's context reaches the worker as it is, in whatever form."""
    given = ("traceparent: 00-zz", "tracestate: a=1", "tracestate: b=2")
    async with fleet_of(scripts=(OK,)) as fleet:
        await fleet.ask(BODY, *given)
        received = fleet.workers[0].requests[0]

        assert ["00-zz"] == head_of(received, "traceparent")
        assert ["a=1", "b=2"] == head_of(received, "tracestate")
        assert b"kvrouter_spans" not in (await fleet.get("/metrics")).body


async def test_collector_that_is_away(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are served; it is logged once, counted, and the end waits no longer than FLUSH_S."""
    monkeypatch.setattr(tracing, "FLUSH_S", 0.2)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    async with collecting() as collector:
        collector.status = 400
        async with fleet_of("--otlp-endpoint", collector.url, scripts=(OK,)) as fleet:
            for _ in range(3):
                assert 200 == (await fleet.ask()).status
            await until(lambda: fleet.logged("tracing.export_failed"))
            metrics, failed = b"", b'kvrouter_spans_total{outcome="failed"} 9.0'
            async with asyncio.timeout(WAIT_S):
                while failed not in metrics:
                    metrics = (await fleet.get("/metrics")).body
            assert 1 == len(fleet.logged("tracing.export_failed"))
        assert "400" in fleet.logged("tracing.export_failed")[0]["reason"]
        assert [9] == [one["lost"] for one in fleet.logged("tracing.spans_lost")]
    async with fleet_of("--otlp-endpoint", collector.url, scripts=(OK,)) as fleet:  # it is gone now
        assert 200 == (await fleet.ask()).status
    assert 1 == len(fleet.logged("tracing.spans_lost"))


def test_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds it full is dropped at once, and counted: nothing waits for the collector."""
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    going_on = threading.Event()

    class Stuck(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            going_on.wait()
            return SpanExportResult.SUCCESS

    counts = Counts()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Queue(Exporter(Stuck(), counts), 3, counts))
    tracer = provider.get_tracer("t")
    for _ in range(10):
        tracer.start_span("s").end()

    assert (3, 7) == (counts.taken, counts.dropped)
    going_on.set()
    provider.shutdown()
    assert (3, 0) == (counts.sent, counts.waiting)


@pytest.mark.parametrize(
    ("environ", "is_on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, False),
    ],
)
async def test_variables(environ: dict[str, str], is_on: bool) -> None:
    """OpenTelemetry's variables switch it on and off."""
    with capture_logs() as logs:
        async with open_tracing(None, None, "r", environ) as found:
            assert is_on == (found is not None)

    assert ["tracing.off"] * ("OTEL_EXPORTER_OTLP_PROTOCOL" in environ) == [one["event"] for one in logs]


async def test_wrong_variables() -> None:
    """A queue smaller than a batch ends the start with the reason."""
    environ = {"OTEL_BSP_MAX_QUEUE_SIZE": "3"}
    with pytest.raises(ConfigError, match="max_queue_size"):
        async with open_tracing("http://c:4318", None, "r", environ):
            pass


async def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag is an error that names it; the variables, which may be the host's, are a warning."""
    monkeypatch.setitem(sys.modules, "kvrouter.telemetry.spans", None)
    with pytest.raises(ConfigError, match=r"kvrouter\[otel\]"):
        async with open_tracing("http://c:4318", None, "r", {}):
            pass
    with capture_logs() as logs:
        async with open_tracing(None, None, "r", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}) as found:
            assert found is None

    assert ["kvrouter[otel]" in one["remedy"] for one in logs] == [True]


def test_off_imports_nothing() -> None:
    """A frontend without traces has nothing of OpenTelemetry in its memory."""
    code = "import sys, kvrouter.frontend.run; sys.exit(any('opentelemetry' in name for name in sys.modules))"

    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode
