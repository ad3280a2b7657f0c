"""Reading the embedded default out of its package."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from scripts.import_hibari import read_graph, read_hibari, rename
from scripts.imported import MissingExtra
from server.families.hibari import Hibari
from tests.hibari import attach, imported, save


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("m.text.attn.self_attn.in_proj_weight", "acoustic.text.attention.query_key_value.weight"),
        ("pn.pro.3.dw.bias", "prosody.curve_blocks.3.depthwise.bias"),
        ("oov.layers.2.norm1.weight", "spelling.layers.2.attention_norm.weight"),
    ],
)
def test_rename(theirs, ours):
    assert rename(theirs) == ours


def test_tensors_are_exactly_those_of_the_networks(tmp_path):
    version = imported()
    wanted = {name: p.shape for name, p in Hibari(tmp_path, version.config).build().named_parameters()}
    assert {name: tensor.shape for name, tensor in version.tensors.items()} == wanted
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in version.tensors.values())


def test_config_is_json_and_licence_travels_along(tmp_path):
    version = imported()
    assert json.loads(json.dumps(version.config)) == version.config
    assert set(version.assets) == {"LICENSE", "NOTICE"}


def test_missing_onnx_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtra) as error:
        read_graph(tmp_path / "any.onnx")
    assert error.value.extra == "import-hibari"


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr("scripts.import_hibari.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="hibari-tts"):
        read_hibari()


def test_every_parameter_starts_on_meta_and_no_buffer_exists(tmp_path):
    module = Hibari(tmp_path, imported().config).build()
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert not list(module.buffers())


def test_attached_parameters_lie_inside_the_mapped_file(tmp_path):
    """A parameter outside the file would be a private copy in every worker."""
    instance = attach(save(tmp_path))
    with open("/proc/self/maps") as maps:
        rows = [line.split() for line in maps if str(tmp_path) in line]
    spans = [[int(edge, 16) for edge in row[0].split("-")] for row in rows]
    outside = [
        name
        for name, parameter in instance.module.named_parameters()
        if not any(start <= parameter.data_ptr() < end for start, end in spans)
    ]
    assert outside == []
