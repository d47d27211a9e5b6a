"""Decorated functions over Dask arrays, on the threads of one machine or on a cluster of many.

>>> import numpy as np, arraybridge
>>> from arraybridge.dask import map_blocks, to_dask
>>> @arraybridge.torch
... def halve(block):
...     return block / 2  # a torch tensor here
>>> images = to_dask(np.arange(6.0), chunks=3)
>>> map_blocks(halve, images).compute()
array([0. , 0.5, 1. , 1.5, 2. , 2.5])

Dask does the scheduling, the transport and the chunking; what is added is what happens inside a block, and
what Dask has to know of arrays (`arraybridge.dask.arrays`). Install it with the extra ``dask``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from arraybridge.errors import FrameworkNotInstalledError

if TYPE_CHECKING:
    from arraybridge.dask.blocks import BlockError as BlockError
    from arraybridge.dask.blocks import from_dask as from_dask
    from arraybridge.dask.blocks import map_blocks as map_blocks
    from arraybridge.dask.blocks import map_overlap as map_overlap
    from arraybridge.dask.blocks import to_dask as to_dask
    from arraybridge.dask.workers import WorkerSetup as WorkerSetup
    from arraybridge.dask.workers import cluster as cluster
    from arraybridge.dask.workers import prepare as prepare
    from arraybridge.dask.workers import recoveries as recoveries

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

# Loaded when first asked for: Dask itself loads `arrays`, by its entry point, and needs no more.
_WORKERS = ("cluster", "prepare", "recoveries", "WorkerSetup")


def __getattr__(name: str) -> Any:
    if name not in (*__all__, *_WORKERS):
        raise AttributeError(f"module 'arraybridge.dask' has no attribute {name!r}")
    try:
        for package in ("cloudpickle", "dask.array", "distributed"):
            importlib.import_module(package)
    except ImportError as error:
        raise FrameworkNotInstalledError(
            'arraybridge.dask needs Dask and distributed; run pip install "dask[array]" distributed'
            ' cloudpickle, or pip install ".[dask]" in a checkout of arraybridge.',
            reason=str(error),
        ) from error
    workers = importlib.import_module("arraybridge.dask.workers")  # teaches Dask the arrays
    return getattr(workers if name in _WORKERS else importlib.import_module("arraybridge.dask.blocks"), name)
