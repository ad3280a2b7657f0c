"""What a ``torch.export`` archive may hold to be read by a server: a graph and raw numbers, no code.

``torch.export.load`` unpickles what an archive asks it to, evaluates its expressions as Python and looks
its operators up by any path. This refuses all that before it gets to see the archive. Pure but for the read.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

# Entries, below the archive's own top directory. Weights are here without bytes, samples not at all.
GRAPH = re.compile(r"models/\w+\.json")
SAMPLES = re.compile(r"data/sample_inputs/\w+\.pt")
PAYLOADS = re.compile(r"data/(weights|constants)/\w+_config\.json")
RAW = re.compile(
    r"data/(weights/weight_\d+|constants/tensor_\d+)|archive_(format|version)|byteorder"
    r"|\.data/(version|serialization_id)|\.format_version|\.storage_alignment"
)
MAX_JSON_BYTES = 256 << 20  # a graph has some hundred bytes a node
OPERATORS = re.compile(
    r"torch\.ops\.(aten|prims|prim|higher_order)\.\w+(\.\w+)?|torch\.(sym_\w+|_check\w*)|(_operator|math)\.\w+"
)
FROM_FILES = re.compile(r"torch\.ops\.aten\.from_file\b")
CONTAINERS = {None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}

ARITHMETIC = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Constant, ast.Load, ast.operator,
    ast.unaryop, ast.boolop, ast.cmpop, ast.keyword, ast.Call, ast.Name, ast.Subscript, ast.Attribute,
)  # fmt: skip
SIZES = {"size", "stride", "storage_offset", "ndimension", "dim"}  # what guards ask of an input


class ProgramRefused(Exception):
    """The archive holds what a server does not read."""

    reason = "program_refused"


def check_archive(file: Path | BinaryIO) -> None:
    """Refuse the archive *file* unless reading it runs nothing that it brought along.

    Raises:
        ProgramRefused: names the entry and what is wrong with it.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                _check_entry(archive, entry)
    except ProgramRefused:
        raise
    except Exception as error:  # whatever a broken archive makes zipfile and json raise
        raise ProgramRefused(f"not a torch.export archive: {type(error).__name__}: {error}") from None


def _check_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    name = entry.filename.partition("/")[2]
    if RAW.fullmatch(name) or (SAMPLES.fullmatch(name) and not entry.file_size):
        return
    if entry.file_size > MAX_JSON_BYTES:
        raise ProgramRefused(f"{name}: over {MAX_JSON_BYTES} bytes")
    if GRAPH.fullmatch(name):
        for problem in _problems_of_graph(json.loads(archive.read(entry))):
            raise ProgramRefused(f"{name}: {problem}")
    elif PAYLOADS.fullmatch(name):
        for tensor, payload in json.loads(archive.read(entry))["config"].items():
            if payload["use_pickle"] is not False or not payload["path_name"].startswith(
                ("weight_", "tensor_")
            ):
                raise ProgramRefused(f"{name}: {tensor!r} is pickled")
    else:
        raise ProgramRefused(f"{name}: an entry that no program needs")


def _problems_of_graph(graph: Any) -> Iterator[str]:
    """Yield what of *graph* would be more than arithmetic on tensors."""
    for table in _tables(graph):
        if "target" in table and "inputs" in table:
            target = str(table["target"])
            if not OPERATORS.fullmatch(target) or FROM_FILES.match(target):
                yield f"the operator {target!r} is not one of torch's own"
        for key, value in table.items():
            if key == "expr_str" and not is_arithmetic(str(value)):
                yield f"the size {str(value)!r:.200} is no arithmetic"
            elif key == "guards_code":
                yield from (
                    f"the guard {g!r:.200} is no comparison" for g in value if not is_arithmetic(str(g))
                )
            elif isinstance(value, str) and key in ("in_spec", "out_spec", "treespec"):
                yield from _problems_of_containers(json.loads(value))


def _problems_of_containers(spec: Any) -> Iterator[str]:
    for table in _tables(spec):
        if "children_spec" in table and table.get("type") not in CONTAINERS:
            yield f"inputs or outputs in a {table['type']}"
        if "__enum__" in str(table.get("context")):
            yield "inputs or outputs under keys that are not text"


def _tables(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object inside *value*."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield item
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)


def is_arithmetic(text: str) -> bool:
    """Tell whether *text* is an expression over sizes and symbols that calls nothing else.

    Calls are to names of sympy's and torch's classes, which begin with a capital letter, to min and max,
    or ask an input for its sizes; text inside is a plain word.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return all(_is_arithmetic_node(node) for node in ast.walk(tree))


def _is_arithmetic_node(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) or bool(re.fullmatch(r"\w+", str(node.value), re.ASCII))
    if isinstance(node, ast.Attribute):
        return node.attr in SIZES
    if isinstance(node, ast.Name):
        return bool(re.fullmatch(r"L|min|max|[a-z]+\d+|[A-Z][A-Za-z]*", node.id))
    return isinstance(node, ARITHMETIC)
