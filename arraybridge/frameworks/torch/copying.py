"""Copies within host memory by torch's threads, up to twice as fast as NumPy's where rows are not whole.

It imports nothing of ours: hostmemory.py, on which every room stands, uses it where torch is loaded.
"""

from __future__ import annotations

import numpy as np
from torch import from_numpy

__all__ = ["copy"]


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy ``source`` into ``target``: both writable and of one shape and dtype that torch can view."""
    from_numpy(target).copy_(from_numpy(source))
