"""Read an array in a file chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from arraybridge.carriers.files import Files
from arraybridge.carriers.sources import PART_NBYTES, is_array
from arraybridge.compilers import run_eagerly

__all__ = ["chunks"]


@run_eagerly
def chunks(file: Any) -> Iterator[np.ndarray]:
    """Yield slices of an array in a file along its first axis. Each consists of whole chunks.

    Each chunk, or each shard of a sharded file, is read once, when its slice is requested. Use the slices
    with `prefetch` and `device_map` if the file is larger than memory.

    Args:
        file: A zarr array or an h5py dataset with at least one axis. Without chunks, slices of about 16 MiB
            are read.

    Returns:
        An iterator over NumPy arrays. They have the shape of the file except along the first axis.

    Raises:
        TypeError: If ``file`` is neither a zarr array nor an h5py dataset, or has no axis.

    >>> import numpy as np, zarr
    >>> file = zarr.array(np.arange(10), chunks=(4,))
    >>> [part.tolist() for part in chunks(file)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    if not Files().carries(file) or not file.shape:
        fix = "Open the file first, as in zarr.open_array(path) or h5py.File(path)[name]."
        if is_array(file) and not Files().carries(file):
            fix = "Slice an array in memory instead, as in x[i : i + 100]."
        raise TypeError(
            f"chunks() expected a zarr array or h5py dataset with an axis, got {type(file).__qualname__}."
            f" {fix}"
        )
    chunk = getattr(file, "shards", None) or file.chunks
    rows = chunk[0] if chunk else max(1, PART_NBYTES * file.shape[0] // max(1, file.nbytes))

    @run_eagerly
    def read(start: int) -> np.ndarray:
        part: np.ndarray = file[start : start + rows]
        return part

    return map(read, range(0, file.shape[0], rows))
