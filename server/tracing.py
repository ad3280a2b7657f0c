"""OpenTelemetry spans of one worker's requests, made when a request has ended. Needs the `tracing` extra.

Where they go is for the SDK's own variables to say: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, ...
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.api.record import Record

# Ours in the event, the semantic conventions' in a span (OpenTelemetry semantic conventions for HTTP).
HTTP_NAMES = {
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
    "code": "error.type",
}
CLOSE_S = 2.0  # a collector that does not answer holds a leaving worker no longer


def create_tracing() -> Tracing:
    """Return the tracing of this process, to a collector. After the fork: it starts a thread."""
    return Tracing(BatchSpanProcessor(OTLPSpanExporter()))


class Tracing:
    """Turns ended requests into spans for *processor*: one of the server, and one for each part in it."""

    def __init__(self, processor: SpanProcessor) -> None:
        # The environment (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) has the last word on the name.
        named = Resource.create().merge(Resource({"service.name": "warmserve"}))
        self._provider = TracerProvider(
            resource=named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("warmserve")
        self._propagator = TraceContextTextMapPropagator()

    def trace(self, environ: Mapping[str, Any], record: Record, event: Mapping[str, Any]) -> str:
        """Make the spans of one ended request; return its trace's id, 32 hexadecimal digits.

        The trace is the one that *environ*'s traceparent names, or a new one.
        """
        headers = {name: environ.get(f"HTTP_{name.upper()}", "") for name in self._propagator.fields}
        to_epoch_ns = time.time_ns() - time.monotonic_ns()

        def epoch_ns(monotonic_s: float) -> int:
            return int(monotonic_s * 1e9) + to_epoch_ns

        span = self._tracer.start_span(
            f"{event['method']} {record.route}".rstrip(),
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes=_attributes(record, event),
            start_time=epoch_ns(record.began),
        )
        inside = trace.set_span_in_context(span)
        for name, (began, ended) in record.parts.items():
            self._tracer.start_span(name, inside, start_time=epoch_ns(began)).end(epoch_ns(ended))
        if event["status"] >= 500 or ("code" in event and event["status"] < 400):  # failed, or broke off
            span.set_status(Status(StatusCode.ERROR))
        span.end(epoch_ns(time.monotonic()))
        return trace.format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        """Send what is still here, for a moment."""
        # In a thread: the exporter's own deadline ends attempts, not the connection that it waits for.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def _attributes(record: Record, event: Mapping[str, Any]) -> dict[str, Any]:
    named = {HTTP_NAMES.get(key, f"warmserve.{key}"): value for key, value in event.items()}
    return named | ({"http.route": record.route} if record.route else {})
