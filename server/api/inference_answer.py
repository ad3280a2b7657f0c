"""The body of an answer of the Open Inference Protocol: JSON, and behind it what was asked for as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from server.api import tensors
from server.api.inference_body import Inference
from server.families.base import Value


def render(
    inference: Inference, values: Mapping[str, Value], *, model: str, version: str
) -> tuple[bytes, int | None]:
    """Return the answer's body and, when tensors follow its JSON, the length of the JSON.

    Raises:
        InvalidField: an output was asked for in JSON and JSON cannot hold it.
    """
    rows, blobs = [], []
    for output in inference.outputs:
        spec, value = output.spec, values[output.spec.name]
        row: dict[str, Any] = {"name": spec.name, "shape": list(value.shape), "datatype": spec.datatype}
        if output.binary:
            blobs.append(tensors.to_binary(value))
            row["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            row["data"] = tensors.to_json(spec, value)
        rows.append(row)
    table: dict[str, Any] = {"model_name": model, "model_version": version}
    if inference.id is not None:
        table["id"] = inference.id
    head = json.dumps(table | {"outputs": rows}, allow_nan=False, separators=(",", ":")).encode()
    return b"".join([head, *blobs]), len(head) if blobs else None
