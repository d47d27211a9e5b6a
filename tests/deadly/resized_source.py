"""A source resized or released after the conversion: the resize is refused, or the result stays as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from arraybridge import convert_memory
from tests.deadly._common import report
from tests.matrix_data import bits


def check(case: str, source: Any, target: str, resize: Callable[[Any], None], values: bytes) -> None:
    """Convert, resize, reuse what may have been freed, and look at the result again."""
    result = convert_memory(source, target)
    try:
        resize(source)
    except (RuntimeError, ValueError, BufferError) as refusal:
        what = type(refusal).__name__
    else:
        what = "resized"
    gc.collect()
    litter = [np.full(len(values) // 4, 3.0, np.float32) for _ in range(8)]
    more = [torch.full((len(values) // 4,), 5.0) for _ in range(8)]
    intact = bits(result) == values
    report(case, "intact" if intact else f"WRONG after {what}")
    del litter, more


def grow_tensor(source: Any) -> None:
    source.resize_(4 * source.numel())


def empty_storage(source: Any) -> None:
    source.untyped_storage().resize_(0)


def delete_array(source: Any) -> None:
    source.delete()


for count in (1000, 1 << 20):
    values = np.arange(count, dtype=np.float32).tobytes()
    for target in ("numpy", "jax", "tensorflow"):
        for resize in (grow_tensor, empty_storage):
            tensor = torch.arange(count, dtype=torch.float32)
            check(f"torch {count} -> {target}, {resize.__name__}", tensor, target, resize, values)
    for target in ("numpy", "torch", "tensorflow"):
        source = jax.block_until_ready(jnp.arange(count, dtype=jnp.float32))
        check(f"jax {count} -> {target}, delete_array", source, target, delete_array, values)
