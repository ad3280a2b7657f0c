"""Make a version out of a file of `torch.export.save`; no code in it is run."""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, TensorArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from scripts.imported import ImportedVersion
from server.api.tensors import NAMES
from server.families.torch_export import PROGRAM, can_batch
from server.families.torch_export.archive import SAMPLES, ProgramRefused, check_archive


class NotServable(Exception):
    """The program does what a server of shared weights and tensors cannot do."""


def read_torch_export(file: Path, *, batch: bool = False) -> ImportedVersion:
    """Return the program in *file* as a version: its graph, and its weights apart from it.

    With *batch*, requests may be joined along the first dimension of its inputs.

    Raises:
        ProgramRefused: *file* is no archive of `torch.export.save`, or holds more than a graph and numbers.
        NotServable: it writes to its weights, or takes or gives something that is no tensor.
        OSError: *file* cannot be read.
    """
    with tempfile.TemporaryFile() as copy:
        _copy_without_samples(file, copy)
        check_archive(copy)
        copy.seek(0)
        program = torch.export.load(copy)
    _refuse_writes(program)
    config = describe(program)
    if batch:
        config["batch"] = config["inputs"][0]["shape"][0] if config["inputs"][0]["shape"] else None
        if config["batch"] not in config["dimensions"] or not can_batch(config):
            raise NotServable("requests cannot be joined: inputs and outputs do not begin with one dimension")
    return ImportedVersion(
        family="torch_export",
        config=config,
        warmup=(_example_sizes(program),),
        tensors=_untied(program.state_dict),
        assets={PROGRAM: _archive_without_weights(program)},
        source=f"{file.name}, of torch {torch.__version__}'s torch.export",
    )


def _copy_without_samples(file: Path, copy: IO[bytes]) -> None:
    """Copy the archive; its example inputs are a pickle, and loading it would load them."""
    try:
        with zipfile.ZipFile(file) as source, zipfile.ZipFile(copy, "w") as target:
            for entry in source.infolist():
                samples = SAMPLES.fullmatch(entry.filename.partition("/")[2])
                target.writestr(entry.filename, b"" if samples else source.read(entry))
    except zipfile.BadZipFile as error:
        raise ProgramRefused(f"{file.name} is no archive of torch.export.save: {error}") from None


def _refuse_writes(program: ExportedProgram) -> None:
    held = program.graph_signature.inputs_to_parameters | program.graph_signature.inputs_to_buffers
    written: set[str] = set()
    shares: dict[Node, set[str]] = {}  # the weights that a node's result may share memory with
    for node in program.graph.nodes:
        shares[node] = {held[node.name]} if node.name in held else set()
        if isinstance(node.target, torch._ops.OpOverload):
            for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
                weights = shares.get(given, set()) if isinstance(given, Node) else set()
                if argument.alias_info is not None:
                    shares[node] |= weights
                if _is_written(node, argument):
                    written |= weights
    if written:
        names = ", ".join(sorted(written))
        raise NotServable(f"it writes to {names}; weights are shared and read-only: export it in eval()")


def _is_written(node: Node, argument: Any) -> bool:
    if argument.alias_info is not None and argument.alias_info.is_write:
        return True
    # In training these keep statistics, which their schemas do not tell.
    keeps = {"aten::batch_norm": 5, "aten::instance_norm": 5}.get(node.target.name())
    return keeps is not None and argument.name.startswith("running_") and bool(node.args[keeps])


def _untied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return *state* with memory of its own for each name: the program knows tied weights by each name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        place = tensor.data_ptr()
        found[name] = tensor.detach().clone() if place in seen else tensor.detach()
        seen.add(place)
    return found


def _archive_without_weights(program: ExportedProgram) -> bytes:
    """Return the archive of *program* with every weight on the meta device, that is without bytes."""
    state = program.state_dict
    for name, tensor in state.items():
        bare = tensor.detach().to("meta")
        state[name] = torch.nn.Parameter(bare, False) if isinstance(tensor, torch.nn.Parameter) else bare
    program.example_inputs = None
    archive = io.BytesIO()
    torch.export.save(program, archive)
    return archive.getvalue()


def describe(program: ExportedProgram) -> dict[str, Any]:
    """Return the manifest's ``config``: inputs, outputs and the dimensions that requests choose.

    Raises:
        NotServable: an input or an output is no tensor, or of a datatype that the protocol lacks.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    dimensions = _dimensions(program)
    names = {expression: name for expression, (name, _) in dimensions.items()}
    inputs = [_row(spec.arg.name, spec.arg, values, names) for spec in _given(program)]
    outputs = [
        _row(name, spec.arg, values, names)
        for name, spec in zip(_output_names(program), program.graph_signature.output_specs, strict=True)
    ]
    limits = {name: _limits(program, size) for name, size in dimensions.values()}
    return {"inputs": inputs, "outputs": outputs, "dimensions": limits}


def _given(program: ExportedProgram) -> list[InputSpec]:
    """Return what a caller gives; constants of the exported call are part of the program."""
    specs = program.graph_signature.input_specs
    return [s for s in specs if s.kind is InputKind.USER_INPUT and not isinstance(s.arg, ConstantArgument)]


def _dimensions(program: ExportedProgram) -> dict[str, tuple[str, torch.SymInt]]:
    """Return our name and torch's symbol of each size that a caller chooses, by its expression."""
    given = {spec.arg.name for spec in _given(program)}
    found: dict[str, tuple[str, torch.SymInt]] = {}
    for node in program.graph.nodes:
        for size in node.meta["val"].shape if node.name in given else ():
            if not isinstance(size, int):
                found.setdefault(str(size), (f"d{len(found)}", size))
    return found


def _example_sizes(program: ExportedProgram) -> dict[str, int]:
    """Return the sizes that the program was exported with, by dimension: they surely suit it."""
    return {name: size.node.hint for name, size in _dimensions(program).values()}


def _row(name: str, argument: Any, values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(argument, TensorArgument):
        raise NotServable(f"{name} is no tensor: it is a {type(argument).__name__.removesuffix('Argument')}")
    tensor = values[argument.name]
    if tensor.dtype not in NAMES:
        raise NotServable(f"{name} is {tensor.dtype}, which the protocol does not have")
    shape = [size if isinstance(size, int) else names.get(str(size), -1) for size in tensor.shape]
    return {"name": name, "datatype": NAMES[tensor.dtype], "shape": shape}


def _limits(program: ExportedProgram, size: torch.SymInt) -> list[int | None]:
    found = program.range_constraints.get(size.node.expr)
    if found is None:
        return [0, None]
    # torch tells 2 where it only supposes that a size is not 1; what it really needs, its guards check.
    low = int(found.lower) if found.lower > 2 else 0
    return [low, int(found.upper) if found.upper.is_Integer else None]


def _output_names(program: ExportedProgram) -> Iterator[str]:
    """Yield a name for each output: its key, its place, or ``output`` where there is but one."""
    spec = program.call_spec.out_spec
    assert spec is not None
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    for path, _ in pytree.tree_flatten_with_path(tree)[0]:
        parts = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]
        named = ".".join(parts)
        yield named if named and not named[0].isdigit() else "_".join(["output", *parts])
