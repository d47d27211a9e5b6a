"""Read an array of a file chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from arraybridge.carriers.files import Files

__all__ = ["chunks"]

# Of a file that has no chunks, read at a time.
_NBYTES = 16 * 2**20


def chunks(file: Any) -> Iterator[np.ndarray]:
    """The slices of a file along its first axis, each of whole chunks, read when they are asked for.

    A chunk, or a shard where the chunks lie in shards, is read once: for `prefetch` and `device_map`, over
    files that are larger than memory.

    Args:
        file: an array of zarr or h5py. Where it has no chunks, slices of about 16 MiB are read.

    Raises:
        TypeError: it is no array of zarr or h5py, or has no axis.

    >>> import numpy as np, zarr
    >>> file = zarr.array(np.arange(10), chunks=(4,))
    >>> [part.tolist() for part in chunks(file)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    if not Files().carries(file) or not file.shape:
        raise TypeError(
            f"chunks() takes an array of zarr or h5py with an axis, not {type(file).__qualname__}"
        )
    chunk = getattr(file, "shards", None) or file.chunks
    rows = chunk[0] if chunk else max(1, _NBYTES * file.shape[0] // max(1, file.nbytes))
    return (file[start : start + rows] for start in range(0, file.shape[0], rows))
