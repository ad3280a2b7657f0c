"""What a body of the Open Inference Protocol says, checked against a family's tensors.

Pure: bytes in, one ``Inference`` or a refusal out; knows nothing of routes, leases or answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from server.api import tensors
from server.api.bodies import parse_json
from server.errors import InvalidBody, InvalidField, Unsupported
from server.families.base import Family, TensorSpec, Value

Parameter: TypeAlias = bool | int | float | str
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
# Triton's extensions that would change the answer: ignoring them would be a wrong answer, not a lesser one.
UNSUPPORTED = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "classification", "shared_memory_region"}
)
OWN = frozenset({"timeout", "priority", "binary_data_output"})  # ours to obey; the family gets the others
MICROSECONDS = 1_000_000
LONGEST_TIMEOUT = 2**53  # microseconds, 285 years: the whole numbers that a float holds


class OutputBody(BaseModel):
    """One output asked for, and what inputs have in common with it."""

    model_config = ConfigDict(strict=True)
    name: Name
    parameters: dict[str, Parameter] = Field(default_factory=dict)


class InputBody(OutputBody):
    """One input: its elements in ``data``, or behind the JSON with ``binary_data_size`` in ``parameters``."""

    shape: list[int]
    datatype: Name
    data: list[Any] | None = None


class InferBody(BaseModel):
    """POST .../infer. What the protocol does not name is ignored, as its servers do."""

    model_config = ConfigDict(strict=True)
    id: Annotated[str, StringConstraints(max_length=1024)] | None = None
    parameters: dict[str, Parameter] = Field(default_factory=dict)
    inputs: list[InputBody]
    outputs: list[OutputBody] = Field(default_factory=list)


@dataclass(frozen=True)
class Output:
    """One output of the answer: as bytes behind the JSON, or in it."""

    spec: TensorSpec
    binary: bool


@dataclass(frozen=True, kw_only=True)
class Inference:
    """One request that fits its family. ``timeout_s`` is the client's own limit; None is no such limit.

    ``priority`` 1 comes first, 0, the default, last (Triton's extension of schedule policies).
    """

    inputs: Mapping[str, Value]
    outputs: tuple[Output, ...]
    id: str | None = None
    parameters: Mapping[str, Parameter]
    timeout_s: float | None = None
    priority: int = 0


def parse(raw: bytes, header_length: int | None, family: Family) -> Inference:
    """Return what *raw* asks of *family*.

    Args:
        header_length: bytes of the JSON part; None when there is no other part, 0 when all of *raw* is
            the elements of the one input that *family* requires.

    Raises:
        InvalidBody, InvalidField: the first thing that is wrong with it.
        Unsupported: it asks for an extension that this server does not have.
    """
    if header_length == 0:
        return _parse_raw(raw, family)
    if header_length is not None and header_length > len(raw):
        raise InvalidBody(f"the header says {header_length} bytes of JSON, the body has {len(raw)}")
    body = parse_json(raw[:header_length], InferBody)
    _check_parameters(body)
    rest = memoryview(raw)[header_length if header_length is not None else len(raw) :]
    timeout = min(LONGEST_TIMEOUT, _whole(body.parameters, "timeout", "the request") or 0)
    priority = _whole(body.parameters, "priority", "the request") or 0
    return Inference(
        inputs=_inputs(body, rest, family),
        outputs=_outputs(body, family),
        id=body.id,
        parameters={name: value for name, value in body.parameters.items() if name not in OWN},
        timeout_s=timeout / MICROSECONDS if timeout else None,  # 0 is none, as in Triton
        priority=priority,
    )


def _parse_raw(raw: bytes, family: Family) -> Inference:
    """Triton's raw request: the shape follows from the length, every output comes back as bytes."""
    required = [spec for spec in family.inputs if not spec.optional]
    if len(required) != 1 or required[0].shape.count(-1) > 1:
        raise InvalidBody("a raw body needs a model with one required input and one size left open at most")
    (spec,) = required
    content = memoryview(raw)
    if spec.datatype == tensors.BYTES:  # one element, and without the length that would say so again
        content = memoryview(tensors.LENGTH.pack(len(raw)) + raw)
        shape = [1 if size == -1 else size for size in spec.shape]
    else:
        unit = math.prod(size for size in spec.shape if size != -1) * tensors.width(spec.datatype)
        shape = [len(raw) // max(1, unit) if size == -1 else size for size in spec.shape]
    outputs = tuple(Output(output, binary=True) for output in family.outputs)
    return Inference(
        inputs={spec.name: tensors.from_binary(spec, shape, content)}, outputs=outputs, parameters={}
    )


def _inputs(body: InferBody, rest: memoryview, family: Family) -> dict[str, Value]:
    specs = {spec.name: spec for spec in family.inputs}
    found: dict[str, Value] = {}
    for given in body.inputs:
        if given.name not in specs or given.name in found:
            what = "is there twice" if given.name in found else f"is not one of {', '.join(specs)}"
            raise InvalidField(f"the input {given.name!r} {what}", param="inputs")
        size = _whole(given.parameters, "binary_data_size", given.name)
        if size is not None and size > len(rest):
            raise InvalidField(f"{given.name}: binary_data_size {size}, but {len(rest)} bytes are left",
                               param=given.name)  # fmt: skip
        found[given.name] = _value(given, specs[given.name], None if size is None else rest[:size])
        rest = rest[size or 0 :]
    missing = [spec.name for spec in family.inputs if not spec.optional and spec.name not in found]
    if missing:
        raise InvalidField(f"missing inputs: {', '.join(missing)}", param="inputs")
    if rest:
        raise InvalidBody(f"{len(rest)} bytes are left over behind the tensors")
    return found


def _value(given: InputBody, spec: TensorSpec, content: memoryview | None) -> Value:
    if given.datatype != spec.datatype:
        raise InvalidField(
            f"{spec.name}: the datatype is {spec.datatype}, not {given.datatype}", param=spec.name
        )
    tensors.check_shape(spec, given.shape)
    if content is not None and given.data is None:
        return tensors.from_binary(spec, given.shape, content)
    if given.data is None or content is not None:
        raise InvalidField(f"{spec.name}: either data or binary_data_size", param=spec.name)
    return tensors.from_json(spec, given.shape, given.data)


def _outputs(body: InferBody, family: Family) -> tuple[Output, ...]:
    specs = {spec.name: spec for spec in family.outputs}
    default = _flag(body.parameters, "binary_data_output", default=False)
    wanted = {asked.name: _flag(asked.parameters, "binary_data", default=default) for asked in body.outputs}
    if len(wanted) != len(body.outputs) or not wanted.keys() <= specs.keys():
        raise InvalidField(f"outputs: each once, out of {', '.join(specs)}", param="outputs")
    wanted = wanted or dict.fromkeys(specs, default)
    for name, binary in wanted.items():
        if specs[name].datatype == tensors.BF16 and not binary:  # said before it is computed
            raise InvalidField(f"{name}: BF16 has no form in JSON; ask for it with binary_data", param=name)
    return tuple(Output(specs[name], binary) for name, binary in wanted.items())


def _check_parameters(body: InferBody) -> None:
    for name in _parameter_names(body):
        if name in UNSUPPORTED:
            raise Unsupported(f"the parameter {name!r} is not supported", param=name)


def _parameter_names(body: InferBody) -> Iterator[str]:
    yield from body.parameters
    mentioned: list[OutputBody] = [*body.inputs, *body.outputs]
    for tensor in mentioned:
        yield from tensor.parameters


def _flag(parameters: Mapping[str, Parameter], name: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidField(f"{name}: true or false", param=name)
    return value


def _whole(parameters: Mapping[str, Parameter], name: str, where: str) -> int | None:
    value = parameters.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise InvalidField(f"{name} of {where}: a whole number of at least 0", param=name)
    return value
