"""Tensors whose storage was freed or shrunk, as by FSDP, and views of them: all conversions raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from arraybridge import ArrayNotSupportedError, convert_memory, explain


def tensors() -> dict[str, tuple[Any, Any]]:
    """Return each tensor with the one that owns its storage."""
    flat = torch.arange(40_000, dtype=torch.float32)
    short = torch.zeros(40_000, dtype=torch.bfloat16)
    pairs = torch.zeros(40_000, dtype=torch.complex64)
    wide = torch.zeros(200, 200, dtype=torch.float64)
    return {
        "all of it": (flat, flat),
        "a part": (flat[10_000:20_000], flat),
        "the end": (flat[1:], flat),
        "transposed": (flat.reshape(200, 200).t()[5:50], flat),
        "every other one": (flat[::2], flat),
        "columns": (wide[:, :100], wide),
        "broadcast": (flat[39_999].expand(7), flat),
        "bfloat16": (short[20_000:], short),
        "conjugated": (pairs[10_000:].conj(), pairs),
        "a parameter": (torch.nn.Parameter(flat[5_000:]), flat),
    }


def needed(x: Any) -> int:
    """Return the number of bytes from the beginning of the storage to the end of the tensor."""
    elements = [(extent - 1) * step for extent, step in zip(x.shape, x.stride(), strict=True)]
    return (x.storage_offset() + sum(elements) + 1) * x.itemsize


def check(name: str, target: str, options: dict[str, Any], left: str) -> None:
    x, owner = tensors()[name]
    exact = {"none": 0, "16 bytes": 16, "its own size": x.numel() * x.itemsize, "too few": needed(x) - 1}
    if exact[left] >= needed(x):  # the tensor is at the beginning of its storage
        return
    owner.untyped_storage().resize_(exact[left])
    for call in (convert_memory, explain):
        with pytest.raises(ArrayNotSupportedError, match="storage"):
            call(x, target, grad="detach", **options)


for target in ("numpy", "jax", "tensorflow", "torch"):
    for options in (
        {"copy": True},
        {"dtype": "complex128"},
        *([{}, {"copy": False}] if target != "torch" else []),
    ):
        for name in tensors():
            check(name, target, options, "none")  # no plan is cached yet
            whole = tensors()[name][0].detach().contiguous().resolve_conj()
            for _ in range(2):
                convert_memory(whole, target, **{**options, "copy": options.get("copy") or None})
            # The fast path misses a view whose size is that of its shortened storage.
            shares = "dtype" not in options and not options.get("copy")
            for left in ("none", "16 bytes", "too few", *([] if shares else ["its own size"])):
                check(name, target, options, left)

# A tensor that its resized storage still contains is shared as before.
x = torch.arange(100.0)
part = x[10:20]
x.untyped_storage().resize_(80)
assert explain(part, "numpy").shares_memory
assert convert_memory(part, "numpy").tolist() == [*range(10, 20)]
