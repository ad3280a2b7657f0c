"""A module on the meta device and a version's mapped tensors -> a module that owns no weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from weights.errors import AttachMismatch, LeftOnMeta, PrivateWeights

LISTED = 10  # names an error carries; a wrong file can mismatch in thousands


class Holder(Protocol):
    """Who owns the weights: a `MappedVersion`, or its one copy on a device."""

    def contains(self, tensor: torch.Tensor) -> bool:
        """Tell whether *tensor*'s memory is the holder's."""
        ...


def attach(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], mapped: Holder) -> torch.nn.Module:
    """Make *tensors* the parameters and persistent buffers of *module*, and return it ready to infer.

    In ``eval()``, no gradients, and every byte of weight in the mapping. Build *module* with parameters
    on meta and buffers real: buffers that no checkpoint holds (windows, position encodings) stay as built.

    Args:
        tensors: by the module's own names; part of ``mapped.tensors()`` where modules share a version.

    Raises:
        AttachMismatch: names, shapes or dtypes differ; nothing was attached.
        LeftOnMeta: a parameter or buffer that no tensor filled.
        PrivateWeights: a parameter or persistent buffer whose memory is not the mapping's.
    """
    _check_match(module, tensors)
    # Without assign=True this would copy into the module's own memory.
    module.load_state_dict(dict(tensors), strict=True, assign=True)
    module.eval()
    module.requires_grad_(False)
    _check_filled(module)
    _check_mapped(module, mapped)
    return module


def _check_match(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    expected = module.state_dict()
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    wrong_shape, wrong_dtype = [], []
    for name in expected.keys() & tensors.keys():
        wanted, found = expected[name], tensors[name]
        if wanted.shape != found.shape:
            wrong_shape.append(f"{name} {_shape(found)}, the module has {_shape(wanted)}")
        elif wanted.dtype != found.dtype:
            wrong_dtype.append(f"{name} {_dtype(found)}, the module has {_dtype(wanted)}")
    total = len(missing) + len(unexpected) + len(wrong_shape) + len(wrong_dtype)
    if total:
        raise AttachMismatch(
            _few(missing), _few(unexpected), _few(wrong_shape), _few(wrong_dtype), total=total
        )


def _check_filled(module: torch.nn.Module) -> None:
    names = [name for name, tensor in _all_tensors(module) if tensor.is_meta]
    if names:
        raise LeftOnMeta(_few(names), len(names))


def _check_mapped(module: torch.nn.Module, mapped: Holder) -> None:
    # From the module and not from what was assigned: a hook may have cast or tied on the way.
    held = module.state_dict(keep_vars=True)
    names = [name for name, tensor in held.items() if not mapped.contains(tensor)]
    if names:
        raise PrivateWeights(_few(names), len(names))


def _all_tensors(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _few(names: list[str]) -> tuple[str, ...]:
    return tuple(sorted(names)[:LISTED])


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
