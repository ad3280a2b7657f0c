"""The data application over a tiny family, without gunicorn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from flask import Flask

from server.api.exchange import Served
from server.api.record import Tracer
from server.app import create_app
from server.families.base import Family, Instance
from server.pool import InstancePool
from server.settings import Settings
from tests.apps.affine.affine import Affine, Scale
from tests.apps.tone.tone import Oscillator, Tone

_made: list[Served] = []


def end_threads() -> None:
    """End the computing threads of every application made so far: other tests count threads."""
    while _made:
        _made.pop().threads.shutdown()


def app_for_tone(trace: Tracer | None = None, **settings: Any) -> Flask:
    """Return the application; its ``Served`` is in ``config["SERVED"]``."""
    module = Oscillator(16, 0)
    module.gain = torch.nn.Parameter(torch.full((16,), 0.5), requires_grad=False)
    return app_for("tone", Tone(Path(), {}), module, trace, **settings)


def app_for_affine(**settings: Any) -> Flask:
    """Return the same over tensors of every datatype; the factor is 2."""
    module = Scale()
    module.factor = torch.nn.Parameter(torch.full((1,), 2.0), requires_grad=False)
    return app_for("affine", Affine(Path(), {}), module, **settings)


def app_for(
    name: str, family: Family, module: torch.nn.Module, trace: Tracer | None = None, **settings: Any
) -> Flask:
    """Return the application that serves *module* under *name*."""
    instance = Instance(module=module, device=torch.device("cpu"), number=0)
    pool = InstancePool([instance], version="v1")
    digest = settings.pop("manifest_sha256", "")
    served = Served(name=name, version="v1", family=family, pool=pool, created=1, manifest_sha256=digest)
    _made.append(served)
    app = create_app(Settings(**settings), [served], trace=trace)
    app.config["SERVED"] = served
    return app
