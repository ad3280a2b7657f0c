"""The usual way, to compare with: a Flask route around a module that each worker loads for itself."""

from __future__ import annotations

import os

import torch
from flask import Flask, Response, jsonify, request

from benchmarks.mlp import create_mlp

torch.set_num_threads(1)
app = Flask("bare")
model = create_mlp()
model.load_state_dict(torch.load(os.environ["BARE_WEIGHTS"], weights_only=True))


@app.post("/predict")
def predict() -> Response:
    """Run the module on ``{"x": rows}``."""
    with torch.inference_mode():
        return jsonify(y=model(torch.tensor(request.get_json()["x"])).tolist())
