"""The family ``torch_export``: any program of `torch.export`, its weights apart, described by its manifest.

The archive holds the graph; parameters and buffers come from the version's safetensors like any other's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import InputKind, TensorArgument
from torch.utils import _pytree as pytree

from server.families.base import DTYPES, InputError, Instance, TensorSpec, Value
from server.families.batching import BatchingFamily, Prepared
from server.families.torch_export.archive import ProgramRefused, check_archive

PROGRAM = "program.pt2"
# How torch words what a program's own limits refuse, such as a size that has to be even.
OWN_LIMITS = re.compile("Expected input |Guard failed: ")
WARMUP_SIZE = 8  # of each dimension that a request chooses, where the program allows it


class TorchExport(BatchingFamily):
    """Tensors in, tensors out, by the names and shapes of ``config``.

    ``config`` has ``inputs`` and ``outputs``, lists of ``{"name", "datatype", "shape"}``, where a size that
    requests choose has a name, the same in all inputs where it has to be the same; ``dimensions`` gives
    the limits of each, ``{"batch": [1, 64]}``, the upper one null if there is none. An input may have
    ``limits``, the least and the greatest value of its elements: an index outside a table would otherwise
    be found by the operator, which cannot tell the client. ``batch`` names the dimension, the first of
    every input and output, along which requests may be joined and answers cut apart again.
    ``deterministic`` says that the same inputs always give the same outputs, which may then be kept.

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
        # Kept: torch makes a class anew each time it is asked (0.15 ms measured).
        self._call = self._program.call_spec.in_spec
        self._arguments = [spec.arg for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
        taken = [argument.name for argument in self._arguments if isinstance(argument, TensorArgument)]
        if sorted(taken) != sorted(spec.name for spec in self.inputs):
            raise ProgramRefused(f"config.inputs: the program takes {', '.join(taken)}")
        if len(signature.user_outputs) != len(self.outputs):
            raise ProgramRefused(f"config.outputs: the program gives {len(signature.user_outputs)}")
        self.deterministic = bool(config.get("deterministic", False))
        self.batches = "batch" in config
        if self.batches and not can_batch(config):
            raise ProgramRefused("config.batch: it has to be the first dimension of every input and output")

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

    def prepare(self, inputs: Mapping[str, Value], parameters: Mapping[str, Any]) -> Prepared:
        """Check sizes and limits; requests that differ in the batch dimension alone share a pass."""
        self._check_sizes(inputs)
        for row in self.config["inputs"]:
            _check_limits(row, inputs[row["name"]])
        return Prepared(key=tuple(tuple(inputs[spec.name].shape[1:]) for spec in self.inputs), content=inputs)

    def infer_batch(
        self, instance: Instance, contents: Sequence[Mapping[str, Value]]
    ) -> Sequence[Mapping[str, Value]]:
        """Run the program, as often as its limit on the batch dimension makes necessary."""
        if len(contents) == 1:
            return [self._run(instance, contents[0])]
        first = self.inputs[0].name
        _, most = self.config["dimensions"].get(self.config["batch"], (0, None))
        results: list[Mapping[str, Value]] = []
        for group in _groups([len(inputs[first]) for inputs in contents], most):
            instance.checkpoint()
            results += self._run_joined(instance, contents[len(results) :][: len(group)], group)
        return results

    def _run_joined(
        self, instance: Instance, contents: Sequence[Mapping[str, Value]], rows: Sequence[int]
    ) -> Sequence[Mapping[str, Value]]:
        """Run once on all of *contents*, of which each has its number of *rows*."""
        joined = {s.name: torch.cat([_tensor(inputs[s.name]) for inputs in contents]) for s in self.inputs}
        cut = {name: torch.split(out, list(rows)) for name, out in self._run(instance, joined).items()}
        return [{name: parts[number] for name, parts in cut.items()} for number in range(len(rows))]

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
            _tensor(inputs[argument.name]).to(instance.device)
            if isinstance(argument, TensorArgument)
            else argument.value  # of the call that was exported
            for argument in self._arguments
        ]
        assert self._call is not None
        args, kwargs = pytree.tree_unflatten(given, self._call)
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


def can_batch(config: Mapping[str, Any]) -> bool:
    """Tell whether ``batch`` names the first dimension of all that goes in and all that comes out."""
    return all(row["shape"][:1] == [config["batch"]] for row in [*config["inputs"], *config["outputs"]])


def _groups(rows: Sequence[int], most: int | None) -> Iterator[list[int]]:
    """Yield *rows* in groups whose sums are at most *most*."""
    group: list[int] = []
    for count in rows:
        if group and most is not None and sum(group) + count > most:
            yield group
            group = []
        group.append(count)
    yield group


def _tensor(value: Value) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)  # no program takes BYTES
    return value


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
