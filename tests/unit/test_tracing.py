"""Spans of a request: in the trace its caller names, with the parts it went through, in order."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from pydantic import ValidationError

from server.settings import Settings
from server.tracing import Tracing
from tests.unit.served import app_for_tone, end_threads

SPEECH = {"model": "tone", "input": "hello", "voice": "sine", "response_format": "pcm"}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def app(exporter: InMemorySpanExporter) -> Iterator[Flask]:
    yield app_for_tone(Tracing(SimpleSpanProcessor(exporter)).trace)
    end_threads()


def speak(app: Flask, flags: str = "01", **changes: Any) -> int:
    """Speak within the caller's trace; return the status."""
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "X-Request-ID": "mine"}
    answer = app.test_client().post("/v1/audio/speech", json=SPEECH | changes, headers=headers)
    answer.close()
    return answer.status_code


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_request_is_a_span_of_its_callers_trace_with_its_parts_inside(
    app: Flask, exporter: InMemorySpanExporter
) -> None:
    assert speak(app) == 200
    found = spans(exporter)
    assert list(found) == ["queue", "inference", "encode", "POST /v1/audio/speech"]
    server = found.pop("POST /v1/audio/speech")
    assert f"{server.context.trace_id:032x}" == TRACE
    assert server.parent is not None and f"{server.parent.span_id:016x}" == PARENT
    assert server.kind is SpanKind.SERVER and server.status.status_code is StatusCode.UNSET
    wanted = {
        "http.request.method": "POST", "http.route": "/v1/audio/speech", "http.response.status_code": 200,
        "warmserve.request_id": "mine", "warmserve.model": "tone", "warmserve.version": "v1",
        "warmserve.voice": "sine",
    }  # fmt: skip
    assert server.attributes is not None and wanted.items() <= server.attributes.items()
    assert server.resource.attributes["service.name"] == "warmserve"
    assert server.start_time is not None and server.end_time is not None
    for part in found.values():
        assert part.parent is not None and part.parent.span_id == server.context.span_id
        assert part.start_time is not None and part.end_time is not None
        assert server.start_time <= part.start_time <= part.end_time <= server.end_time
    ended, began = found["queue"].end_time, found["inference"].start_time
    assert ended is not None and began is not None and ended <= began


def test_trace_id_is_in_the_event(app: Flask, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmserve")
    speak(app)
    served = [r.fields for r in caplog.records if getattr(r, "event", "") == "request_served"]
    assert [fields["trace_id"] for fields in served] == [TRACE]


def test_refused_request_has_no_parts_and_a_failed_one_is_an_error(
    app: Flask, exporter: InMemorySpanExporter
) -> None:
    assert speak(app, voice="nobody") == 400
    (refused,) = exporter.get_finished_spans()
    assert refused.status.status_code is StatusCode.UNSET
    assert refused.attributes is not None and refused.attributes["error.type"]
    exporter.clear()
    assert speak(app, input="raise!") == 500
    assert spans(exporter)["POST /v1/audio/speech"].status.status_code is StatusCode.ERROR


def test_what_the_caller_does_not_sample_is_not_sent(app: Flask, exporter: InMemorySpanExporter) -> None:
    assert speak(app, flags="00") == 200
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("parent", ["", "00", "00-zz-zz-01", f"00-{'0' * 32}-{PARENT}-01", "\u00e9" * 400])
def test_wrong_traceparent_begins_a_trace(app: Flask, exporter: InMemorySpanExporter, parent: str) -> None:
    app.test_client().get("/v1/models", headers={"traceparent": parent}).close()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None and span.context.trace_id != 0


def test_unknown_path_does_not_name_a_span(app: Flask, exporter: InMemorySpanExporter) -> None:
    app.test_client().get("/any/path/at/all").close()
    assert list(spans(exporter)) == ["GET"]


def test_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "voices")
    exporter = InMemorySpanExporter()
    app = app_for_tone(Tracing(SimpleSpanProcessor(exporter)).trace)
    app.test_client().get("/v1/models").close()
    (span,) = exporter.get_finished_spans()
    assert span.resource.attributes["service.name"] == "voices"


def test_setting_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ValidationError, match=r"warmserve\[tracing\]"):
        Settings(tracing=True)
    assert not Settings().tracing


def test_opentelemetry_is_not_needed_to_serve() -> None:
    """Nothing that serving imports imports it."""
    code = "import sys, server.worker, server.arbiter; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
