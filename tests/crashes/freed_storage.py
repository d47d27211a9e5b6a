"""Tensors whose storage was freed or shrunk, as by FSDP, and views of them: copies and casts raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from arraybridge import ArrayNotSupportedError, convert_memory


def tensors() -> dict[str, tuple[Any, Any]]:
    """Return each tensor with the one that owns its storage."""
    flat = torch.arange(40_000, dtype=torch.float32)
    short = torch.zeros(40_000, dtype=torch.bfloat16)
    pairs = torch.zeros(40_000, dtype=torch.complex64)
    return {
        "all of it": (flat, flat),
        "a part": (flat[10_000:20_000], flat),
        "transposed": (flat.reshape(200, 200).t()[5:50], flat),
        "bfloat16": (short[20_000:], short),
        "conjugated": (pairs[10_000:].conj(), pairs),
        "a parameter": (torch.nn.Parameter(flat[5_000:]), flat),
    }


def check(name: str, target: str, nbytes: int, options: dict[str, Any]) -> None:
    x, owner = tensors()[name]
    owner.untyped_storage().resize_(nbytes)
    with pytest.raises(ArrayNotSupportedError, match="storage"):
        convert_memory(x, target, grad="detach", **options)


for target in ("numpy", "jax", "tensorflow", "torch"):
    for options in (
        {"copy": True},
        {"dtype": "complex128"},
        *([{}, {"copy": False}] if target != "torch" else []),
    ):
        for name in tensors():
            check(name, target, 0, options)  # no plan is cached yet
            convert_memory(tensors()[name][0].clone(), target, grad="detach", dtype="complex128")
            check(name, target, 0, options)
for options in ({"copy": True}, {"dtype": "complex128"}):
    for name in tensors():
        check(name, "torch", 16, options)
