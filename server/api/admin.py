"""The admin application: liveness, readiness, start-up, status and metrics, from the board. Never a lease."""

from __future__ import annotations

import time

from flask import Flask, Response, jsonify

from server.board import Board
from server.health import Health, judge
from server.scrape import MEDIA_TYPE, expose
from server.settings import Settings
from server.status import snapshot


def create_admin_app(settings: Settings, board: Board) -> Flask:
    """Return the application that the admin listener serves."""
    app = Flask("warmserve.admin")
    app.json.sort_keys = False  # type: ignore[attr-defined]

    def health() -> Health:
        return judge(
            board.arbiter.read() or {},
            board.workers().values(),
            now=time.monotonic(),
            min_ready=settings.min_ready,
        )

    @app.get("/livez")
    def livez() -> Response:
        return jsonify(status="alive")

    @app.get("/startupz")
    def startupz() -> tuple[Response, int]:
        began = bool((board.arbiter.read() or {}).get("started"))
        return jsonify(status=health().status, started=began), 200 if began else 503

    @app.get("/readyz")
    def readyz() -> tuple[Response, int]:
        verdict = health()
        body = {"status": verdict.status, "ready_workers": verdict.ready_workers, "reason": verdict.reason}
        return jsonify(body), 200 if verdict.ready else 503

    @app.get("/status")
    def status() -> Response:
        return jsonify(snapshot(board, settings.min_ready))

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(expose(board), content_type=MEDIA_TYPE)

    @app.get("/v2/health/live")
    def live() -> Response:
        return jsonify(live=True)

    @app.get("/v2/health/ready")
    def ready() -> tuple[Response, int]:
        verdict = health()
        return jsonify(ready=verdict.ready), 200 if verdict.ready else 503

    return app
