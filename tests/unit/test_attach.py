"""A module owns no weight after attaching, and every way to own one is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.version_samples import WEIGHTS
from weights.attach import LISTED, attach
from weights.errors import AttachMismatch, LeftOnMeta, PrivateWeights
from weights.mapping import MappedVersion
from weights.residency import residency
from weights.verify import verify_layout
from weights.writing import write_version


class Tiny(nn.Module):
    def __init__(self, device="meta", window_device=None):
        super().__init__()
        self.linear = nn.Linear(3, 2, device=device)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("window", torch.ones(2, device=window_device), persistent=False)

    def forward(self, x):
        return self.norm(self.linear(x)) * self.window


@pytest.fixture
def mapped(tmp_path):
    torch.manual_seed(0)
    state = Tiny("cpu").state_dict()
    write_version(tmp_path / "v1", {WEIGHTS: state}, name="tiny", family="tiny", config={})
    return MappedVersion(verify_layout(tmp_path / "v1"))


def test_attached_module_computes_from_the_mapping(mapped):
    torch.manual_seed(0)
    original = Tiny("cpu").eval()
    module = attach(Tiny(), mapped.tensors(), mapped)
    x = torch.ones(4, 3)
    assert torch.equal(module(x), original(x))
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert all(mapped.contains(tensor) for tensor in module.state_dict().values())
    assert residency(mapped.paths)[mapped.paths[0]].anonymous_bytes == 0


def test_missing_and_unexpected_names_are_refused_by_name(mapped):
    tensors = mapped.tensors()
    tensors["other"] = tensors.pop("linear.bias")
    with pytest.raises(AttachMismatch, match=r"missing: linear\.bias; unexpected: other") as refusal:
        attach(Tiny(), tensors, mapped)
    assert (refusal.value.missing, refusal.value.unexpected) == (("linear.bias",), ("other",))


def test_wrong_shape_is_refused_by_name(mapped):
    tensors = mapped.tensors()
    tensors["linear.bias"] = tensors["linear.weight"]
    with pytest.raises(AttachMismatch) as refusal:
        attach(Tiny(), tensors, mapped)
    assert refusal.value.wrong_shape == ("linear.bias (2, 3), the module has (2,)",)


def test_wrong_dtype_is_refused_by_name(mapped):
    with pytest.raises(AttachMismatch) as refusal:
        attach(Tiny().to(torch.bfloat16), mapped.tensors(), mapped)
    assert "linear.bias float32, the module has bfloat16" in refusal.value.wrong_dtype


def test_refused_module_is_left_as_it_was(mapped):
    module = Tiny()
    with pytest.raises(AttachMismatch):
        attach(module, {}, mapped)
    assert module.linear.weight.is_meta
    assert module.training


def test_mismatch_lists_few_names_and_counts_all(mapped):
    names = {f"t{n}": torch.zeros(1) for n in range(1000)}
    with pytest.raises(AttachMismatch) as refusal:
        attach(Tiny(), mapped.tensors() | names, mapped)
    assert len(refusal.value.unexpected) == LISTED
    assert refusal.value.total == 1000


def test_private_weight_is_refused_by_name(mapped):
    tensors = mapped.tensors()
    tensors["linear.weight"] = tensors["linear.weight"].clone()
    with pytest.raises(PrivateWeights, match=r"linear\.weight") as refusal:
        attach(Tiny(), tensors, mapped)
    assert refusal.value.names == ("linear.weight",)


def test_private_persistent_buffer_is_refused_by_name(mapped):
    tensors = mapped.tensors()
    tensors["norm.running_mean"] = torch.zeros(2)
    with pytest.raises(PrivateWeights, match=r"norm\.running_mean"):
        attach(Tiny(), tensors, mapped)


def test_cast_on_loading_is_refused(mapped):
    module = Tiny()
    module.register_load_state_dict_post_hook(lambda module, _: module.linear.double() and None)
    with pytest.raises(PrivateWeights, match=r"linear\.bias, linear\.weight"):
        attach(module, mapped.tensors(), mapped)


def test_buffer_left_on_meta_is_refused_by_name(mapped):
    """No checkpoint holds a non-persistent buffer, so it has to be real when the module is built."""
    with pytest.raises(LeftOnMeta, match="window"):
        attach(Tiny(window_device="meta"), mapped.tensors(), mapped)


def test_two_modules_share_the_mapping(mapped):
    first = attach(Tiny(), mapped.tensors(), mapped)
    second = attach(Tiny(), mapped.tensors(), mapped)
    assert first.linear.weight.data_ptr() == second.linear.weight.data_ptr()


def test_module_of_no_parameter_attaches(mapped):
    assert attach(nn.ReLU(), {}, mapped)
