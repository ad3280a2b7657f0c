"""A tiny family of tensors to serve in tests: one input of every kind, and answers that show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from server.families.base import Family, InputError, Instance, TensorSpec, Value

ECHOED = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP64",
          "BF16", "BYTES")  # fmt: skip
MODES = ("", "raise", "wrong datatype", "missing output")


class Scale(torch.nn.Module):
    """A factor for every number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.empty(1, device="meta"))

    def forward(self, matrix: torch.Tensor) -> torch.Tensor:
        """Scale ``(rows, 3) float32``."""
        return matrix * self.factor


class Affine(Family):
    """``matrix`` is scaled, ``BYTES`` become upper case, the rest comes back as it was.

    The parameter ``fail`` is one of ``MODES``: how to break the promises of a family.
    """

    name = "affine"
    inputs = (
        TensorSpec("matrix", "FP32", (-1, 3)),
        *(TensorSpec(f"in_{datatype}", datatype, (-1, -1), optional=True) for datatype in ECHOED),
    )
    outputs = (
        TensorSpec("scaled", "FP32", (-1, 3)),
        *(TensorSpec(f"out_{datatype}", datatype, (-1, -1)) for datatype in ECHOED),
    )

    def build(self) -> torch.nn.Module:
        return Scale()

    def warmup_inputs(self) -> tuple[Mapping[str, Any], ...]:
        return ({},)

    def rehearse(self, instance: Instance, inputs: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        return {"scaled": instance.module(torch.ones(2, 3))}

    def infer(
        self, instance: Instance, inputs: Mapping[str, Value], parameters: Mapping[str, Any]
    ) -> Mapping[str, Value]:
        mode = parameters.get("fail", "")
        if mode not in MODES:
            raise InputError("fail", f"one of {MODES}")
        if mode == "raise":
            raise RuntimeError("asked to fail")
        scaled = instance.module(inputs["matrix"])
        if mode == "missing output":
            return {}
        echoed = {f"out_{datatype}": _echo(inputs.get(f"in_{datatype}"), datatype) for datatype in ECHOED}
        return {"scaled": scaled.double() if mode == "wrong datatype" else scaled, **echoed}


def _echo(value: Value | None, datatype: str) -> Value:
    if isinstance(value, np.ndarray):
        upper = np.empty(value.size, object)
        upper[:] = [item.upper() for item in value.ravel()]
        return upper.reshape(value.shape)
    if value is not None:
        return value
    return np.empty((0, 0), object) if datatype == "BYTES" else torch.empty((0, 0), dtype=_dtype(datatype))


def _dtype(datatype: str) -> torch.dtype:
    names = {"BOOL": "bool", "FP16": "float16", "FP64": "float64", "BF16": "bfloat16"}
    dtype: torch.dtype = getattr(torch, names.get(datatype, datatype.lower()))
    return dtype
