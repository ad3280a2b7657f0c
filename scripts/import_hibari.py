"""Read the embedded default voice out of the hibari-tts package, as tensors under our own names.

An operator's step, never part of serving: it alone needs ``onnx``. Publishing is someone else's work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from scripts.imported import ImportedVersion, MissingExtra, licence_files

VOICE = "heart"

# From the names in the package's graphs to ours, applied in order.
RENAMES = (
    (r"^pn\.dur\.0\.", "prosody.duration_in."),
    (r"^pn\.dur\.2\.", "prosody.duration_out."),
    (r"^pn\.pro_in\.", "prosody.curve_in."),
    (r"^pn\.pro\.", "prosody.curve_blocks."),
    (r"^pn\.pro_out\.", "prosody.curve_out."),
    (r"^pn\.", "prosody."),
    (r"^m\.dec_in\.", "acoustic.frames_in."),
    (r"^m\.dec\.", "acoustic.blocks."),
    (r"^m\.dec_norm\.", "acoustic.norm."),
    (r"^m\.", "acoustic."),
    (r"^oov\.pos$", "spelling.position"),
    (r"^oov\.", "spelling."),
    (r"\.emb\.", ".embedding."),
    (r"\.convs\.", ".blocks."),
    (r"\.dw\.", ".depthwise."),
    (r"\.pw1\.", ".expand."),
    (r"\.pw2\.", ".contract."),
    (r"\.attn\.", ".attention."),
    (r"\.self_attn\.in_proj_", ".query_key_value."),
    (r"\.self_attn\.out_proj\.", ".attention_out."),
    (r"\.linear1\.", ".feed_in."),
    (r"\.linear2\.", ".feed_out."),
    (r"\.norm1\.", ".attention_norm."),
    (r"\.norm2\.", ".feed_norm."),
)


def rename(name: str) -> str:
    """Return our name of a tensor that the package's graph calls *name*."""
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _bias_of(node: Any, users: dict[str, Any], biases: dict[str, Any]) -> str:
    """Follow a matrix product to the bias that is added to it; the bias has kept its name."""
    while node.op_type != "Add":
        node = users[node.output[0]]
    return next(name for name in node.input if name in biases)


def _products(graph: Any, stored: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the (out, in) float32 array of every linear map in *graph*."""
    users = {name: node for node in graph.node for name in node.input}
    for node in graph.node:
        if node.op_type == "MatMulInteger":
            quantised, zero_point = (stored[node.input[i]].astype("int32") for i in (1, 3))
            scale = stored[node.input[1].removesuffix("_quantized") + "_scale"]
            weight = (quantised - zero_point).astype("float32") * scale
        elif node.op_type == "MatMul" and node.input[1] in stored:
            weight = stored[node.input[1]]
        else:
            continue
        bias = _bias_of(node, users, stored)
        yield re.sub("bias$", "weight", bias), weight.T


def read_graph(path: Path) -> dict[str, torch.Tensor]:
    """Return the parameters in an ONNX file under its own names, dequantised to float32.

    An int8 weight is ``(q - zero_point) * scale``; its name is that of the bias it leads to, because
    the exporter names a transposed weight by a number.

    Raises:
        MissingExtra: ``onnx`` is not installed.
    """
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise MissingExtra("onnx", "import-hibari") from error
    graph = onnx.load(path).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    named = {name: array for name, array in stored.items() if re.match(r"(m|pn)\.", name)}
    named.update(_products(graph, stored))
    return {name: torch.from_numpy(array.astype("float32")).contiguous() for name, array in named.items()}


def read_hibari() -> ImportedVersion:
    """Return the voice *heart* with its spelling network, as a version of the family ``hibari``.

    Raises:
        MissingExtra: ``onnx`` or ``hibari-tts`` is not installed.
    """
    spec = find_spec("hibari")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra("hibari-tts", "import-hibari")
    assets = Path(spec.submodule_search_locations[0]) / "assets"
    voice = json.loads((assets / "voices.json").read_text("utf-8"))[VOICE]
    spelling = json.loads((assets / "oov.json").read_text("utf-8"))
    tensors = {rename(name): tensor for name, tensor in read_graph(assets / voice["file"]).items()}
    for name, tensor in read_graph(assets / "oov.onnx").items():
        tensors[rename("oov." + name.removeprefix("m."))] = tensor
    return ImportedVersion(
        family="hibari",
        config={
            "voice": {"id": VOICE, "language": voice["language"], "description": "American English, female"},
            "symbols": json.loads((assets / "vocab.json").read_text("utf-8")),
            "spelling": {
                "letters": "".join(spelling["in"]),
                "phonemes": "".join(spelling["out"]),
                "slots": spelling["slots"],
                "max_letters": spelling["maxlen"],
            },
        },
        tensors=tensors,
        # Apache-2.0 asks that its text and the package's notices travel with the weights.
        assets={path.name: path for path in licence_files("hibari-tts")},
        licence="Apache-2.0",
        source=f"hibari-tts {version('hibari-tts')}, voice {VOICE}, ONNX file of sha256 {voice['sha256']}",
    )
