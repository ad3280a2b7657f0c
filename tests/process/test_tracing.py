"""Spans of real workers reach a collector, the last ones when their worker leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.service import Server, eventually

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPEECH = {"model": "tone", "input": "hello", "voice": "sine", "response_format": "mp3"}


class Collector:
    """An OTLP receiver over HTTP that keeps the names of spans by their trace."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.keep(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "WARMSERVE_TRACING": "1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}",
        }

    def keep(self, batch: ExportTraceServiceRequest) -> None:
        for of_resource in batch.resource_spans:
            named = {a.key: a.value.string_value for a in of_resource.resource.attributes}
            self.services.add(named["service.name"])
            for span in (s for scope in of_resource.scope_spans for s in scope.spans):
                self.names.setdefault(span.trace_id.hex(), []).append(span.name)

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.stop()


def test_spans_reach_a_collector(launch: Callable[..., Server], models: Path, collector: Collector) -> None:
    # Sent in batches, every 5 s: these go when the workers leave.
    server = launch(models, env=collector.environment | {"OTEL_BSP_SCHEDULE_DELAY": "600000"}).wait_ready()
    with server.client() as client:
        headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        client.post("/v1/audio/speech", json=SPEECH, headers=headers).raise_for_status()
    assert server.stop() == 0
    assert f"trace_id={TRACE}" in server.logged("request_served")[-1]
    assert sorted(collector.names[TRACE]) == ["POST /v1/audio/speech", "encode", "inference", "queue"]
    assert collector.services == {"warmserve"}


def test_collector_that_is_away_costs_no_request(launch: Callable[..., Server], models: Path) -> None:
    """A closed port, and then the end: it must come in time."""
    gone = Collector()
    environment = gone.environment
    gone.stop()
    server = launch(models, env=environment).wait_ready()
    with server.client() as client:
        for _ in range(5):
            client.post("/v1/audio/speech", json=SPEECH).raise_for_status()
    eventually(lambda: len(server.logged("request_served")) == 5)
    assert server.stop() == 0
    assert "Traceback" not in server.log_text()
