"""Classification of RESOURCE_EXHAUSTED messages, which TensorFlow and JAX share."""

from __future__ import annotations

import re

_MEMORY = re.compile(r"\bOOM\b|memory|alloc|\bHBM\b", re.IGNORECASE)
# Exhausted resources other than memory. Neither freeing caches nor splitting the batch frees them.
_OTHER_RESOURCE = re.compile(
    r"Disk quota exceeded|No space left on device|Too many open files|Too many links|Too many users"
    r"|No buffer space available|Out of streams resources|message larger than max"
    # Scratch memory of a single kernel: CUDA's shared memory and the on-chip memories of a TPU.
    r"|shared memory|memory space (?!hbm|host)\w+|scoped vmem",
    re.IGNORECASE,
)


def is_memory(text: str) -> bool:
    """Return whether a message is about memory that out-of-memory recovery can free."""
    return not is_other(text) and _MEMORY.search(text) is not None


def is_other(text: str) -> bool:
    """Return whether a message names a resource that out-of-memory recovery cannot free.

    For some messages, both this function and `is_memory` return False.
    """
    return _OTHER_RESOURCE.search(text) is not None
