"""The family ``torch_export``: any program of `torch.export`, its weights apart, described by its manifest.

The archive holds the graph; parameters and buffers come from the version's safetensors like any other's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import InputKind, TensorArgument
from torch.utils import _pytree as pytree

from server.families.base import DTYPES, Family, InputError, Instance, TensorSpec, Value
from server.families.torch_export.archive import ProgramRefused, check_archive

PROGRAM = "program.pt2"
# How torch words what a program's own limits refuse, such as a size that has to be even.
OWN_LIMITS = re.compile("Expected input |Guard failed: ")
WARMUP_SIZE = 8  # of each dimension that a request chooses, where the program allows it


class TorchExport(Family):
    """Tensors in, tensors out, by the names and shapes of ``config``.

    ``config`` has ``inputs`` and ``outputs``, lists of ``{"name", "datatype", "shape"}``, where a size that
    requests choose has a name, the same in all inputs where it has to be the same; ``dimensions`` gives
    the limits of each, ``{"batch": [1, 64]}``, the upper one null if there is none. An input may have
    ``limits``, the least and the greatest value of its elements: an index outside a table would otherwise
    be found by the operator, which cannot tell the client.

    Made in the master before it forks: reading the program costs 1.5 s the first time, nearly all of it
    torch's own imports, and starts no thread.
    """

    name = "torch_export"

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        super().__init__(directory, config)
        check_archive(directory / PROGRAM)
        self._program = torch.export.load(directory / PROGRAM)
        self.inputs = tuple(_spec(row) for row in config["inputs"])
        self.outputs = tuple(_spec(row) for row in config["outputs"])
        signature = self._program.graph_signature
        self._arguments = [spec.arg for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
        taken = [argument.name for argument in self._arguments if isinstance(argument, TensorArgument)]
        if sorted(taken) != sorted(spec.name for spec in self.inputs):
            raise ProgramRefused(f"config.inputs: the program takes {', '.join(taken)}")
        if len(signature.user_outputs) != len(self.outputs):
            raise ProgramRefused(f"config.outputs: the program gives {len(signature.user_outputs)}")

    def build(self) -> torch.nn.Module:
        """Return the program as a module; what the archive holds as constants is real already."""
        module: torch.nn.Module = self._program.module()
        # An exported program has no modes; attaching asks for one.
        module.eval = lambda: module  # type: ignore[method-assign]
        return module

    def warmup_inputs(self) -> tuple[Mapping[str, Any], ...]:
        """Return the sizes of the smallest and of a larger request, by dimension."""
        limits = self.config.get("dimensions", {})
        small = {name: max(1, low) for name, (low, _) in limits.items()}
        large = {
            name: max(small[name], WARMUP_SIZE if high is None else min(high, WARMUP_SIZE))
            for name, (_, high) in limits.items()
        }
        return (small, large) if limits else ({},)

    def rehearse(self, instance: Instance, inputs: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """Run on ones, or in floating point on numbers from 0 to 1, of the sizes that *inputs* gives."""
        values = {row["name"]: _example(row, inputs) for row in self.config["inputs"]}
        # An output may have no element, such as the boxes in an image that shows nothing.
        return {name: out for name, out in self._run(instance, values).items() if out.numel()}

    def infer(
        self, instance: Instance, inputs: Mapping[str, Value], parameters: Mapping[str, Any]
    ) -> Mapping[str, Value]:
        """Run the program once."""
        self._check_sizes(inputs)
        for row in self.config["inputs"]:
            _check_limits(row, inputs[row["name"]])
        return self._run(instance, inputs)

    def _check_sizes(self, inputs: Mapping[str, Value]) -> None:
        """Hold the sizes that requests choose to their limits, and those of one name to one size."""
        limits, sizes = self.config.get("dimensions", {}), dict[str, int]()
        for row in self.config["inputs"]:
            for place, name in enumerate(row["shape"]):
                if isinstance(name, int):
                    continue
                size, where = inputs[row["name"]].shape[place], f"size {place} ({name})"
                if size != sizes.setdefault(name, size):
                    raise InputError(row["name"], f"{where} is {size}, in another input {sizes[name]}")
                low, high = limits.get(name, (0, None))
                if size < low or (high is not None and size > high):
                    most = "or more" if high is None else f"to {high}"
                    raise InputError(row["name"], f"{where} is {size}, possible are {low} {most}")

    def _run(self, instance: Instance, inputs: Mapping[str, Value]) -> dict[str, torch.Tensor]:
        given = [
            _on(instance.device, inputs[argument.name])
            if isinstance(argument, TensorArgument)
            else argument.value  # of the call that was exported
            for argument in self._arguments
        ]
        assert self._program.call_spec.in_spec is not None
        args, kwargs = pytree.tree_unflatten(given, self._program.call_spec.in_spec)
        try:
            leaves = pytree.tree_leaves(instance.module(*args, **kwargs))
        except (AssertionError, RuntimeError) as error:
            if OWN_LIMITS.match(str(error)):
                raise InputError("inputs", str(error)) from None
            raise
        return {spec.name: leaf for spec, leaf in zip(self.outputs, leaves, strict=True)}


def _spec(row: Mapping[str, Any]) -> TensorSpec:
    shape = tuple(size if isinstance(size, int) else -1 for size in row["shape"])
    return TensorSpec(row["name"], row["datatype"], shape)


def _on(device: torch.device, value: Value) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)  # no program takes BYTES
    return value.to(device)


def _check_limits(row: Mapping[str, Any], value: Value) -> None:
    if "limits" not in row or not isinstance(value, torch.Tensor) or not value.numel():
        return
    low, high = row["limits"]
    if not bool(((value >= low) & (value <= high)).all()):  # a NaN too
        raise InputError(row["name"], f"a number is outside {low} to {high}")


def _example(row: Mapping[str, Any], sizes: Mapping[str, Any]) -> torch.Tensor:
    try:
        shape = [size if isinstance(size, int) else int(sizes[size]) for size in row["shape"]]
    except KeyError as error:
        raise InputError(str(error.args[0]), "a warm-up input gives every dimension a size") from None
    dtype = DTYPES[row["datatype"]]
    if dtype.is_floating_point:
        return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.ones(shape, dtype=dtype)
