"""Resize or release a source after the conversion: the resize raises, or the result is unchanged."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from arraybridge import convert_memory
from tests.matrix_data import bits


def check(source: Any, target: str, resize: Callable[[], object]) -> None:
    """Convert, resize, reuse possibly freed memory, and check the result again."""
    values = bits(source)
    result = convert_memory(source, target)
    with contextlib.suppress(RuntimeError, ValueError, BufferError):
        resize()
    gc.collect()
    fillers = [np.full(len(values) // 4, 3.0, np.float32) for _ in range(8)]
    more = [torch.full((len(values) // 4,), 5.0) for _ in range(8)]
    assert bits(result) == values, f"{type(source)} of {len(values)} bytes to {target}: {resize}"
    del fillers, more


for count in (1000, 1 << 20):
    for target in ("numpy", "jax", "tensorflow"):
        grown, emptied = (torch.arange(count, dtype=torch.float32) for _ in range(2))
        check(grown, target, lambda: grown.resize_(4 * count))  # noqa: B023
        check(emptied, target, lambda: emptied.untyped_storage().resize_(0))  # noqa: B023
    for target in ("numpy", "torch", "tensorflow"):
        source = jax.block_until_ready(jnp.arange(count, dtype=jnp.float32))
        check(source, target, source.delete)
