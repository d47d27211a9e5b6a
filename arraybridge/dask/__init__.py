"""Apply decorated functions to Dask arrays, on the threads of one machine or on a cluster of many.

>>> import numpy as np, arraybridge
>>> from arraybridge.dask import map_blocks, to_dask
>>> @arraybridge.torch
... def halve(block):
...     return block / 2  # a torch tensor here
>>> images = to_dask(np.arange(6.0), chunks=3)
>>> map_blocks(halve, images).compute()
array([0. , 0.5, 1. , 1.5, 2. , 2.5])

Dask handles scheduling, transport and chunking. This package converts arrays inside blocks, and registers
arrays of all frameworks with Dask (`arraybridge.dask.array_registration`). The extra ``dask`` installs Dask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arraybridge.errors import FrameworkNotInstalledError

if TYPE_CHECKING:
    from arraybridge.dask.block_functions import BlockError, from_dask, map_blocks, map_overlap, to_dask
    from arraybridge.dask.cluster_workers import cluster, prepare, recoveries

__all__ = [
    "BlockError",
    "cluster",
    "from_dask",
    "map_blocks",
    "map_overlap",
    "prepare",
    "recoveries",
    "to_dask",
]


def __getattr__(name: str) -> Any:
    # Imported on first use, because Dask loads `array_registration` (an entry point) during its own import.
    if name not in __all__:
        raise AttributeError(f"module 'arraybridge.dask' has no attribute {name!r}")
    try:
        from arraybridge.dask import block_functions, cluster_workers
    except ImportError as error:
        raise FrameworkNotInstalledError(
            "arraybridge.dask needs Dask and distributed.",
            reason=str(error),
            advice='Run pip install "dask[array]" distributed cloudpickle, or pip install ".[dask]" in a'
            " checkout of arraybridge.",
        ) from error
    return getattr(cluster_workers if name in ("cluster", "prepare", "recoveries") else block_functions, name)
